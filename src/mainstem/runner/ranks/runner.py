"""RankedRunner: runs Steps on ranks that each have a part of the model."""

from contextlib import ExitStack
from os import getpid
from weakref import finalize

from mainstem.core.step import Step, StepResult
from mainstem.runner.ranks.group import RankGroup
from mainstem.runner.ranks.protocol import Loaded
from mainstem.runner.ranks.shared_memory import SharedMemory


class RankedStep:
    """A step that was sent to every rank."""

    def __init__(self, ranks: RankGroup, number: int) -> None:
        self._ranks = ranks
        self._number = number

    def wait(self) -> StepResult:
        """Return the result of rank 0; the other ranks have the same result."""
        return self._ranks.take_result(self._number)

    def has_ended(self) -> bool:
        return self._ranks.num_ended > self._number


class RankedRunner:
    """Runs each step on all ranks. Owns their processes, and the memory that pages are saved to.

    If a rank is lost, `launch` and `check` raise EngineLost, which names the rank. If a runner is
    dropped without `close`, its ranks are killed, so that they release their devices.
    """

    def __init__(
        self, ranks: RankGroup, loaded: Loaded, memory: SharedMemory, opened: ExitStack
    ) -> None:
        """`loaded` is what the ranks reported about themselves; `opened` is closed after the
        ranks."""
        self.ranks = ranks
        self.memory = memory
        self.page_bytes = loaded.page_bytes  # bytes of a rank's part of a page
        self.num_layers = loaded.num_layers
        self.can_overlap = loaded.can_overlap
        self._opened = opened
        finalize(self, _end_dropped, ranks, opened, getpid())

    def launch(self, step: Step) -> RankedStep:
        """Send the step; see Runner in core.step."""
        return RankedStep(self.ranks, self.ranks.launch(step))

    def drain(self) -> None:
        """See Runner in core.step."""
        self.ranks.wait_steps()

    def check(self) -> None:
        """See Runner in core.step."""
        self.ranks.check()

    def close(self) -> None:
        """End the ranks."""
        self.drain()
        self.ranks.close()
        self._opened.close()


def _end_dropped(ranks: RankGroup, opened: ExitStack, owner: int) -> None:
    if getpid() == owner:  # not in a fork of the process that started the ranks
        ranks.kill()
        opened.close()
