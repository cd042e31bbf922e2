"""Whether to load or compute a history, and when to start, on links of known rates."""

from dataclasses import dataclass, field
from random import Random

import pytest

from mainstem.core.config import Fetch, StoreConfig
from mainstem.kv import transfer
from mainstem.kv.loading import PageLoader
from mainstem.kv.places import StoredCounts
from mainstem.kv.transfer import SharedLink, TierLink
from mainstem.sched.fetching import CAUTION, Fetching
from mainstem.sched.step_times import StepTimes

PAGE_BYTES = 2 << 20  # 16 tokens of Llama 8B in bf16
TOKEN_S = 22e-6
HISTORY = 126  # pages: 2,016 tokens


@dataclass
class Tiers:
    """Links as of an H200: 50 GB/s to host memory, 4.2 GB/s from disk."""

    num_layers: int = 32
    page_bytes: int = PAGE_BYTES
    links: list[TierLink] = field(default_factory=lambda: [TierLink(50e9), SharedLink(4.2e9)])
    num_free_slots: int = 10_000

    def is_crowded(self, num_pages: int) -> bool:
        return self.num_free_slots < num_pages


def a_fetching(fetch: Fetch = Fetch.AUTO, preload: str = "auto") -> tuple[Fetching, Tiers]:
    tiers = Tiers()
    config = StoreConfig(host_gb=1.0, fetch=fetch, preload=preload)
    assert isinstance(tiers, Tiers)
    stand_in: PageLoader = tiers  # type: ignore[assignment]  # it has what Fetching looks at
    return Fetching(config, stand_in, 16, StepTimes(TOKEN_S)), tiers


def assign(fetching: Fetching, tiers: Tiers, count: int, is_on_disk: bool) -> tuple[int, int]:
    """How many of the histories that arrive at once are loaded, and how many computed."""
    stored = StoredCounts(HISTORY, (HISTORY,) if is_on_disk else ())
    num_loaded, tokens_ahead = 0, 0
    for index in range(count):
        if fetching.is_worth_it(stored, tokens_ahead, count - index):
            num_loaded += 1
            tiers.links[0].start(HISTORY * PAGE_BYTES)
            if is_on_disk:
                tiers.links[1].start(HISTORY * PAGE_BYTES)
            tokens_ahead += 100
        else:
            tokens_ahead += HISTORY * 16 + 100
    return num_loaded, count - num_loaded


def test_many_histories_at_once_are_all_loaded_from_host_memory() -> None:
    fetching, tiers = a_fetching()
    assert assign(fetching, tiers, 24, is_on_disk=False) == (24, 0)


def test_a_disk_as_fast_as_the_device_loads_about_half_of_many_histories() -> None:
    fetching, tiers = a_fetching()
    loaded, computed = assign(fetching, tiers, 24, is_on_disk=True)
    assert 6 <= loaded <= 14
    assert loaded + computed == 24


@pytest.mark.parametrize(("rate", "fewest"), [(4.2e9, 9), (2.5e9, 6), (1.5e9, 4)])
def test_many_histories_are_split_so_that_disk_and_device_end_together(
    rate: float, fewest: int
) -> None:
    fetching, tiers = a_fetching()
    tiers.links[1] = SharedLink(rate)
    loaded, computed = assign(fetching, tiers, 24, is_on_disk=True)
    assert loaded >= fewest
    load_s = loaded * HISTORY * PAGE_BYTES / rate
    compute_s = (computed * HISTORY * 16 + 24 * 100) * TOKEN_S
    assert load_s == pytest.approx(compute_s, rel=0.3)


def test_fetch_always_and_never_override_the_comparison() -> None:
    assert assign(*a_fetching(Fetch.ALWAYS), 9, is_on_disk=True) == (9, 0)
    assert assign(*a_fetching(Fetch.NEVER), 9, is_on_disk=False) == (0, 9)


def test_a_link_that_was_measured_to_be_slow_is_not_used() -> None:
    fetching, tiers = a_fetching()
    stored = StoredCounts(HISTORY, (HISTORY,))
    link = tiers.links[1] = SharedLink(100e9)
    assert fetching.is_worth_it(stored, 0, 0)
    for second in range(20):
        link.start(PAGE_BYTES)
        link.finish_between(PAGE_BYTES, second, second + 1.0)
    assert not fetching.is_worth_it(stored, 0, 0)


def test_short_histories_are_computed_if_the_link_is_busy() -> None:
    fetching, tiers = a_fetching()
    tiers.links[0].start(100 * HISTORY * PAGE_BYTES)  # half a second of other loads
    assert not fetching.is_worth_it(StoredCounts(2), 0, 0)


@pytest.mark.parametrize(
    ("new_tokens", "layers"),
    [
        (2016, 1),  # the prompt takes longer than the load and never waits
        (100, 20),  # 5.3 ms of load, 2.2 ms of prompt: the last layer must arrive in time
        (1, 32),
    ],
)
def test_a_prompt_starts_when_it_can_hide_the_rest_of_the_load(
    new_tokens: int, layers: int
) -> None:
    fetching, _ = a_fetching()
    assert fetching.start_layers(StoredCounts(HISTORY), new_tokens) == layers


def test_a_started_prompt_waits_for_no_layer() -> None:
    """Layer k arrives after k + 1 parts of the load and is needed after k parts of the prompt."""
    fetching, tiers = a_fetching()
    for new_tokens in (1, 50, 100, 200, 400):
        start = fetching.start_layers(StoredCounts(HISTORY), new_tokens)
        layer_load_s = tiers.links[0].pass_s(HISTORY * PAGE_BYTES) / 32
        layer_prompt_s = new_tokens * TOKEN_S / 32
        for layer in range(32):
            there_s = (layer + 1) * layer_load_s
            assert there_s <= start * layer_load_s + layer * layer_prompt_s + 1e-9


@pytest.mark.parametrize(("preload", "layers"), [("all", 32), ("0", 0), ("5", 5), ("99", 32)])
def test_the_number_of_layers_loaded_before_the_start_can_be_set(preload: str, layers: int) -> None:
    fetching, _ = a_fetching(preload=preload)
    assert fetching.start_layers(StoredCounts(HISTORY), 100) == layers


def test_steps_are_expected_to_take_as_long_as_the_latest_ones() -> None:
    """The device differs from the card's record: 5.5 ms a step and 27 us a token."""
    steps = StepTimes(TOKEN_S, floor_s=3.5e-3)
    assert steps.expect_s(0) == 3.5e-3
    for _ in range(30):
        for prompt_tokens in (0, 24, 4096):
            steps.observe(prompt_tokens, 5.5e-3 + prompt_tokens * 27e-6)
    assert steps.floor_s == pytest.approx(5.5e-3, rel=1e-3)
    assert steps.token_s == pytest.approx(27e-6, rel=1e-3)


def test_a_delayed_step_hardly_changes_the_estimate() -> None:
    steps = StepTimes(TOKEN_S, floor_s=3.5e-3)
    steps.observe(1, 60.0)
    assert steps.expect_s(1) < 5e-3
    for _ in range(20):
        steps.observe(1, 3.5e-3)
    assert steps.expect_s(1) == pytest.approx(3.5e-3, rel=0.01)


def test_a_step_in_flight_gives_loads_the_time_it_has_left() -> None:
    fetching, _ = a_fetching()
    whole_s = CAUTION * 100 * TOKEN_S
    assert fetching.left_s(100, ran_s=0.0) == pytest.approx(whole_s)
    assert fetching.left_s(100, ran_s=1e-3) == pytest.approx(whole_s - 1e-3)
    assert fetching.left_s(100, ran_s=1.0) == 0.0
    assert fetching.lead_s(1e-3) == 1e-3


@pytest.mark.parametrize("preload", ["all", "5"])
def test_if_preload_is_set_a_step_in_flight_gives_loads_no_time(preload: str) -> None:
    fetching, _ = a_fetching(preload=preload)
    assert fetching.lead_s(1e-3) == 0.0


def read_burst(link: SharedLink, now_s: float, num_pages: int, bytes_per_s: float) -> float:
    """Sixteen readers share a disk evenly, eight pages each at a time; returns the end time."""
    todo = [8] * (num_pages // 8)
    link.start(num_pages * PAGE_BYTES)
    under_way: list[tuple[float, float, int]] = []  # bytes left, begin time, pages
    rng = Random(num_pages)
    while todo or under_way:
        while todo and len(under_way) < 16:
            size = todo.pop()
            under_way.append((size * PAGE_BYTES * rng.uniform(0.95, 1.05), now_s, size))
        passed = min(left for left, _, _ in under_way)
        now_s += passed * len(under_way) / bytes_per_s
        under_way = [(left - passed, begin_s, size) for left, begin_s, size in under_way]
        for left, begin_s, size in under_way:
            for _ in range(size if left <= 0 else 0):
                link.finish_between(PAGE_BYTES, begin_s, now_s)
        under_way = [item for item in under_way if item[0] > 0]
    return now_s


@pytest.mark.parametrize("bytes_per_s", [3e9, 1e9, 0.5e9])
@pytest.mark.parametrize("num_pages", [8, 32, 128, 256, 1024])
def test_a_shared_link_is_as_fast_as_all_its_copies_together(
    num_pages: int, bytes_per_s: float
) -> None:
    link, now_s = SharedLink(2e9), 100.0
    for _ in range(30):
        now_s = read_burst(link, now_s, num_pages, bytes_per_s) + 5.0  # then idle for 5 s
    assert PAGE_BYTES / link.pass_s(PAGE_BYTES) == pytest.approx(bytes_per_s, rel=0.15)
    assert link.expect_s(0) == 0.0


def test_a_slower_disk_is_noticed_in_the_middle_of_a_burst() -> None:
    link, now_s = SharedLink(3e9), 100.0
    link.start(320 * PAGE_BYTES)
    for _ in range(16):  # for a third of a second, 16 pages at a time
        began_s, now_s = now_s, now_s + 16 * PAGE_BYTES / 1.6e9
        for _ in range(16):
            link.finish_between(PAGE_BYTES, began_s, now_s)
    assert 1.6e9 < PAGE_BYTES / link.pass_s(PAGE_BYTES) < 2.4e9


def test_copies_in_progress_advance_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads report no progress before they end, so the link estimates it from the time."""
    now_s = 100.0
    monkeypatch.setattr(transfer, "perf_counter", lambda: now_s)
    link = SharedLink(2e9)
    link.start(int(0.2 * 2e9))
    assert link.expect_s(0) == pytest.approx(0.2)
    now_s += 0.15
    assert link.expect_s(0) == pytest.approx(0.05)
    link.start(int(0.1 * 2e9))
    assert link.expect_s(0) == pytest.approx(0.15)
    # half of the first load, at the expected rate
    link.finish_between(int(0.1 * 2e9), 100.0, 100.1)
    assert link.expect_s(0) == pytest.approx(0.15)
    now_s += 0.15
    assert link.expect_s(0) == pytest.approx(0.0, abs=1e-6)
    assert link.expect_s(int(0.1 * 2e9)) == pytest.approx(0.1)


def test_the_expected_time_of_a_link_that_hangs_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(transfer, "perf_counter", lambda: now_s)
    link = SharedLink(2e9)
    link.start(int(0.2 * 2e9))
    for late_s in (1.0, 10.0):
        now_s = 100.2 + late_s
        assert link.expect_s(0) == pytest.approx(late_s)
    link.finish_between(int(0.1 * 2e9), 100.0, now_s)
    assert link.expect_s(0) <= 20.0  # the link works again


@pytest.mark.parametrize("queued_bytes", [2e8, 1e9, 4e9])
def test_a_standing_queue_does_not_hide_that_a_link_is_slow(
    monkeypatch: pytest.MonkeyPatch, queued_bytes: float
) -> None:
    now_s, rate, size = 100.0, 1e8, int(2e7)
    monkeypatch.setattr(transfer, "perf_counter", lambda: now_s)
    link = SharedLink(3e9, most_under_way=2.5e8)
    link.start(int(queued_bytes))
    for _ in range(200):
        began_s, now_s = now_s, now_s + size / rate
        link.start(size)
        link.finish_between(size, began_s, now_s)
    assert link.pass_s(int(rate)) == pytest.approx(1.0, rel=0.1)
    assert link.expect_s(0) >= 0.9 * (queued_bytes - 2.5e8) / rate


def test_a_tier_is_busy_while_other_loads_have_the_slots_it_needs() -> None:
    fetching, tiers = a_fetching()
    tiers.num_free_slots = HISTORY - 1
    assert fetching.is_busy(StoredCounts(HISTORY, (HISTORY,)), left_s=0.0)
    assert not fetching.is_busy(StoredCounts(HISTORY, (HISTORY - 1,)), left_s=0.0)
    assert not fetching.is_busy(StoredCounts(HISTORY), left_s=0.0)


def test_a_decision_to_compute_can_change_while_pages_are_stored() -> None:
    assert a_fetching()[0].is_open(StoredCounts(1))
    assert not a_fetching()[0].is_open(StoredCounts(0))
    assert not a_fetching(Fetch.NEVER)[0].is_open(StoredCounts(1))


def test_a_history_without_stored_pages_is_not_loaded() -> None:
    fetching, _ = a_fetching()
    assert not fetching.is_worth_it(StoredCounts(0), 100, 3)


def test_a_disk_needs_more_queued_work_than_host_memory_to_be_busy() -> None:
    """Reads have a latency; copies from host memory begin at once."""
    fetching, tiers = a_fetching()
    tiers.links[0].start(int(0.015 * 50e9))
    assert fetching.is_busy(StoredCounts(HISTORY), left_s=0.0)
    fetching, tiers = a_fetching()
    tiers.links[1].start(int(0.015 * 4.2e9))
    assert not fetching.is_busy(StoredCounts(HISTORY, (HISTORY,)), left_s=0.0)


def test_host_memory_has_enough_work_if_it_outlasts_the_step_in_flight() -> None:
    """When that step ends, more loads begin. How long the step before it took does not matter: if
    nothing is in flight, a long queue would delay the first step."""
    fetching, tiers = a_fetching()
    fetching.steps.interval_s = 0.1
    tiers.links[0].start(50 * PAGE_BYTES * HISTORY // 5)  # 53 ms
    assert fetching.is_busy(StoredCounts(HISTORY), left_s=0.0)
    assert fetching.is_busy(StoredCounts(HISTORY), left_s=0.04)
    assert not fetching.is_busy(StoredCounts(HISTORY), left_s=0.05)


def test_a_disk_with_work_until_the_next_step_is_busy() -> None:
    fetching, tiers = a_fetching()
    tiers.links[1].start(int(0.05 * 4.2e9))
    assert fetching.is_busy(StoredCounts(HISTORY, (HISTORY,)), left_s=0.0)
    fetching.steps.interval_s = 0.1
    assert not fetching.is_busy(StoredCounts(HISTORY, (HISTORY,)), left_s=0.0)
