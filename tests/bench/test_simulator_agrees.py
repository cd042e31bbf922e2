"""The simulator finds as many tokens and loads as many bytes as the engine, on a small CPU trace.

Times are not compared there: that needs a card. Requests come one at a time, and the device has
room for hardly more than one conversation, so what is found was loaded from host memory.

In virtual time, with host memory and a disk that only keep time, first tokens are compared, too.
"""

from dataclasses import replace

import pytest

from mainstem.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    Fetch,
    ModelConfig,
    SchedConfig,
    StoreConfig,
)
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.engine.build import build_random_engine, with_chunk
from mainstem.kv.stack import SLACK
from mainstem_bench.agree import Asked, Room, Served, in_simulator, play
from mainstem_bench.arrivals import Arrival, answer_arrivals
from mainstem_bench.policies import StoreSessions, Turns, made_up, with_room
from mainstem_bench.shapes import SHAPES
from mainstem_bench.speeds import Speeds
from mainstem_simulate.service import GB, Batching
from mainstem_simulate.simulator import Queue, SimulationConfig, SimulationReport, simulate
from mainstem_simulate.trace_records import Trace, TraceFormat, TraceRequest
from tests.kv.virtual import (
    CHUNK_TOKENS,
    HOST_BYTES_PER_S,
    PAGE_BYTES,
    PAGE_SIZE,
    VirtualClock,
    VirtualTime,
    a_virtual_card,
)

SPEC = SHAPES["tiny"]
TURNS = Turns(sessions=12, turns=4, history=160, new=28, output=4, rate=1.0)
KV_BYTES = 4.0 * SPEC.kv_elements_per_token  # of a token, in fp32
DEVICE_TOKENS, DISK_BYTES_PER_S = 12_000, 3e9
SMALL_POINTS = 0.05  # a few pages that are held while they are copied count in so small a store
POINTS, SHARE = 0.02, 0.05  # hit rates may differ by two points, bytes by a twentieth


def a_config(arrivals: list[Arrival], conversations: float, policy: str) -> EngineConfig:
    """Host memory for a number of conversations."""
    model = ModelConfig(model="tiny", device=Device.CPU, dtype=DType.FP32)
    config = with_chunk(EngineConfig(model=model), SPEC)
    config = with_room(
        config, SPEC, arrivals, StoreSessions(device=1.25, host=conversations, disk=1)
    )
    store = StoreConfig(host_gb=config.store.host_gb, policy=policy, fetch=Fetch.ALWAYS)
    return replace(config, store=store)


def in_the_engine(config: EngineConfig, arrivals: list[Arrival]) -> Counters:
    bus = EventBus()
    engine = build_random_engine(SPEC, config, bus)
    counters = Counters().attach(bus)
    try:
        for arrival in arrivals:
            answer_arrivals(engine, [replace(arrival, due_s=0.0)])
            engine.flush()
        engine.check()
    finally:
        engine.close()
    return counters


def in_the_simulator(config: EngineConfig, arrivals: list[Arrival]) -> SimulationReport:
    assert config.store.host_gb is not None
    page, numbers = config.cache.page_size, dict[tuple[int, ...], int]()
    requests = []
    for index, arrival in enumerate(arrivals):
        ids = arrival.prompt_ids.tolist()
        prefixes = (tuple(ids[:end]) for end in range(page, len(ids) + 1, page))
        chain = [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
        requests.append(
            TraceRequest(100.0 * index, len(ids), arrival.output, chain, chain, session=index)
        )
    return simulate(
        Trace(TraceFormat.MOONCAKE, page, requests),
        SimulationConfig(
            KV_BYTES,
            host_gb=config.store.host_gb * (1 - 1 / SLACK),  # the rest is for copies in flight
            policy=config.store.policy,
            queue=Queue.ARRIVALS,
            batching=Batching(max_running=1, weights_s=1e-3, token_s=1e-6),
        ),
    )


@pytest.mark.parametrize(
    ("conversations", "policy", "least", "most"),
    [
        (14, "lru", 0.6, 1.0),  # room for all
        (6, "lru", 0.1, 0.4),
        (6, "lookahead", 0.1, 0.4),
    ],
)
def test_engine_and_simulator_find_and_load_the_same(
    conversations: float, policy: str, least: float, most: float
) -> None:
    arrivals = made_up(TURNS, SPEC.vocab_size)
    config = a_config(arrivals, conversations, policy)
    counters, report = in_the_engine(config, arrivals), in_the_simulator(config, arrivals)
    assert least < report.hit_rate < most, "the size should be as tight as the test says"
    assert counters.saving_ratio == pytest.approx(report.hit_rate, abs=POINTS)
    loaded_gb = counters.loaded_pages["host"] * config.cache.page_size * KV_BYTES / 1e9
    assert loaded_gb == pytest.approx(report.loaded_gb, rel=SHARE)


@pytest.mark.parametrize(
    "host_pages", [700, pytest.param(1400, marks=pytest.mark.slow)], ids=["short", "less short"]
)
def test_simulator_and_engine_agree_in_virtual_time_over_three_tiers(
    host_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for twice as many pages as host memory, and that is less than all."""
    asked = Asked(turns=160, rate=4.0, pace=4.0, context_tokens=4096, page_tokens=16, seed=0)
    trace, clock, page_gb = asked.trace(None), VirtualClock(monkeypatch), PAGE_BYTES / GB
    config = EngineConfig(
        model=ModelConfig(model="tiny"),  # for its vocabulary
        cache=CacheConfig(page_size=PAGE_SIZE, kv_tokens=DEVICE_TOKENS),
        sched=SchedConfig(max_seqs=24, chunk_tokens=CHUNK_TOKENS),
    )
    probed = a_virtual_card(clock, DEVICE_TOKENS, 0, DISK_BYTES_PER_S)
    speeds = Speeds.measured(VirtualTime(clock, probed.engine), probed.engine.bus, trace, config)
    card = a_virtual_card(
        clock, DEVICE_TOKENS, host_pages, DISK_BYTES_PER_S,
        disk_pages=2 * host_pages, fetch=Fetch.ALWAYS, max_seqs=24,
    )  # fmt: skip
    played = play(VirtualTime(clock, card.engine), trace, SPEC.vocab_size, 0)
    ttft_s = sum(answer.first_token_s for answer in played.answers) / len(played.answers)
    room = Room(
        PAGE_BYTES / PAGE_SIZE,
        device_gb=DEVICE_TOKENS / PAGE_SIZE * page_gb,
        host_gb=host_pages * page_gb * (1 - 1 / SLACK),
        disk_gb=2 * host_pages * page_gb,
        policy="lookahead",
        max_running=24,
        chunk_tokens=CHUNK_TOKENS,
        is_kept=True,
    )
    served = Served(room, speeds, HOST_BYTES_PER_S / GB, DISK_BYTES_PER_S / GB)
    simulated = in_simulator(trace, served)
    counters = card.counters
    shares = {
        tier: counters.loaded_pages[tier] * PAGE_SIZE / counters.prompt_tokens
        for tier in ("host", "disk")
    }
    assert min(shares.values()) > 0.02, "all tiers should be used"
    found = {"hit_rate": counters.saving_ratio}
    found |= {"hit_rate_dram": shares["host"], "hit_rate_disk": shares["disk"]}
    for name, share in found.items():
        assert share == pytest.approx(simulated[name], abs=SMALL_POINTS), name
    assert ttft_s == pytest.approx(simulated["ttft_s"], rel=0.15)
    assert counters.device_s == pytest.approx(simulated["device_s"], rel=0.1)
