"""Which prefixes are pinned, for how long, and how many pages they have."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from mainstem.core.step import Int32s
from mainstem.server.link.answering import EngineFault
from mainstem.server.pins import MAX_PINS, Prefix, PrefixPins


class FakeEngine:
    """An engine of 100 pages of 4 tokens that records what is pinned."""

    def __init__(self) -> None:
        self.snapshot = SimpleNamespace(num_pages=100, page_size=4)
        self.pinned: dict[str, int] = {}  # tokens, by name
        self.is_lost = False

    async def pin(
        self, name: str, prefixes: Sequence[Int32s], salt: bytes = b"", public_tokens: int = 0
    ) -> int:
        if self.is_lost:
            raise EngineFault("gone")
        self.pinned.pop(name, None)
        if prefixes:
            self.pinned[name] = len(prefixes[0])
        return 0


def prefix(*runs: tuple[int, int], salt: bytes = b"") -> Prefix:
    """A prefix, from pairs (token, number of repeats)."""
    return Prefix(np.repeat(*np.array(runs, np.int32).T).astype(np.int32), salt)


class StoppedLoop(asyncio.SelectorEventLoop):
    """Its time passes only in `pass_s`."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


async def pass_s(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StoppedLoop)
    loop.now_s += seconds
    for _ in range(4):  # timers, then the tasks that they begin
        await asyncio.sleep(0)


def run(work: object) -> tuple[FakeEngine, PrefixPins]:
    """Run `work` on a new engine and its pins; returns both."""
    engine = FakeEngine()
    pins = PrefixPins(engine, 0.25)  # type: ignore[arg-type]

    async def do() -> None:
        await work(engine, pins)  # type: ignore[operator]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=StoppedLoop) as runner:
        runner.run(do())
    return engine, pins


def test_a_longer_prefix_replaces_a_shorter_one_that_it_begins_with() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        pins.keep("a", prefix((1, 20)), 300)
        pins.keep("a", prefix((1, 20), (2, 10)), 300)
        pins.keep("a", prefix((1, 20), (3, 10)), 300)

    engine, pins = run(work)
    assert sorted(engine.pinned.values()) == [30, 30]
    assert pins.num_pages("a") == 8 + 8 - 5, "common pages count once"


def test_a_shorter_prefix_that_lasts_longer_stays() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        pins.keep("a", prefix((1, 20)), 3600)
        pins.keep("a", prefix((1, 20), (2, 10)), 0.01)
        await pass_s(0.05)

    engine, pins = run(work)
    assert list(engine.pinned.values()) == [20]
    assert pins.num_pages() == 5


def test_each_use_extends_a_pin() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        pins.keep("a", prefix((1, 20)), 0.2)
        pins.keep("a", prefix((2, 20)), 0.2)
        await pass_s(0.12)
        pins.keep("a", prefix((1, 20)), 0.2)
        await pass_s(0.12)
        assert pins.num_pages() == 5

    engine, _ = run(work)
    assert len(engine.pinned) == 1


def test_pinning_again_for_a_shorter_time_does_not_shorten_a_pin() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        pins.keep("a", prefix((1, 20)), 3600)
        pins.keep("a", prefix((1, 20)), 0.01)
        await pass_s(0.05)

    engine, _ = run(work)
    assert list(engine.pinned.values()) == [20]


def test_the_least_recently_used_pin_ends_first() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        for token in (1, 2, 1, 3):
            pins.keep("a", prefix((token, 40)), 300)  # ten pages each; a key may pin 25

    engine, pins = run(work)
    assert pins.num_pages("a") == 20
    assert set(engine.pinned) == {"cache/0", "cache/2"}


def test_all_keys_together_pin_at_most_half_of_the_pages() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        for owner in ("a", "b", "c"):
            pins.keep(owner, prefix((1, 1000), salt=owner.encode()), 300)
            assert pins.num_pages(owner) == 25, "the prefix is cut to the key's share"

    engine, pins = run(work)
    assert set(engine.pinned) == {"cache/1", "cache/2"}
    assert (pins.num_pages("a"), pins.num_pages()) == (0, 50)


def test_the_number_of_pins_per_key_is_limited() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        engine.snapshot.num_pages = 1 << 20
        for token in range(MAX_PINS + 5):
            pins.keep("a", prefix((token, 1)), 300)

    engine, _ = run(work)
    assert len(engine.pinned) == MAX_PINS


def test_pinning_on_a_lost_engine_does_not_fail() -> None:
    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        engine.is_lost = True
        pins.keep("a", prefix((1, 20)), 300)
        await asyncio.sleep(0)
        pins.forget()
        engine.is_lost = False
        pins.keep("a", prefix((1, 20)), 300)

    engine, pins = run(work)
    assert (pins.num_pages(), len(engine.pinned)) == (5, 1)


def test_all_pins_can_be_ended() -> None:
    """This is needed when the cache is reset: pages that running sequences hold would stay
    pinned."""

    async def work(engine: FakeEngine, pins: PrefixPins) -> None:
        pins.keep("a", prefix((1, 20)), 300)
        pins.keep("b", prefix((2, 20)), 300)
        pins.end_all()

    engine, pins = run(work)
    assert engine.pinned == {}
    assert pins.num_pages() == 0
