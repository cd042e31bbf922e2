"""The remaining rows of a job with many workers: bundles of rows, by share.

share 0   | bundle | bundle | bundle | ...     its worker takes from the front
share 1   | bundle | bundle | ... | bundle |   idle workers steal from the end
returned  | rows that workers gave back        any worker takes these first
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mainstem.batch.files import Line
from mainstem.batch.ordering import (
    LengthEstimate,
    PlannedRows,
    PlannedWindow,
    output_limits,
)
from mainstem.batch.rows import Row
from mainstem.core.plan import Int64s, Plan
from mainstem.plan.cut import cut_plan


@dataclass(slots=True, eq=False)
class Task:
    """A row for a worker, and the rows that get the same answer."""

    row: Row
    copies: list[Row]
    line: Line  # as it was read
    template: int
    num_faults: int = 0  # of engines that live on
    is_suspect: bool = False  # a worker died while it had this row
    deaths_alone: list[int] = field(default_factory=list)  # workers that died with only this row


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tasks in the order to run them."""

    tasks: Sequence[Task]
    seconds: float  # an estimate


class Bundles:
    """Decides which worker answers which rows next (work stealing). Used by one thread."""

    def __init__(self, num_workers: int) -> None:
        self._shares: list[deque[Bundle]] = [deque() for _ in range(num_workers)]
        self._seconds = [0.0] * num_workers  # remaining work of each share
        self._returned: deque[Bundle] = deque()

    def __bool__(self) -> bool:
        return bool(self._returned) or any(self._shares)

    def add(self, worker: int, bundle: Bundle) -> None:
        """Append to a worker's share."""
        self._shares[worker].append(bundle)
        self._seconds[worker] += bundle.seconds

    def give_back(self, tasks: Sequence[Task]) -> None:
        """Put back tasks that were taken and not answered."""
        if tasks:
            self._returned.append(Bundle(tasks, 0.0))

    def take(self, worker: int) -> Bundle | None:
        """Return rows that were given back, or else the next bundle of the worker's own share."""
        if self._returned:
            return self._returned.popleft()
        if not self._shares[worker]:
            return None
        bundle = self._shares[worker].popleft()
        self._seconds[worker] -= bundle.seconds
        return bundle

    def take_from_others(self) -> Bundle | None:
        """Steal the last bundle of the share with the most remaining work."""
        places = [place for place, share in enumerate(self._shares) if share]
        if not places:
            return None
        longest = max(places, key=self._seconds.__getitem__)
        bundle = self._shares[longest].pop()
        self._seconds[longest] -= bundle.seconds
        return bundle


def cut_window(
    planned: PlannedWindow,
    lines: dict[int, Line],
    num_workers: int,
    estimate: LengthEstimate,
) -> list[tuple[int, Bundle]]:
    """Return the bundles of a window, each with its worker. Lines of their rows are removed from
    `lines`."""
    rows, found = planned.window.rows, []
    parts = [_in_input_order(planned)] if planned.parts is None else planned.parts
    for part in parts:
        expected = estimate.outputs.expect(part.templates, part.limits)
        cut = cut_plan(part.plan, part.lengths, expected, num_workers)
        members = part.plan.members
        bounds = (cut.workers, cut.begins, cut.ends, cut.seconds)
        for worker, begin, end, seconds in zip(*(b.tolist() for b in bounds), strict=True):
            tasks = []
            for member in members[begin:end].tolist():
                index = int(part.row_indices[member])
                row = rows[index]
                copies = [rows[copy] for copy in planned.copies[index]]
                for copy in copies:
                    del lines[copy.line]
                template = int(part.templates[member])
                tasks.append(Task(row, copies, lines.pop(row.line), template))
            found.append((worker, Bundle(tasks, seconds)))
    return found


def _in_input_order(planned: PlannedWindow) -> PlannedRows:
    """The plan if planning is off: rows in input order, nothing shared."""
    indices: Int64s = np.array(list(planned.copies), dtype=np.int64)
    rows = [planned.window.rows[index] for index in indices.tolist()]
    zero, none = np.zeros(1, dtype=np.int64), np.zeros(len(indices), dtype=np.int64)
    places = np.arange(len(indices) + 1)
    return PlannedRows(
        row_indices=indices,
        lengths=planned.window.prompts.num_tokens[indices],
        limits=output_limits(rows),
        templates=none,
        salts=none,
        plan=Plan(
            members=places[:-1],
            member_nodes=none,
            group_starts=places,
            group_nodes=none,
            node_parents=zero,
            node_tokens=zero,
            node_begins=zero,
            node_ends=zero + len(indices),
            node_is_span=np.zeros(1, dtype=np.bool_),
        ),
    )
