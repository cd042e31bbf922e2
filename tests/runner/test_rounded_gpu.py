"""Full pages in fp8 on a GPU, under Triton's interpreter: the answers of the CPU."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mainstem.core.config import CacheConfig, EngineConfig, KvDType, ModelConfig, SchedConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, SequencePreempted
from mainstem.core.ids import RequestId
from mainstem.core.step import PageWeighing, Runner, Spans, Step
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.kernels.attention.plan import Launches
from mainstem.kv.store import KVStore
from mainstem.models.block import Gate
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.gpu_rounded import OpenPlaces, Pair, RoundedGpuPages, num_open_places
from mainstem.sched.scheduler import Scheduler
from tests.builders import VOCAB, a_request
from tests.fakes import FakeRunner
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config
from tests.runner.recorded_graphs import Recorder
from tests.runner.steps import Seq, Work, a_step, run
from tests.runner.test_rounded_pages import BIASED, Answer, a_model, ask, distance, rounded

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; see test_interpreter.py",
)
# plain; windows and parts of pages; sinks; K and V that layers share; keys that are shifted
MODELS = [
    "GraniteForCausalLM",
    "Gemma3ForCausalLM",
    pytest.param("GptOssForCausalLM", marks=pytest.mark.slow),
    pytest.param("Gemma 4 with inputs of layers", marks=pytest.mark.slow),
    "NemotronForCausalLM" + BIASED,
]
NEAR = 1e-3  # of logprobs; rounding to fp8 changes them by 4e-3 to 0.3


def small(config: EngineConfig) -> EngineConfig:
    cache = replace(config.cache, kv_tokens=512)
    return rounded(replace(config, cache=cache, sched=SchedConfig(chunk_tokens=40)))


def runners(name: str) -> list[tuple[Runner, Engine]]:
    """An engine on the interpreted GPU, and one on the CPU."""
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    origin, config = a_model(name), small(a_config())
    found: list[tuple[Runner, Engine]] = []
    for runner, facts in (
        load_gpu_runner(origin, config, torch.device("cpu")),
        load_cpu_runner(origin, config),
    ):
        found.append((runner, join(runner, facts, config, EventBus())))
    return found


def prompts() -> list[list[int]]:
    """Two prompts share two pages and a part of the next; one shares nothing."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 96, 37).tolist()
    tails = [rng.integers(3, 96, count).tolist() for count in (3, 11)]
    return [*(head + tail for tail in tails), rng.integers(3, 96, 14).tolist()]


@interpreted
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_cpu(name: str) -> None:
    """From the first token on, and again from the cache."""
    (_, gpu), (_, cpu) = runners(name)
    right = ask(cpu, prompts(), 2)
    assert distance(ask(gpu, prompts(), 2), right) < NEAR
    assert distance(ask(gpu, prompts()[:1], 2), right[:1]) < NEAR


@interpreted
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same_if_pages_are_expanded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, where its own kernels read expanded pages."""
    from mainstem.kernels.memory.expand import (  # noqa: PLC0415  # needs the interpreter
        expand_rounded_pages as real,
    )
    from mainstem.runner import gpu, gpu_attention  # noqa: PLC0415

    monkeypatch.setattr(gpu_attention, "expands_rounded", lambda *_: True)
    monkeypatch.setattr(gpu_attention, "EXPANDED_BYTES", 1 << 20)
    monkeypatch.setattr(gpu, "EXPAND_ROWS", 8.0)
    calls: list[int] = []

    def counted(numbers: Pair, scales: Pair, pages: Tensor, count: int, out: Tensor) -> None:
        calls.append(count)
        real(numbers, scales, pages, count, out)

    name_of = "mainstem.kernels.attention.expanded.expand_rounded_pages"
    monkeypatch.setattr(name_of, counted)
    (_, gpu_engine), (_, cpu_engine) = runners(name)
    right = ask(cpu_engine, prompts(), 2)
    assert distance(ask(gpu_engine, prompts(), 2), right) < NEAR
    assert distance(ask(gpu_engine, prompts()[:1], 2), right[:1]) < NEAR
    assert max(calls) > 0


@interpreted
def test_steps_in_graphs_expand_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are replayed, over pages in fp8; prompts are not."""
    from mainstem.kernels.attention.expanded import ExpandingAttention  # noqa: PLC0415
    from mainstem.runner import gpu, gpu_attention, graphs  # noqa: PLC0415

    monkeypatch.setattr(gpu_attention, "expands_rounded", lambda *_: True)
    monkeypatch.setattr(gpu_attention, "EXPANDED_BYTES", 1 << 20)
    monkeypatch.setattr(gpu, "EXPAND_ROWS", 0.0)  # all other steps
    (runner, gpu_engine), (_, cpu_engine) = runners("GraniteForCausalLM")
    assert isinstance(runner, gpu.GpuRunner)
    right = ask(cpu_engine, prompts(), 3)
    recorded = Recorder(monkeypatch).wrap(runner._pieces)
    kinds, layers = runner._attention.kinds_of_steps, runner.decoder.spec.page_layers
    with torch.inference_mode():
        captured = graphs.StepGraphs((1, 4), kinds, recorded, layers)
    runner._graphs = captured
    [attention] = runner._attention._spans._kinds.values()
    assert isinstance(attention, ExpandingAttention)
    planned: list[tuple[bool, bool]] = []  # whether it expands; whether it is replayed

    def plan(spans: Spans, expand_rows: float) -> Launches:
        launches = real(spans, expand_rows)
        planned.append((attention.is_expanding, False))
        return launches

    def replay(size: int, launches: Launches, gate: Gate) -> None:
        planned[-1] = (attention.is_expanding, True)
        real_replay(size, launches, gate)

    real, real_replay = attention.plan, captured.replay
    monkeypatch.setattr(attention, "plan", plan)
    monkeypatch.setattr(captured, "replay", replay)
    assert distance(ask(gpu_engine, prompts(), 3), right) < NEAR
    assert set(planned) == {(True, False), (False, True)}


@interpreted
@pytest.mark.parametrize("name", ["GraniteForCausalLM", "NemotronForCausalLM" + BIASED])
def test_moved_pages_and_masses_are_those_of_the_cpu(name: str) -> None:
    found: list[Answer] = []
    masses = []
    for runner, _ in runners(name):
        seq = Seq(slot=1, token_ids=list(range(3, 48)), pages=[4, 0, 2])
        first = [Work(seq, 35, has_sample=False)]
        run(runner, a_step(first, 16, 96), first)
        step = a_step([Work(seq, 10)], 16, 96)
        weighing = PageWeighing(2, 8, np.array(seq.pages, np.int32))
        step = replace(
            step,
            weighings=(weighing,),
            move_from=np.array([4], np.int32),
            move_to=np.array([7], np.int32),
            move_by=np.array([-3], np.int32),
        )
        masses.append(runner.launch(step).wait().page_masses[0])
        other = Seq(slot=0, token_ids=list(range(3, 30)), pages=[7, 5], num_done=16)
        result = runner.launch(a_step([Work(other, 1)], 16, 96, prompt_logprobs=20)).wait()
        found.append([(0, np.array(result.prompt_logprobs[0].top_logprobs))])
    assert np.allclose(masses[0], masses[1], rtol=1e-3)
    assert distance([found[0]], [found[1]]) < NEAR


@interpreted
@pytest.mark.parametrize("name", ["GraniteForCausalLM", "Gemma3ForCausalLM"])
def test_open_places_are_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two for each sequence, and those of pages that one step fills."""
    from mainstem.runner import gpu_load  # noqa: PLC0415  # needs the interpreter

    monkeypatch.setattr(gpu_load, "_free_bytes", lambda *_: 40_000_000)
    config = replace(small(a_config()), cache=CacheConfig(kv_dtype=KvDType.FP8))
    origin = RecipeOrigin(RECIPES[name])
    runner, facts = gpu_load.load_gpu_runner(origin, config, torch.device("cpu"))
    assert isinstance(runner.pages, RoundedGpuPages)
    opened = sum(tensor.nbytes for tensor in runner.pages.opened.tensors)
    assert facts.num_open_pages is not None
    places = num_open_places(facts.num_open_pages, 40, facts.page_size)
    assert opened == places * facts.open_page_bytes
    used = opened + sum(tensor.nbytes for tensor in runner.pages.tensors)
    assert 0.998 < used / 40_000_000 <= 1


@interpreted
def test_deterministic_is_refused() -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    config = replace(rounded(a_config()), model=ModelConfig(deterministic=True))
    with pytest.raises(ConfigError, match="kv_dtype=fp8 cannot be combined with deterministic"):
        load_gpu_runner(RecipeOrigin(RECIPES["GraniteForCausalLM"]), config, torch.device("cpu"))


def test_a_page_keeps_its_open_place_until_it_is_full() -> None:
    """Any order of chunks and sequences: places never collide, and all come back."""
    rng = np.random.default_rng(4)
    size, num_seqs, most = 4, 3, 24
    places = OpenPlaces(num_seqs, most, size)
    assert places.num_places == num_open_places(num_seqs, most, size)
    seqs = [Seq(slot, list(range(500)), []) for slot in range(num_seqs)]
    held: dict[int, int] = {}  # page -> open place, of pages that are not full
    next_page = 0
    for _ in range(300):
        works, room = [], most
        for seq in seqs:
            if rng.random() < 0.2 or seq.num_done > 400:  # it ends, and another takes its slot
                held.pop(seq.pages[-1] if seq.pages else -1, None)
                seq.pages, seq.num_done = [], 0
            count = min(int(rng.integers(0, 12)), room)
            if count:
                room -= count
                end = -(-(seq.num_done + count) // size)
                new = list(range(next_page, next_page + end - len(seq.pages)))
                next_page += len(new)
                seq.pages += new
                works.append(Work(seq, count, has_sample=False))
        if not works:
            continue
        writes = places.assign(a_step(works, size, 600))
        used = dict(zip(writes.opened.pages.tolist(), writes.places.tolist(), strict=True))
        for page, place in used.items():
            assert held.get(page, place) == place
        running = {seq.pages[-1] for seq in seqs if seq.pages}
        held = {page: place for page, place in held.items() if page in running} | used
        assert len(set(held.values())) == len(held), "two open pages have one place"
        full = writes.opened.pages[writes.opened.end_offsets == size].tolist()
        assert sorted(writes.targets[writes.targets >= 0].tolist()) == sorted(full)
        held = {page: place for page, place in held.items() if page not in full}
        for work in works:
            work.seq.num_done += work.num_tokens


class Places:
    """Follows the open places of an engine's steps, in the order of their launches."""

    def __init__(self, num_seqs: int, max_tokens: int, page_size: int) -> None:
        self._size = page_size
        self._places = OpenPlaces(num_seqs, max_tokens, page_size)
        # which token slot of the pool is in each slot of the open places
        self._holds = np.full(self._places.num_places * page_size, -1, np.int64)

    def launch(self, step: Step) -> None:
        writes = self._places.assign(step)
        self._holds[writes.slots] = step.write_slots
        for new, slot in zip(writes.slots.tolist(), step.write_slots.tolist(), strict=True):
            own = np.arange(slot % self._size + 1)
            place, page = new // self._size * self._size, slot // self._size * self._size
            assert (self._holds[place + own] == page + own).all(), "its own page is not there"


@pytest.mark.parametrize("num_pages", [200, 20])
def test_open_pages_last_while_steps_overlap(num_pages: int) -> None:
    """Answers end by stop tokens, are aborted, or preempted for want of pages, and steps fail,
    while another step is in flight; others start in their place."""
    size, num_seqs, most, bus = 4, 3, 24, EventBus()
    store = KVStore(num_pages, size, b"fake", bus, has_whole_pages=True)
    sched = SchedConfig(chunk_tokens=most, max_seqs=num_seqs)
    scheduler = Scheduler(sched, store, VOCAB, 10_000, bus, max_step_tokens=most)
    runner = FakeRunner(num_pages, size, VOCAB, can_overlap=True)
    engine = Engine(scheduler, runner, bus)
    places = Places(num_seqs, most, size)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, VOCAB, int(rng.integers(1, 22))).tolist() for _ in range(40)]
    wrong: list[Exception] = []
    preempted: list[SequencePreempted] = []
    bus.subscribe(SequencePreempted, preempted.append)

    def launch(step: Step) -> None:
        try:
            places.launch(step)
        except Exception as error:
            wrong.append(error)
            raise
        if step.step_id % 41 == 40:
            raise RuntimeError("a failed step")

    runner.at_launch = launch
    stops = tuple(range(8))
    for number, prompt in enumerate(prompts):
        engine.submit(a_request(prompt, 24, f"{number}", eos_ids=stops))
    for number in range(2000):
        if not engine.has_work:
            break
        if number % 5 == 0:
            engine.abort(RequestId(f"{rng.integers(40)}"))
        engine.step()
        assert not wrong
        engine.check()
    assert not engine.has_work
    assert preempted
