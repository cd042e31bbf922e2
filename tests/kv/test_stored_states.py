"""States of recurrent layers go to lower tiers and come back, for exactly the tokens in them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.events import EventBus, PagesLost, PagesRemoved, PagesStored
from mainstem.core.ids import PageKey
from mainstem.core.request import SamplingParams
from mainstem.kv.bytes.line import Address
from mainstem.kv.places import HOST
from mainstem.kv.states import StatePlace
from tests.builders import VOCAB, a_request, run_all
from tests.fakes import fake_answer
from tests.kv.redis_server import RedisServer, wait_long
from tests.kv.tiered import PIECES, Tiered, a_tiered_engine
from tests.needs import skip_without

PAGE = 4
ANSWER = 30


def a_hybrid(**changes: object) -> Tiered:
    defaults = {"num_pages": 200, "num_slots": 400, "num_states": 12, "num_records": 4000}
    return a_tiered_engine(**(defaults | changes))  # type: ignore[arg-type]


def answer(tiered: Tiered, prompt: list[int], length: int = ANSWER) -> int:
    """Check a prompt's answer; returns where it started."""
    request = a_request(
        prompt, name="r", sampling=SamplingParams(temperature=0.0, max_tokens=length)
    )
    found = run_all(tiered.engine, [request])
    assert found.tokens["r", 0] == fake_answer(prompt, length, VOCAB)
    return found.outputs[0].num_cached_tokens


def converse(between: Callable[[Tiered], Tiered], first: Tiered, rng: np.random.Generator) -> None:
    """Six turns: each starts less than a page before the end of the last one."""
    said, tiered, end = rng.integers(0, VOCAB, 33).tolist(), first, 0
    for _ in range(6):
        assert end - PAGE < answer(tiered, said) <= end
        said += fake_answer(said, ANSWER, VOCAB)
        end = len(said) - 1  # the last token's K and V are not computed
        said += rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist()
        tiered = between(tiered)
    tiered.engine.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("can_overlap", [False, True])
def test_turns_come_back_from_host_memory(*, seed: int, can_overlap: bool) -> None:
    def leave_the_device(tiered: Tiered) -> Tiered:
        tiered.store.flush()
        tiered.store.clear_device()
        tiered.engine.check()
        return tiered

    first = a_hybrid(can_overlap=can_overlap)
    converse(leave_the_device, first, np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(3))
def test_turns_come_back_from_disk_after_a_restart(seed: int, tmp_path: Path) -> None:
    def restart(tiered: Tiered) -> Tiered:
        tiered.engine.close()
        return a_hybrid(disk_dir=tmp_path, can_overlap=True)

    first = a_hybrid(disk_dir=tmp_path, can_overlap=True)
    converse(restart, first, np.random.default_rng(seed))


def test_turns_come_back_from_a_server_that_another_process_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("redis-server")
    wait_long(monkeypatch)
    server = RedisServer(tmp_path)

    def move(tiered: Tiered) -> Tiered:
        tiered.engine.close()
        return a_hybrid(remote=Address(server.url), can_overlap=True)

    try:
        first = a_hybrid(remote=Address(server.url), can_overlap=True)
        converse(move, first, np.random.default_rng(0))
    finally:
        server.stop()


def test_prompts_that_part_in_a_page_start_at_the_page_before_it_after_a_restart(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(4)
    shared = rng.integers(0, VOCAB, 50).tolist()
    prompts = [[*shared, own, *rng.integers(0, VOCAB, 20).tolist()] for own in range(5)]
    tiered = a_hybrid(disk_dir=tmp_path)
    run_all(tiered.engine, [a_request(p, name=str(i)) for i, p in enumerate(prompts[:2])])
    tiered.engine.close()
    tiered = a_hybrid(disk_dir=tmp_path)
    assert [answer(tiered, prompt, 2) for prompt in prompts[2:]] == [48, 48, 50]


def test_a_tenant_finds_the_stored_state_after_public_pages_of_another() -> None:
    rng, tiered = np.random.default_rng(6), a_hybrid()
    public, starts = rng.integers(0, VOCAB, 50).tolist(), []
    for tenant in (b"a", b"b", b"a"):
        request = a_request([*public, *rng.integers(0, VOCAB, 9).tolist()], 2, salt=tenant)
        found = run_all(tiered.engine, [replace(request, public_tokens=50)])
        starts.append(found.outputs[0].num_cached_tokens)
        tiered.store.flush()
        tiered.store.clear_device()
    assert starts == [0, 48, 48]
    tiered.engine.close()


def test_a_state_that_lost_a_piece_is_a_miss(tmp_path: Path) -> None:
    """Whichever piece is damaged: the answer is computed from an earlier state, or the start."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, VOCAB, 41).tolist()
    said = [*prompt, *fake_answer(prompt, ANSWER, VOCAB), 1, 2]
    for damaged in range(0, 60, 7):
        lost: list[PagesLost] = []
        bus = EventBus()
        bus.subscribe(PagesLost, lost.append)
        folder = tmp_path / str(damaged)
        folder.mkdir()
        tiered = a_hybrid(disk_dir=folder)
        answer(tiered, prompt)
        tiered.engine.close()
        files = sorted(path for path in folder.rglob("*") if path.suffix not in {".db", ".lock"})
        data = next(path for path in files if path.stat().st_size > 4096)
        with data.open("r+b") as file:
            file.seek(damaged * 4096)
            file.write(b"\x07" * 8)
        tiered = a_hybrid(disk_dir=folder, bus=bus)
        answer(tiered, said)
        tiered.engine.check()
        tiered.engine.close()


def test_routers_are_told_of_pages_only(tmp_path: Path) -> None:
    told: list[bytes] = []
    bus = EventBus()
    bus.subscribe(PagesStored, lambda event: told.extend(event.keys))
    bus.subscribe(PagesRemoved, lambda event: told.extend(event.keys))
    prompt = list(range(40))
    tiered = a_hybrid(disk_dir=tmp_path, bus=bus)
    answer(tiered, prompt)
    tiered.store.flush()
    stored = tiered.store.stored_keys()
    assert set(told) <= stored["device"] | stored["host"] | stored["disk"]
    pieces = {page.key for page in tiered.stack.pages.all() if page.is_piece}
    assert len(pieces) >= PIECES
    assert not pieces & set(told)
    assert not any(pieces & keys for keys in stored.values())
    tiered.store.clear()
    assert not pieces & set(told)
    tiered.engine.close()


def test_no_state_is_evicted_for_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A sequence that asked for the load may be about to start from the evicted one: its slot would
    be free, and given to another sequence, too."""
    rng = np.random.default_rng(6)
    stored, other = (rng.integers(0, VOCAB, 41).tolist() for _ in range(2))
    tiered = a_hybrid(disk_dir=tmp_path)
    answer(tiered, stored, 1)
    tiered.engine.close()
    tiered = a_hybrid(disk_dir=tmp_path, num_states=2)
    answer(tiered, other, 1)
    tiered.store.flush()
    states, on_tiers, host = tiered.store.states, tiered.store.stored_states, tiered.stack.host
    assert states is not None
    assert on_tiers is not None
    place = StatePlace.of(tiered.store.chain(np.array(stored, np.int32), b""), 40)
    assert on_tiers.has(place)
    num_kept = states.num_kept
    stack = tiered.stack
    stack.carry_out(stack.policy.choose_victims(HOST, host.num_places))
    for number in range(host.num_free):
        host.take_place(PageKey(f"another page {number}".encode()))
    while states.num_owned + states.num_kept < states.num_states:
        states.take()
    assert on_tiers.load(place) is None
    assert states.num_kept == num_kept > 0
