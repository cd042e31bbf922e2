"""The router of many replicas: prefix-affine, with bounded loads.

A request goes to the replica with the lowest cost: its open work plus the tokens of the prompt that
it would have to compute. So a prompt goes to the replica that holds most of it, until waiting there
costs more than computing the prompt on another replica, which then holds it, too.

    cost[i] = open work + NEW_COST * new tokens of the prompt + recent work / SPREAD      (tokens)

- Work is counted in prompt tokens; a token of an answer costs as much as `output_cost` of them.
- Bounded load: a replica is not chosen if its open work would exceed LOAD_BOUND times the mean plus
the work of FREE_REQUESTS requests like this one. The least loaded replica is always below this
bound, so some replica can be chosen. Pages that a replica holds lower its cost under any load.
- Recent work, which decays, decides between replicas with otherwise equal costs: new prompts are
spread over all replicas instead of going to the first idle one.
- A session stays at its replica as long as the replica is up and below the bound. A session with
must_stay can be answered only there: while its replica is down or refuses it, requests fail.
- The router learns where a session is, and what a replica holds, only when a request is answered.
Until then the request's pages count as coming, so that others with these pages go there, too.
- A draining replica gets only requests that must stay there. A replica that was down is assumed to
hold its pages, unless `forget` is called.

Memory is bounded: the router keeps page hashes of each replica (held and coming), sessions, and
counts.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

import numpy as np
from numpy.typing import NDArray

from mainstem.core.errors import ConfigError, MainstemError
from mainstem.ray.holdings import Holdings, PageHash

LOAD_BOUND = 1.25
FREE_REQUESTS = 2.0
NEW_COST = 6.0  # above 1: computing again what another replica holds delays all later requests
SPREAD = 64.0
RECENT_REQUESTS = 64.0  # recent work is that of about the last 64 requests of a replica
FIRST_OUTPUT_TOKENS = 256.0  # assumed length of an answer, until some have ended
OUTPUT_MEMORY = 0.01  # weight of one more answer in the mean length

Floats = NDArray[np.float64]


class RouterKind(Enum):
    AFFINE = "affine"
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"


class ReplicaState(Enum):
    UP = "up"
    DRAINING = "draining"  # finishes its requests, gets no new ones except those that must stay
    DOWN = "down"


class NoReplica(MainstemError):
    """No replica can take a request; the message says why."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Bounds and costs."""

    kind: RouterKind = RouterKind.AFFINE
    page_tokens: int = 512  # tokens of a page, as hashed by the caller
    pages_per_replica: int = 1 << 14  # maximum pages that a replica is thought to hold
    max_sessions: int = 1 << 17  # beyond this, the least recently used session is forgotten
    output_cost: float = 5.0  # cost of a token of an answer, in tokens of a prompt
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("page_tokens", "pages_per_replica", "max_sessions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.output_cost > 0:
            raise ConfigError(f"output_cost must be above 0, got {self.output_cost}")


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router knows about a request."""

    pages: Sequence[PageHash]  # chained hashes of the prompt's leading pages
    prompt_tokens: int
    session: Hashable | None = None
    app: str | None = None
    must_stay: bool = False  # only the session's replica can answer: it has the conversation


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was sent to a replica."""

    replica: int
    request: RouteRequest
    held_tokens: int  # prompt tokens that the replica probably holds
    prompt_work: float  # open work of the prompt, in tokens
    output_work: float
    is_learned: bool = False


class Router:
    """Chooses replicas and counts their work. One thread uses it.

    Each ticket of `choose` is given to `finish` exactly once; if its replica answers, it is given
    to `learn` before.
    """

    def __init__(self, num_replicas: int, config: RouterConfig | None = None) -> None:
        if num_replicas < 1:
            raise ConfigError(f"a router needs at least one replica, got {num_replicas}")
        self._config = config or RouterConfig()
        self._states = [ReplicaState.UP] * num_replicas
        self._holdings = Holdings(num_replicas, self._config.pages_per_replica)
        self._coming = Holdings(num_replicas, self._config.pages_per_replica)  # not answered yet
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()  # least recently used first
        self._apps: dict[str, frozenset[int]] = {}  # apps that are only on some replicas
        self._open = np.zeros(num_replicas)  # tokens of work
        self._recent = np.zeros(num_replicas)
        self._fading = 1 - 1 / (RECENT_REQUESTS * num_replicas)
        self._num_open = [0] * num_replicas
        self._output_tokens = FIRST_OUTPUT_TOKENS
        self._random = Random(self._config.seed)
        self._turn = 0

    # --- replicas -------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        return len(self._states)

    def state(self, replica: int) -> ReplicaState:
        return self._states[replica]

    def set_state(self, replica: int, state: ReplicaState) -> None:
        """Set the state of a replica. A replica that is down or draining may still hold its
        pages."""
        self._states[replica] = state

    def forget(self, replica: int) -> None:
        """Record that a replica was restarted: it has lost its pages."""
        self._holdings.forget(replica)
        self._recent[replica] = 0.0

    def place_app(self, app: str, replicas: Sequence[int]) -> None:
        """Record that an app is on these replicas only."""
        if not replicas or not all(0 <= replica < self.num_replicas for replica in replicas):
            raise ConfigError(
                f"app {app}: replicas must be numbers from 0 to {self.num_replicas - 1}"
            )
        self._apps[app] = frozenset(replicas)

    def set_capacity(self, replica: int, num_tokens: int) -> None:
        """Record how many tokens a replica can hold; `pages_per_replica` stays the upper limit."""
        num_pages = max(1, num_tokens // self._config.page_tokens)
        self._holdings.bound(replica, min(num_pages, self._config.pages_per_replica))

    def open_work(self, replica: int) -> float:
        """Estimated work that a replica has to do, in prompt tokens."""
        return float(self._open[replica])

    def num_open(self, replica: int) -> int:
        return self._num_open[replica]

    def num_pages(self, replica: int) -> int:
        """Pages that a replica is thought to hold."""
        return self._holdings.num_pages(replica)

    # --- requests -------------------------------------------------------------------------------

    def choose(self, request: RouteRequest, excluded: frozenset[int] = frozenset()) -> Ticket:
        """Choose the replica for a request, whose work counts as open from now on. Replicas in
        `excluded` have failed to answer it already. Raises NoReplica.
        """
        home = self._sessions.get(request.session) if request.must_stay else None
        if home is not None:
            if home in excluded or self._states[home] is ReplicaState.DOWN:
                raise NoReplica(f"replica {home}, which has the conversation, cannot answer")
            return self._open_at(home, request, 0)
        able = self._able(request, excluded)
        match self._config.kind:
            case RouterKind.AFFINE:
                replica, held_tokens = self._nearest(request, able)
            case RouterKind.RANDOM:
                replica, held_tokens = self._random.choice(able), 0
            case RouterKind.ROUND_ROBIN:
                replica, held_tokens = self._next_in_turn(able), 0
        return self._open_at(replica, request, held_tokens)

    def learn(self, ticket: Ticket) -> None:
        """Record that a replica answers a request: it will hold the prompt and the session."""
        replica, request = ticket.replica, ticket.request
        ticket.is_learned = True
        self._recent *= self._fading
        self._recent[replica] += ticket.prompt_work + ticket.output_work
        if self._config.kind is RouterKind.AFFINE:
            self._coming.remove(replica, request.pages)
            self._holdings.note(replica, request.pages)
        if request.session is not None:
            self.settle(request.session, replica)

    def start(self, ticket: Ticket) -> None:
        """Record the first token: the prompt is no longer open work."""
        self._open[ticket.replica] -= ticket.prompt_work
        ticket.prompt_work = 0.0

    def finish(self, ticket: Ticket, output_tokens: int | None) -> None:
        """Record the end of an answer and its length; None if it failed, so that its length is
        unknown."""
        replica = ticket.replica
        if not ticket.is_learned:
            self._coming.remove(replica, ticket.request.pages)
        self._open[replica] -= ticket.prompt_work + ticket.output_work
        self._num_open[replica] -= 1
        if not self._num_open[replica]:
            self._open[replica] = 0.0  # removes rounding errors
        if output_tokens is not None:
            self._output_tokens += OUTPUT_MEMORY * (output_tokens - self._output_tokens)

    def home(self, session: Hashable) -> int | None:
        """The replica of a session; None if it is unknown."""
        return self._sessions.get(session)

    def settle(self, session: Hashable, replica: int) -> None:
        """Record that a session is at this replica from now on."""
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._config.max_sessions:
            self._sessions.popitem(last=False)

    def _able(self, request: RouteRequest, excluded: frozenset[int]) -> list[int]:
        places: Sequence[int] | frozenset[int] = range(self.num_replicas)
        if request.app is not None:
            places = self._apps.get(request.app, places)
        able = [
            place
            for place in places
            if self._states[place] is ReplicaState.UP and place not in excluded
        ]
        if not able:
            where = "" if request.app is None else f" of app {request.app!r}"
            raise NoReplica(f"no replica{where} can take a request: {self._said(places)}")
        return able

    def _said(self, places: Sequence[int] | frozenset[int]) -> str:
        states = [self._states[place] for place in places]
        counts = ((state.value, states.count(state)) for state in ReplicaState)
        return ", ".join(f"{count} {name}" for name, count in counts if count)

    def _nearest(self, request: RouteRequest, able: list[int]) -> tuple[int, int]:
        """Return the replica of the session, or else the one with the lowest cost, and how many
        tokens of the prompt it holds."""
        places = np.array(able)
        known = (self._holdings.num_leading(request.pages), self._coming.num_leading(request.pages))
        held = np.maximum(*known)[places] * self._config.page_tokens
        new = np.maximum(0, request.prompt_tokens - held)
        loads, output_work = self._open[places], self._output_work()
        most = LOAD_BOUND * loads.mean() + FREE_REQUESTS * (request.prompt_tokens + output_work)
        costs = loads + NEW_COST * new + self._recent[places] / SPREAD
        costs[loads + new + output_work > most] = np.inf
        best = int(costs.argmin())
        home = None if request.session is None else self._sessions.get(request.session)
        if home in able and costs[able.index(home)] < np.inf:
            best = able.index(home)
        return able[best], int(request.prompt_tokens - new[best])

    def _next_in_turn(self, able: list[int]) -> int:
        chosen = able[self._turn % len(able)]
        self._turn += 1
        return chosen

    def _output_work(self) -> float:
        return self._config.output_cost * self._output_tokens

    def _open_at(self, replica: int, request: RouteRequest, held_tokens: int) -> Ticket:
        prompt_work = float(request.prompt_tokens - held_tokens)
        ticket = Ticket(replica, request, held_tokens, prompt_work, self._output_work())
        self._open[replica] += ticket.prompt_work + ticket.output_work
        self._num_open[replica] += 1
        if self._config.kind is RouterKind.AFFINE:
            self._coming.note(replica, request.pages)
        return ticket

    def check(self) -> None:
        """Raise if a bound is exceeded, or if open work or coming pages have no request."""
        self._holdings.check()
        self._coming.check()
        assert len(self._sessions) <= self._config.max_sessions, "more sessions than the bound"
        for replica, count in enumerate(self._num_open):
            assert count >= 0, "a ticket was handed back twice"
            assert count or not self._open[replica], "open work without a request"
            assert count or not self._coming.num_pages(replica), (
                "pages are coming without a request"
            )
