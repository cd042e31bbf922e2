"""Questions to tiers that other processes fill: which of these pages do you have?

A shared tier does not list its pages, so it is asked. An answer may take long: a request that would
wait too long for it starts without it, and the answer serves the next request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from mainstem.core.ids import PageKey
from mainstem.kv.tier import LowerTier

MAX_ASKED = 4096  # maximum pages in one question
SURE = 1.5  # a request waits for an answer only if it has time for this many round trips


@dataclass(slots=True, eq=False)
class _Question:
    """Pages that shared tiers were asked for."""

    asked_s: float
    num_open: int  # tiers that have not answered
    give_up_s: float = float("inf")  # when requests stop waiting for the answer
    is_late: bool = False


class Questions:
    """Open questions. The key of a question is the last page that it asks for."""

    def __init__(self, tiers: Sequence[LowerTier]) -> None:
        self._tiers = tiers
        self._open: dict[PageKey, _Question] = {}

    def ask(self, keys: Sequence[PageKey]) -> PageKey | None:
        """Ask for pages, in chain order, that are not stored here; returns the key of the answer.
        None if there is nothing to ask, or no tier that could be asked."""
        tiers = [tier for tier in self._tiers if tier.is_open]
        asked = keys[:MAX_ASKED]
        if not tiers or not asked:
            return None
        if asked[-1] not in self._open:
            self._open[asked[-1]] = _Question(monotonic(), len(tiers))
            for tier in tiers:
                tier.ask(asked)
        return asked[-1]

    def is_open(self, key: PageKey) -> bool:
        """Whether an answer is still expected, late or not."""
        return key in self._open

    def awaits(self, key: PageKey, most_s: float) -> bool:
        """Whether a request should wait for the answer, because it is expected within `most_s`. The
        wait ends with the answer, or after `most_s`."""
        question = self._open.get(key)
        if question is None or question.is_late:
            return False
        if SURE * max(tier.link.round_trip_s for tier in self._tiers) > most_s:
            return False
        question.give_up_s = min(question.give_up_s, question.asked_s + most_s)
        return True

    def note_answer(self, key: PageKey) -> bool:
        """Record the answer of a tier; returns whether all tiers have answered."""
        question = self._open[key]
        question.num_open -= 1
        if not question.num_open:
            del self._open[key]
        return not question.num_open

    def take_late(self) -> list[PageKey]:
        """Return the questions whose wait is over; each is returned once."""
        if not self._open:
            return []
        now_s = monotonic()
        late = [k for k, q in self._open.items() if not q.is_late and now_s >= q.give_up_s]
        for key in late:
            self._open[key].is_late = True
        return late
