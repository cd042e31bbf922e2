"""Finds the row that makes workers die, by halves.

    a worker dies --> its started rows are suspects --> each half is tried alone --+--> answered
                                        ^                                          |
                                        '------ in halves again <--- dies again ---+
                                                     one row, alone: dies again, and again: at fault

Workers also die by chance, so that one death says little about a row. A row is at fault only if
workers died MOST_DEATHS_ALONE times while they had no other row. These are different workers if
another one asks in time, because one of them may be broken.
"""

from collections import deque
from collections.abc import Sequence
from time import monotonic

from mainstem.batch.bundles import Task

OTHERS_FIRST_S = 5.0  # how long a row waits for another worker than the one that died of it
MOST_DEATHS_ALONE = 3  # of workers that had one row only; then that row is at fault


class Suspects:
    """Rows whose worker died, in groups that are to be tried alone. Used by one thread."""

    def __init__(self) -> None:
        self._groups: deque[tuple[Sequence[Task], float]] = deque()  # and since when

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, tasks: Sequence[Task]) -> None:
        """Add rows whose worker died while they were running."""
        for task in tasks:
            task.is_suspect = True
        middle = (len(tasks) + 1) // 2
        halves, now_s = (tasks[:middle], tasks[middle:]), monotonic()
        self._groups += [(half, now_s) for half in halves if half]

    def add_untried(self, tasks: Sequence[Task]) -> None:
        """Put back a group that was taken and not tried."""
        if tasks:
            self._groups.append((tasks, monotonic()))

    def take(self, worker: int, is_only: bool) -> Sequence[Task]:
        """Return a group for a worker that has no rows, and gets no others meanwhile. A row that
        this worker was the last to die of is for others, if there are any and one asks in time."""
        now_s = monotonic()
        for place, (group, since_s) in enumerate(self._groups):
            is_last_victim = len(group) == 1 and worker in group[0].deaths_alone[-1:]
            if is_only or not is_last_victim or now_s - since_s >= OTHERS_FIRST_S:
                del self._groups[place]
                return group
        return ()


def is_at_fault(task: Task, worker: int) -> bool:
    """Record that a worker died while it had only this row; returns whether the row is to blame."""
    task.deaths_alone.append(worker)
    return len(task.deaths_alone) >= MOST_DEATHS_ALONE
