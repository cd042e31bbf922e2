"""Pages on the simulated device: those that running requests hold, and a cache of others."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from mainstem.kv.policy import PolicyConfig, TierPolicy
from mainstem.sched.starting import Outlook, OutputLengths
from mainstem_simulate.trace_records import TraceRequest


@dataclass(slots=True)
class _Held:
    """The pages of a running request."""

    pages: list[int]
    to_come: deque[int]  # of its answer, that are kept
    num_own: int  # pages that no other request had before it
    output_tokens: int
    num_output: int = 0  # tokens so far, in whole pages


class Device:
    """A cache of whole pages. `holds`: running requests take their room from it, as in the engine:
    a request starts when its prompt has room, and the answers of all that run probably will."""

    def __init__(self, config: PolicyConfig, page_tokens: int, *, holds: bool) -> None:
        self.policy: TierPolicy[int] = TierPolicy(config)
        self._num_pages, self._page_tokens, self._holds = config.tier_pages[0], page_tokens, holds
        self._held: dict[int, _Held] = {}  # by ticket
        self._users: Counter[int] = Counter()  # of each page that is held
        self._lengths = OutputLengths()
        self._unnamed = count(-1, -1)  # pages that are not kept

    def may_start(self, request: TraceRequest) -> bool:
        """Whether a request may start beside those that run."""
        if not self._held:
            return True
        found = self.policy.match(request.keys)
        num_held = len(self._users) + sum(page not in self._users for page in request.keys[:found])
        likely, page_tokens = self._lengths.likely, self._page_tokens
        running = self._held.values()
        left = [(each.num_output, each.output_tokens - each.num_output) for each in running]
        remaining = [max(0, min(max(likely - so_far, page_tokens), most)) for so_far, most in left]
        own = [each.num_own for each in running]
        outlook = Outlook.of(np.array(remaining, np.int32), np.array(own, np.float32), page_tokens)
        num_new = request.input_tokens // page_tokens + 1 - found
        expected = min(likely, request.output_tokens)
        return outlook.may_start(num_new, expected, self._num_pages - num_held)

    def start(self, ticket: int, request: TraceRequest, now: float) -> None:
        """A request takes all pages of its prompt, and the next one."""
        if not self._holds:
            return
        num_pages = request.input_tokens // self._page_tokens
        num_own = num_pages - self.policy.match(request.keys)
        to_come = deque(request.kept[len(request.keys) :])
        held = self._held[ticket] = _Held([], to_come, num_own, request.output_tokens)
        unnamed = islice(self._unnamed, num_pages - len(request.keys))
        self._hold(held, [*request.keys, *unnamed], now)
        self._add_page(held, now)

    def grow(self, tickets: Iterable[int], now: float) -> None:
        """The answers of these requests have grown by a page."""
        if self._holds:
            for ticket in tickets:
                held = self._held[ticket]
                held.num_output += self._page_tokens
                self._add_page(held, now)

    def _add_page(self, held: _Held, now: float) -> None:
        held.num_own += 1
        self._hold(held, [held.to_come.popleft() if held.to_come else next(self._unnamed)], now)

    def _hold(self, held: _Held, pages: Sequence[int], now: float) -> None:
        self.policy.admit(pages, now)
        self.policy.hold(pages)
        held.pages += pages
        self._users.update(pages)

    def end(self, ticket: int, request: TraceRequest, now: float) -> None:
        """A request has ended: its pages may be evicted."""
        if self._holds:
            self._lengths.observe(request.output_tokens)
            pages = self._held.pop(ticket).pages
            self._users -= Counter(pages)
            self.policy.let_go([page for page in pages if page not in self._users])
            self.policy.drop([page for page in pages if page < 0])
        self.policy.finish(ticket, request.kept, now)
