"""Truncation by attention: drops the pages that the last tokens of a conversation attend to least.

    before    | sink |       candidates       | recent tokens        |   what the last cut left
    weighed   | sink |       candidates       | ... | last 64 tokens |   what is read once more
    cut       the candidates with the least attention are dropped, as many as a plain cut would drop

An extra sequence, which gives no answer, reads the last tokens once more, on top of the cached
pages and at positions inside the window. If the conversation is too long for that, the tokens
before the last ones are left out; they are recent, so they are kept anyway.

Which pages a cut has dropped cannot be seen from the prompt. The choice is remembered, by session
and by the tokens that a plain cut would have dropped, so that a later turn is cut in the same way.
If a choice was forgotten (after a restart, or after MAX_CHOICES others), a plain cut is assumed.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from mainstem.core.request import Delivery, Overflow, Request, SamplingParams
from mainstem.core.step import Float32s, Int32s
from mainstem.sched.cut import PromptCut

QUERY_TOKENS = 64  # the attention of at most this many last tokens decides
QUERY_SHARE = 6  # these are at most 1/6 of the window without the sink
MAX_CHOICES = 1024  # each has up to 8 bytes for every page of the window


@dataclass(slots=True, eq=False)
class Weighing:
    """A cut that waits until attention to the candidates is known. An extra sequence, the reader,
    weighs them; the answers are parked on this record meanwhile."""

    name: bytes  # name of the cut
    before: PromptCut  # what earlier cuts have left
    earlier: tuple[PromptCut, ...]  # the earlier cuts
    num_pages: int  # pages of `before` up to the end of the candidates
    num_dropped: int  # pages to drop
    num_queries: int
    prompt_ids: Int32s  # the tokens that are read
    given: Request
    masses: Float32s = field(default_factory=lambda: np.zeros(0, np.float32))  # by page

    @property
    def num_reused(self) -> int:
        """Leading tokens whose KV is used as it is; the others are computed."""
        return len(self.prompt_ids) - self.num_queries

    def request(self) -> Request:
        """Return the request of the sequence that reads. Its answer is one token, which is
        ignored."""
        given = self.given
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        return Request(
            given.request_id,
            self.prompt_ids,
            sampling,
            salt=given.salt,
            public_tokens=min(given.public_tokens, self.num_reused),
            priority=given.priority,
            expected_tokens=1,
            session=given.session,
            overflow=Overflow.ERROR,
            delivery=Delivery.AT_END,
        )

    def restart(self) -> None:
        """Forget the attention so far, because the sequence that reads starts again."""
        self.masses = np.zeros(0, np.float32)

    def add(self, masses: Float32s) -> None:
        """Add the attention of some queries; later queries see more pages."""
        total = masses.copy()
        total[: len(self.masses)] += self.masses
        self.masses = total

    def choose(self) -> PromptCut:
        """Return the cut without the candidates that got the least attention. On a tie, the oldest
        are dropped."""
        sink = self.before.sink_pages
        order = np.argsort(self.masses[sink : self.num_pages], kind="stable")
        return self.before.without(set((sink + order[: self.num_dropped]).tolist()))


class Choices:
    """The cuts that were chosen, up to MAX_CHOICES; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._cuts: OrderedDict[bytes, PromptCut] = OrderedDict()

    def chosen(self, name: bytes, num_pages: int) -> PromptCut | None:
        """Return the cut of this name. None if there is none, or if the prompt's `num_pages` are
        too few for the cut, because the user went back to an earlier turn."""
        cut = self._cuts.get(name)
        if cut is None or cut.rest > num_pages:
            return None
        self._cuts.move_to_end(name)
        return cut

    def keep(self, name: bytes, cut: PromptCut) -> None:
        """Remember a choice."""
        self._cuts[name] = cut
        self._cuts.move_to_end(name)
        if len(self._cuts) > MAX_CHOICES:
            self._cuts.popitem(last=False)


def cut_names(request: Request, sink_pages: int, step: int, page_size: int) -> Iterator[bytes]:
    """Return the name of each cut of a conversation, first to last. A name is made from session,
    salt, sizes, and the tokens up to where a plain cut would be. A plain cut drops the oldest
    `step` pages after the sink."""
    digest = sha256(b"important")
    for part in (str(request.session).encode(), request.salt, b"%d %d" % (sink_pages, step)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    ids, end = request.prompt_ids, 0
    for rest in range(sink_pages + step, len(ids) // page_size + 1, step):
        begin, end = end, rest * page_size
        digest.update(ids[begin:end].tobytes())
        yield digest.copy().digest()


def weigh(
    name: bytes, given: Request, cuts: tuple[PromptCut, ...], step: int, window: int, page_size: int
) -> Weighing | None:
    """Return how to find the cut after `cuts` (the first of `cuts` drops nothing). None if there is
    no choice, because there are at most `step` candidates and `step` pages must be dropped."""
    before = cuts[-1]
    left = before.token_ids(given.prompt_ids, page_size)
    num_free = window - before.sink_pages * page_size
    num_queries = min(QUERY_TOKENS, max(1, num_free // QUERY_SHARE))
    num_read = min(len(left), window - 1) - num_queries
    num_pages = num_read // page_size
    if num_pages - before.sink_pages <= step:
        return None
    prompt_ids = np.concatenate([left[:num_read], left[-num_queries:]])
    return Weighing(name, before, cuts[1:-1], num_pages, step, num_queries, prompt_ids, given)
