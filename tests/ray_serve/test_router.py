"""The router: affinity, bounds of load and memory, sessions, apps, health."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mainstem.core.errors import ConfigError
from mainstem.ray.holdings import Holdings
from mainstem.ray.router import (
    NoReplica,
    ReplicaState,
    Router,
    RouterConfig,
    RouteRequest,
    RouterKind,
    Ticket,
)

PAGE = 100


def a_router(num_replicas: int = 4, **more: object) -> Router:
    fields = {"page_tokens": PAGE, "output_cost": 1.0, **more}
    return Router(num_replicas, RouterConfig(**fields))  # type: ignore[arg-type]


def a_request(pages: Sequence[int], session: object = None, app: str | None = None) -> RouteRequest:
    return RouteRequest(pages, PAGE * len(pages) + 10, session, app)


def serve(router: Router, pages: Sequence[int], **more: object) -> int:
    """Route a request, and answer it before the next one comes."""
    ticket = router.choose(a_request(pages, **more))  # type: ignore[arg-type]
    router.learn(ticket)
    router.finish(ticket, 10)
    return ticket.replica


def test_a_prompt_goes_to_the_replica_that_holds_most_of_it() -> None:
    router = a_router()
    home = serve(router, [1, 2, 3])
    other = serve(router, [7, 8, 9])
    assert home != other
    for _ in range(20):
        assert serve(router, [1, 2, 3, 4]) == home
        assert serve(router, [7, 8]) == other


def test_new_prompts_spread_over_idle_replicas() -> None:
    router = a_router()
    places = [serve(router, [n]) for n in range(40)]
    assert [places.count(place) for place in range(4)] == [10] * 4


def test_one_hot_prefix_does_not_make_one_hot_replica() -> None:
    router = a_router()
    tickets = [router.choose(a_request(range(20))) for _ in range(400)]
    work = [router.open_work(place) for place in range(4)]
    assert max(work) <= 1.25 * sum(work) / 4 + 2 * (PAGE * 20 + 10 + 256)
    assert {ticket.replica for ticket in tickets} == {0, 1, 2, 3}


def test_affinity_holds_under_load() -> None:
    """Every replica has a queue, and each prefix still goes to the replica that has it."""
    router = a_router()
    homes = {n: serve(router, range(100 * n, 100 * n + 20)) for n in range(4)}
    assert sorted(homes.values()) == [0, 1, 2, 3]
    for _ in range(50):
        for n, home in homes.items():
            ticket = router.choose(a_request(range(100 * n, 100 * n + 20)))
            assert ticket.replica == home
            assert ticket.held_tokens == 20 * PAGE


def test_a_session_stays_even_if_its_prompt_is_new() -> None:
    router = a_router()
    home = serve(router, [1], session="talk")
    assert {serve(router, [n], session="talk") for n in range(10, 20)} == {home}
    assert router.home("talk") == home


def test_a_session_leaves_a_replica_that_is_down_or_draining() -> None:
    for state in (ReplicaState.DOWN, ReplicaState.DRAINING):
        router = a_router()
        home = serve(router, [1], session="talk")
        router.set_state(home, state)
        moved = serve(router, [1, 2], session="talk")
        assert moved != home
        router.set_state(home, ReplicaState.UP)
        assert serve(router, [1, 2, 3], session="talk") == moved


def test_a_session_that_must_stay_never_moves() -> None:
    router = a_router()
    home = serve(router, [1], session="talk")
    router.set_state(home, ReplicaState.DRAINING)
    tickets = [router.choose(RouteRequest([n], 10_000, "talk", None, True)) for n in range(20)]
    assert {ticket.replica for ticket in tickets} == {home}, "it stays however busy the replica is"
    going_on = RouteRequest([1], 10, "talk", None, True)
    with pytest.raises(NoReplica, match=f"replica {home}, which has"):
        router.choose(going_on, frozenset({home}))
    router.set_state(home, ReplicaState.DOWN)
    with pytest.raises(NoReplica, match=f"replica {home}, which has"):
        router.choose(going_on)
    router.set_state(home, ReplicaState.UP)
    assert router.choose(going_on).replica == home


def test_the_router_learns_only_from_answered_requests() -> None:
    router = a_router()
    ticket = router.choose(a_request([1, 2, 3], session="talk"))
    together = router.choose(a_request([1, 2, 3, 4]))
    assert together.replica == ticket.replica, "requests that share pages go to one replica"
    for refused in (ticket, together):
        router.finish(refused, None)
    router.check()
    assert router.home("talk") is None
    assert [router.num_pages(place) for place in range(4)] == [0] * 4
    assert router.choose(a_request([1, 2, 3])).held_tokens == 0


def test_sessions_are_bounded() -> None:
    router = a_router(max_sessions=10)
    for n in range(100):
        serve(router, [n], session=n)
    router.check()
    assert router.home(0) is None
    assert router.home(99) is not None


def test_pages_are_bounded_and_first_pages_stay_longest() -> None:
    holdings = Holdings(2, 10)
    holdings.note(0, range(8))
    holdings.note(0, [100, 101, 102, 103])
    assert holdings.num_leading(range(8)).tolist() == [6, 0]
    holdings.note(1, range(30))
    assert holdings.num_leading(range(30)).tolist() == [6, 10]
    holdings.bound(0, 3)
    assert holdings.num_pages(0) == 3
    holdings.forget(1)
    holdings.check()
    assert holdings.num_leading(range(30)).tolist() == [0, 0]


def test_a_replica_that_was_down_keeps_its_pages_until_it_is_restarted() -> None:
    router = a_router(2)
    home = serve(router, [1, 2, 3])
    router.set_state(home, ReplicaState.DOWN)
    router.set_state(home, ReplicaState.UP)
    assert router.num_pages(home) == 3
    assert serve(router, [1, 2, 3]) == home
    router.forget(home)
    assert router.num_pages(home) == 0
    router.check()


def test_requests_for_an_app_go_to_the_replicas_that_have_it() -> None:
    router = a_router()
    router.place_app("shop", [1, 3])
    assert {serve(router, [n], app="shop") for n in range(20)} == {1, 3}
    assert {serve(router, [n], app="other") for n in range(100, 140)} == {0, 1, 2, 3}
    router.set_state(1, ReplicaState.DOWN)
    router.set_state(3, ReplicaState.DRAINING)
    with pytest.raises(NoReplica, match=r"app 'shop'.*1 draining, 1 down"):
        serve(router, [1], app="shop")
    with pytest.raises(ConfigError, match="numbers from 0 to 3"):
        router.place_app("shop", [4])


def test_a_replica_that_failed_a_request_does_not_get_it_again() -> None:
    router = a_router(2)
    first = router.choose(a_request([1]))
    router.finish(first, None)
    second = router.choose(a_request([1]), frozenset({first.replica}))
    assert second.replica != first.replica
    with pytest.raises(NoReplica):
        router.choose(a_request([1]), frozenset({0, 1}))


def test_the_first_token_removes_the_prompt_from_open_work() -> None:
    router = a_router(1)
    ticket = router.choose(a_request(range(10)))
    before = router.open_work(0)
    router.start(ticket)
    assert router.open_work(0) == before - (10 * PAGE + 10)
    router.finish(ticket, 5)
    assert router.open_work(0) == 0
    router.check()


def test_round_robin_and_random_routers_ignore_pages() -> None:
    turns = a_router(3, kind=RouterKind.ROUND_ROBIN)
    assert [serve(turns, [1]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    drawn = a_router(3, kind=RouterKind.RANDOM)
    assert {serve(drawn, [1], session="s") for _ in range(50)} == {0, 1, 2}
    assert drawn.num_pages(0) == 0


class RouterMachine(RuleBasedStateMachine):
    """In any order of requests, ends and states, bounds hold and counts are right."""

    def __init__(self) -> None:
        super().__init__()
        self.router = a_router(3, pages_per_replica=12, max_sessions=4)
        self.open: list[Ticket] = []

    @rule(start=st.integers(0, 5), length=st.integers(0, 16), session=st.integers(0, 8))
    def choose(self, start: int, length: int, session: int) -> None:
        pages = [100 * start + depth for depth in range(length)]
        try:
            ticket = self.router.choose(a_request(pages, session or None))
        except NoReplica:
            assert all(self.router.state(place) is not ReplicaState.UP for place in range(3))
            return
        assert self.router.state(ticket.replica) is ReplicaState.UP
        self.open.append(ticket)

    @rule(data=st.data(), tokens=st.integers(0, 50) | st.none())
    def finish(self, data: st.DataObject, tokens: int | None) -> None:
        if self.open:
            ticket = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            if tokens is not None:
                self.router.learn(ticket)
                self.router.start(ticket)
            self.router.finish(ticket, tokens)

    @rule(place=st.integers(0, 2), state=st.sampled_from(ReplicaState))
    def set_state(self, place: int, state: ReplicaState) -> None:
        self.router.set_state(place, state)

    @rule(place=st.integers(0, 2))
    def forget(self, place: int) -> None:
        self.router.forget(place)

    @rule(place=st.integers(0, 2), tokens=st.integers(0, 3000))
    def set_capacity(self, place: int, tokens: int) -> None:
        self.router.set_capacity(place, tokens)

    @invariant()
    def is_whole(self) -> None:
        self.router.check()
        counts = [sum(ticket.replica == place for ticket in self.open) for place in range(3)]
        assert [self.router.num_open(place) for place in range(3)] == counts


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
