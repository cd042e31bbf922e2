"""KV events over real sockets: a router rebuilds the set of cached pages from them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import zmq

from mainstem.cli import serve
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, PageEvent, PagesCleared, PagesRemoved, PagesStored
from mainstem.core.ids import PageKey
from mainstem.core.request import FinishReason
from mainstem.server.link import kv_events
from mainstem.server.link.kv_events import KvEventPublisher, KvEventsConfig, is_local
from tests.builders import VOCAB, Collector, a_request
from tests.fakes import fake_answer
from tests.kv.faulty import FaultyFiles
from tests.kv.mirror import Mirror
from tests.kv.tiered import Tiered, a_tiered_engine
from tests.server.router import TOPIC, Apply, Router, apply_plain
from tests.waiting import until

LOCAL = "tcp://127.0.0.1:0"
PAGE = 4
NUM_OPERATIONS = 1000


def apply_vllm(mirror: Mirror, payload: bytes) -> None:
    """Decode with vLLM's own classes: our events must have the fields of theirs."""
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    batch = msgspec.msgpack.decode(payload, type=theirs.KVEventBatch)
    assert batch.data_parallel_rank == 0
    assert isinstance(batch.ts, float)
    for event in batch.events:
        match event:
            case theirs.BlockStored():
                names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium")
                plain = {name: getattr(event, name) for name in names}
                plain |= {"lora_id": event.lora_id, "lora_name": event.lora_name}
            case theirs.BlockRemoved():
                plain = {"block_hashes": event.block_hashes, "medium": event.medium}
            case _:
                plain = {}
        mirror.apply_event({"type": type(event).__name__, **plain})


class Pod:
    """An engine with tiers that publishes KV events, and a router that follows them."""

    def __init__(self, folder: Path, rng: Random, apply: Apply) -> None:
        self._folder, self._rng, self._apply = folder, rng, apply
        self.mirror = Mirror(PAGE)
        self.past: list[list[int]] = [[1, 2, 3], [4] * 9]
        self.start()

    def start(self) -> None:
        self.bus = EventBus()
        config = KvEventsConfig(bind=LOCAL, replay=LOCAL, topic=TOPIC)
        self.publisher = KvEventPublisher(config, self.bus)
        self.router = a_router(self.publisher, self.mirror, self._apply)
        self.num_batches = 0
        self.has_news = True
        self.bus.subscribe(PagesStored, self._note)
        self.bus.subscribe(PagesRemoved, self._note)
        self.bus.subscribe(PagesCleared, self._note)
        self.collector = Collector()
        self.waiting: dict[str, tuple[list[int], int]] = {}
        self.tiered: Tiered = a_tiered_engine(
            num_pages=16,
            page_size=PAGE,
            num_slots=12,
            disk_dir=self._folder,
            num_records=30,
            files=FaultyFiles,
            bus=self.bus,
            can_overlap=self._rng.random() < 0.5,
        )

    def _note(self, _: PageEvent) -> None:
        self.has_news = True

    def act(self) -> None:
        rng, engine, copier = self._rng, self.tiered.engine, self.tiered.copier
        match rng.choices(range(7), [30, 55, 4, 4, 4, 1, 2])[0]:
            case 0:
                self._ask()
            case 1:
                self.step()
            case 2 if self.waiting:
                name = rng.choice(sorted(self.waiting))
                engine.abort(name)  # type: ignore[arg-type]
                del self.waiting[name]
            case 3:
                copier.save_faults.extend(rng.choices([None, "early", "late"], k=2))
                copier.load_faults.extend(rng.choices([None, "early"], k=2))
            case 4:
                FaultyFiles.reads.extend(rng.choices(["eio", "flip", "short", "gone"], k=2))
                FaultyFiles.writes.extend(rng.choices(["eio", "full", "flip"], k=2))
            case 5:
                self.restart()
            case 6:
                rng.choice([engine.clear_cache, engine.clear_device])()

    def _ask(self) -> None:
        rng = self._rng
        more = [rng.randint(0, 3) for _ in range(rng.randint(0, 14))]
        prompt = [*rng.choice(self.past), *more][: 64 - 6] or [0]
        self.tiered.copier.patience = rng.randint(0, 3)
        request = a_request(prompt, rng.randint(1, 6), salt=rng.choice([b"", b"", b"me"]))
        self.tiered.engine.submit(request)
        self.waiting[str(request.request_id)] = prompt, request.sampling.max_tokens or 0

    def step(self) -> None:
        self.collector.add(self.tiered.engine.step())
        for name in [name for name in self.waiting if (name, 0) in self.collector.reasons]:
            prompt, max_tokens = self.waiting.pop(name)
            got = self.collector.tokens[name, 0]
            assert self.collector.reasons[name, 0] is FinishReason.LENGTH
            assert got == fake_answer(prompt, max_tokens, VOCAB)
            self.past = [*self.past[-6:], [*prompt, *got]]

    def restart(self) -> None:
        """The process ends and another starts; pages on disk stay."""
        while self.tiered.engine.has_work:
            self.step()
        self.close()
        self.start()

    def compare(self) -> None:
        self.publisher.flush()
        self.num_batches += self.has_news
        self.has_news = False
        self.router.follow(self.num_batches)
        stored = self.tiered.store.stored_keys()
        assert self.mirror.known(stored) == stored

    def close(self) -> None:
        self.tiered.engine.close()
        self.publisher.close()
        self.router.close()


@pytest.mark.parametrize("apply", [apply_plain, apply_vllm])
def test_the_pages_of_a_store_are_rebuilt_after_each_of_1000_operations(
    apply: Apply, tmp_path: Path
) -> None:
    if apply is apply_vllm:
        pytest.importorskip("vllm.distributed.kv_events")
    FaultyFiles.reset()
    pod = Pod(tmp_path, Random(26), apply)
    most: dict[str, int] = dict.fromkeys(pod.mirror.pages, 0)
    for _ in range(NUM_OPERATIONS):
        pod.act()
        pod.compare()
        most = {tier: max(count, len(pod.mirror.pages[tier])) for tier, count in most.items()}
    assert min(most.values()) >= 10, "the tiers were hardly used"
    assert pod.mirror.untold, "no page was found on disk"
    pod.close()
    FaultyFiles.reset()


def a_page(number: int, size: int = PAGE) -> PagesStored:
    key = PageKey(number.to_bytes(32, "big"))
    return PagesStored("device", [key], [None], [bytes(4 * size)])


@contextmanager
def a_publisher(bus: EventBus) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(KvEventsConfig(LOCAL, None, LOCAL, TOPIC), bus)
    try:
        yield publisher
    finally:
        publisher.close()


def a_router(publisher: KvEventPublisher, mirror: Mirror, apply: Apply = apply_plain) -> Router:
    assert publisher.endpoint is not None
    assert publisher.replay_endpoint is not None
    return Router(publisher.endpoint, publisher.replay_endpoint, mirror, apply)


def test_a_router_that_reads_slowly_misses_batches_and_can_replay_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that does not read never delays the engine, and loses only batches that do not
    fit in the buffers."""
    monkeypatch.setattr(kv_events, "MAX_UNSENT", 5)
    monkeypatch.setattr(kv_events, "LINGER_MS", 0)
    bus, size = EventBus(), 50_000
    with a_publisher(bus) as publisher:
        router = a_router(publisher, Mirror(size))
        publisher.flush()  # batch 0
        numbers = count(1)

        def publish() -> int:
            number = next(numbers)
            bus.publish(a_page(number, size))
            publisher.flush()
            return number

        until(lambda: publish() > 0 and router.hears())  # the subscription has arrived
        router.follow(publish() + 1)
        num_before = router.num_replays
        for _ in range(100):  # if the engine waited for the router, this would not end
            last = publish()
        until(lambda: len(router.replay(last)) == 1)  # all are sent
        router.follow(last + 1)
        assert len(router.mirror.pages["device"]) == last
        assert router.num_replays > num_before, "no batch was dropped"
        router.close()


def test_replay_starts_at_the_oldest_kept_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT", 10)
    bus = EventBus()
    with a_publisher(bus) as publisher:
        router = a_router(publisher, Mirror(PAGE))
        for number in range(20):
            bus.publish(a_page(number))
            publisher.flush()
        until(lambda: len(router.replay(19)) == 1)
        numbers = [int.from_bytes(number, "big") for _, number, _ in router.replay(0)]
        assert numbers == list(range(10, 20))
        assert [number[-1] for _, number, _ in router.replay(18)] == [18, 19]
        assert router.replay(1 << 63) == []
        monkeypatch.setattr(kv_events, "MAX_KEPT_BYTES", 600)
        bus.publish(a_page(20))
        publisher.flush()
        until(lambda: len(router.replay(20)) == 1)
        assert sum(len(batch) for _, _, batch in router.replay(0)) in range(400, 601)
        router.close()


def test_no_event_is_built_without_a_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an event was built")

    for kind in (PagesStored, PagesRemoved, PagesCleared):
        monkeypatch.setattr(kind, "__init__", fail)
    tiered = a_tiered_engine(num_slots=40)
    tiered.engine.submit(a_request(list(range(30))))
    while tiered.engine.has_work:
        tiered.engine.step()
    tiered.engine.clear_cache()
    tiered.engine.close()


def stored(
    keys: list[PageKey], parent: PageKey | None, token_ids: list[int], size: int, medium: str
) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": size,
        "medium": medium,
        "lora_id": None,
        "lora_name": None,
    }


def test_consecutive_pages_are_joined_and_so_are_pages_without_tokens() -> None:
    a, b, c, d = (PageKey(name.encode()) for name in "abcd")
    tokens = [np.array([number] * PAGE, np.int32).tobytes() for number in range(4)]
    events: list[PageEvent] = [
        PagesCleared(),
        PagesStored("device", [a, b], [None, a], tokens[:2]),
        PagesStored("device", [c, d], [b, a], tokens[2:]),
        PagesStored("disk", [a, b], [None, None], [b"", b""]),
        PagesRemoved("device", [d]),
        PagesRemoved("device", [c]),
        PagesRemoved("host", [a]),
    ]
    batch = kv_events.to_batch(1.0, events)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.0,
        [
            {"type": "AllBlocksCleared"},
            stored([a, b, c], None, [0] * 4 + [1] * 4 + [2] * 4, PAGE, "GPU"),
            stored([d], a, [3] * 4, PAGE, "GPU"),
            stored([a, b], None, [], 0, "STORAGE"),
            {"type": "BlockRemoved", "block_hashes": [d, c], "medium": "GPU"},
            {"type": "BlockRemoved", "block_hashes": [a], "medium": "CPU"},
        ],
        0,
    ]


def test_a_cleared_cache_is_one_event() -> None:
    bus = EventBus()
    with a_publisher(bus) as publisher:
        router = a_router(publisher, Mirror(PAGE))
        bus.publish(a_page(1))
        publisher.flush()
        router.follow(1)
        bus.publish(PagesRemoved("device", a_page(1).keys))
        bus.publish(PagesCleared())
        publisher.flush()
        until(lambda: len(router.replay(1)) == 1)
        ((_, _, batch),) = router.replay(1)
        assert msgspec.msgpack.decode(batch)[1] == [{"type": "AllBlocksCleared"}]
        router.close()


def test_an_address_that_is_taken_is_refused() -> None:
    bus = EventBus()
    with a_publisher(bus) as publisher, pytest.raises(ConfigError, match="in use"):
        KvEventPublisher(KvEventsConfig(bind=publisher.endpoint), bus)


def test_the_publisher_can_connect_to_a_subscriber_that_listens() -> None:
    context = zmq.Context()
    listener = context.socket(zmq.SUB)
    listener.subscribe(b"")
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    bus = EventBus()
    publisher = KvEventPublisher(KvEventsConfig(connect=f"tcp://127.0.0.1:{port}"), bus)
    numbers = count()

    def hears_the_next() -> bool:
        bus.publish(a_page(next(numbers)))
        publisher.flush()
        return bool(listener.poll(50))

    until(hears_the_next)
    assert len(listener.recv_multipart()) == 3
    publisher.close()
    context.destroy(linger=0)


def no_engine(config: EngineConfig, log_level: str, _: KvEventsConfig | None) -> serve.Parts:
    raise AssertionError("a model was loaded")


@pytest.mark.parametrize("flags", [["--kv-events-replay", LOCAL], ["--kv-events-topic", "kv"]])
def test_flags_that_need_another_flag_are_refused_without_it(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="need --kv-events"):
        serve.main(flags, no_engine)


@pytest.mark.parametrize("address", ["5557", "tcp://127.0.0.1", "tcp://a:99999", "udp://a:1"])
def test_an_invalid_address_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--kv-events", address], no_engine)
    assert "tcp://127.0.0.1:5557" in capsys.readouterr().err


def test_without_pyzmq_the_flag_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.cli.kv_event_flags.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'mainstem\[server\]'"):
        serve.main(["--kv-events", LOCAL], no_engine)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="pyzmq"):
        KvEventPublisher(KvEventsConfig(bind=LOCAL), EventBus())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://localhost:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://eth0:5557", False),
    ],
)
def test_only_loopback_and_ipc_are_local(address: str, expected: bool) -> None:
    assert is_local(address) == expected


def test_an_address_open_to_the_network_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    KvEventPublisher(KvEventsConfig(bind="tcp://*:0"), EventBus()).close()
    assert "token ids" in caplog.text
    caplog.clear()
    KvEventPublisher(KvEventsConfig(bind=LOCAL), EventBus()).close()
    assert "token ids" not in caplog.text
