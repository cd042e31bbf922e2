"""Full pages in fp8: no answer depends on what was cached, shared, moved to a tier, or on how a
prompt was cut. (A CPU; the reference of what a token reads is in test_rounded_spans.py.)

Sums in another order change K by its last bits, which may change the rounding of a few numbers. So
answers are compared with a tenth of what rounding to fp8 changes in them.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mainstem.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    Fetch,
    KvDType,
    SchedConfig,
    Share,
    StoreConfig,
)
from mainstem.core.errors import ConfigError, InvalidRequest, UnsupportedModel
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.metrics import Counters
from mainstem.core.request import Overflow, Request, SamplingParams
from mainstem.core.step import PageWeighing, Step
from mainstem.core.weights import FolderUpdate, TensorUpdate
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.kernels.memory.cpu import turn_keys
from mainstem.kernels.memory.record_size import record_bytes
from mainstem.kernels.memory.records import MOST, expand_pages, round_pages
from mainstem.runner import cpu_load
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from mainstem.runner.rounded_pages import RoundedPages
from tests.engine.test_weights import settle
from tests.models.checkpoints import VOCAB as CHECKPOINT_VOCAB
from tests.models.checkpoints import make_checkpoint
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config
from tests.runner.steps import Seq, Work, a_step, run

pytestmark = pytest.mark.torch

BIASED = ", large biases of keys"
MODELS = [name for name, spec in RECIPES.items() if not spec.recurrences]
MODELS += ["Qwen2MoeForCausalLM" + BIASED, "NemotronForCausalLM" + BIASED]
# pages of one part, and of two; keys that are shifted, of which only some dims are rotated
FEW = ["GraniteForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM" + BIASED]
VOCAB = 96
Answer = list[tuple[int, np.ndarray]]


def rounded(config: EngineConfig) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_dtype=KvDType.FP8))


def a_model(name: str) -> RecipeOrigin:
    recipe, _, _ = name.partition(BIASED)
    return RecipeOrigin(RECIPES[recipe], 300.0 if name.endswith(BIASED) else 0.0)


def an_engine(name: str, config: EngineConfig, bus: EventBus | None = None) -> Engine:
    runner, facts = load_cpu_runner(a_model(name), config)
    return join(runner, facts, config, bus or EventBus())


def ask(engine: Engine, prompts: list[list[int]], num_tokens: int = 1) -> list[Answer]:
    """Each answer's tokens, with the logprobs of the likeliest 20."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=20, ignore_eos=True)
    return run_requests(
        engine,
        [
            Request(RequestId(str(index)), np.array(ids, np.int32), sampling, expected_tokens=1)
            for index, ids in enumerate(prompts)
        ],
    )


def run_requests(engine: Engine, requests: list[Request]) -> list[Answer]:
    found: dict[RequestId, Answer] = {each.request_id: [] for each in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            assert output.fault is None
            found[output.request_id] += [
                (each.token_id, np.array(each.top_logprobs)) for each in output.logprobs
            ]
    engine.check()
    return list(found.values())


def prompts() -> list[list[int]]:
    """Three prompts share pages, and a part of the next; one ends with a page."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, VOCAB, 53).tolist()
    return [head + rng.integers(3, VOCAB, count).tolist() for count in (60, 11, 2)]


def distance(found: list[Answer], right: list[Answer]) -> float:
    pairs = [
        pair for answers in zip(found, right, strict=True) for pair in zip(*answers, strict=True)
    ]
    return max(float(np.abs(one[1] - other[1]).max()) for one, other in pairs)


@cache
def exact_answers(name: str) -> "Exact":
    return Exact(name)


class Exact:
    """The answers of a model to `prompts`, one by one, and how far fp8 may differ from itself."""

    def __init__(self, name: str) -> None:
        self.right = [ask(an_engine(name, rounded(a_config())), [ids])[0] for ids in prompts()]
        plain = [ask(an_engine(name, a_config()), [ids])[0] for ids in prompts()]
        gap = distance(self.right, plain)
        assert gap > 1e-3, "rounding changes nothing here, so the test shows nothing"
        self.tolerance = gap / 10

    def check(self, found: list[Answer]) -> None:
        assert distance(found, self.right) < self.tolerance


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_chunks_sharing_or_the_cache(name: str) -> None:
    """Every kind of block: windows, sinks, softcaps, heads of 64 to 512, K and V that several
    layers share. The recipes' prompts are longer than a window."""
    exact = exact_answers(name)
    config = rounded(a_config())
    engine = an_engine(name, config)
    exact.check(ask(engine, prompts()))  # shared while they are computed
    exact.check(ask(engine, prompts()))  # from the cache
    exact.check(ask(an_engine(name, replace(config, sched=SchedConfig(chunk_tokens=7))), prompts()))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("share", list(Share))
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 1), (16, 1000), (4, 9)])
def test_no_setting_changes_what_a_token_reads(
    name: str, share: Share, page_size: int, chunk: int
) -> None:
    """A chunk of 1: the prompt is computed token by token."""
    base = a_config()
    config = rounded(replace(base, sched=SchedConfig(chunk_tokens=chunk, share=share)))
    if page_size == 16:
        exact_answers(name).check(ask(an_engine(name, config), prompts()))
        return
    small = replace(config, cache=replace(config.cache, page_size=page_size))
    alone = replace(small, sched=base.sched)
    right = [ask(an_engine(name, alone), [ids])[0] for ids in prompts()]
    assert distance(ask(an_engine(name, small), prompts()), right) < exact_answers(name).tolerance


@pytest.mark.parametrize("name", FEW)
def test_an_answer_reads_what_a_longer_prompt_reads(name: str) -> None:
    """Tokens that were decoded one by one leave the same pages as a prompt with these tokens."""
    exact = exact_answers(name)
    config = rounded(a_config())
    (answer,) = ask(an_engine(name, config), prompts()[1:2], num_tokens=20)
    ids = [token_id for token_id, _ in answer]
    for count in (1, 5, 19):
        (again,) = ask(an_engine(name, config), [prompts()[1] + ids[:count]])
        assert np.abs(again[0][1] - answer[count][1]).max() < exact.tolerance


@pytest.mark.parametrize("name", FEW)
def test_preempted_sequences_answer_the_same(name: str) -> None:
    config = rounded(a_config())
    crowd = [ids[:20] + ids[-20:] for ids in prompts()] * 2
    right = ask(an_engine(name, config), crowd, num_tokens=30)
    bus = EventBus()
    counters = Counters().attach(bus)
    small = replace(config, cache=replace(config.cache, kv_tokens=192))
    assert (
        distance(ask(an_engine(name, small, bus), crowd, 30), right) < exact_answers(name).tolerance
    )
    assert counters.preemptions > 0


@pytest.mark.parametrize("name", FEW)
def test_rounded_pages_come_back_from_disk(name: str, tmp_path: Path) -> None:
    """The files have half the bytes, and other kinds of pages are not found in them."""
    exact, taken = exact_answers(name), []
    store = StoreConfig(host_gb=0.01, disk_dir=str(tmp_path), disk_gb=0.1, fetch=Fetch.ALWAYS)
    for config in (rounded(a_config()), rounded(a_config()), a_config()):
        bus = EventBus()
        counters = Counters().attach(bus)
        engine = an_engine(name, replace(config, store=store), bus)
        found = ask(engine, prompts())
        if config.cache.kv_dtype is KvDType.FP8:
            exact.check(found)
        engine.close()
        taken.append(counters.loaded_pages["disk"] + counters.prefetched_pages)
    assert taken[0] == taken[2] == 0
    assert taken[1] > 3


def test_a_stored_page_has_half_of_the_bytes() -> None:
    config = a_config(DType.BF16)
    _, plain = load_cpu_runner(RecipeOrigin(RECIPES["GraniteForCausalLM"]), config)
    runner, facts = load_cpu_runner(RecipeOrigin(RECIPES["GraniteForCausalLM"]), rounded(config))
    assert isinstance(runner, CpuRunner)
    assert facts.page_bytes == runner.pages.page_bytes
    assert plain.page_bytes / facts.page_bytes == pytest.approx(1.97, abs=0.005)
    assert facts.identity != plain.identity


def test_the_same_memory_holds_nearly_twice_the_tokens() -> None:
    """Open pages in 16 bits and scales included."""
    config = replace(a_config(DType.BF16), cache=CacheConfig(kv_tokens=1 << 16))
    origin = RecipeOrigin(RECIPES["GraniteForCausalLM"])
    (_, plain), (_, facts) = (load_cpu_runner(origin, each) for each in (config, rounded(config)))
    assert facts.num_open_pages is not None
    used = facts.num_pages * facts.page_bytes + facts.num_open_pages * facts.open_page_bytes
    assert plain.num_pages * plain.page_bytes / used > 1.9


@pytest.mark.parametrize("expected", [None, 256, 4096])
@pytest.mark.parametrize("max_seqs", [None, 50, 1000])
@pytest.mark.parametrize("name", ["GraniteForCausalLM", "Gemma3ForCausalLM"])
def test_open_pages_are_a_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, max_seqs: int | None, expected: int | None
) -> None:
    """Also if pages have windowed parts, so that there are more of the others. The number follows
    the length of a sequence, and is never more than was asked for."""
    monkeypatch.setattr(cpu_load, "available_bytes", lambda: 50_000_000)
    cache = CacheConfig(memory_share=0.4, expected_tokens=expected)
    config = replace(a_config(DType.BF16), cache=cache, sched=SchedConfig(max_seqs=max_seqs))
    _, facts = load_cpu_runner(RecipeOrigin(RECIPES[name]), rounded(config))
    num_open = facts.num_open_pages
    assert num_open is not None
    kv = facts.num_pages * (facts.page_bytes - facts.part_bytes)
    kv += (facts.num_parts + 1) * facts.part_bytes if facts.num_parts else 0
    opened = num_open * facts.open_page_bytes
    assert 0.998 < (kv + opened) / 20_000_000 <= 1
    if expected is not None and num_open != max_seqs:
        length = min(expected, facts.max_model_len)
        assert num_open == pytest.approx(facts.num_pages * facts.page_size / length, rel=0.05)
    elif max_seqs is None:
        assert opened == pytest.approx(20_000_000 / 32, rel=0.03)
    else:
        assert num_open == max_seqs or opened == pytest.approx(20_000_000 / 4, rel=0.03)


def test_records_keep_numbers_to_a_sixteenth() -> None:
    """Three bits after the leading one; the largest number of a page is exact up to its scale."""
    values = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)) * 100
    values[0] = 0
    values[1, 0, 7] = -1e4
    records = round_pages(values)
    assert records.shape == (5, 3, record_bytes(64))
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.empty(5, 3, 64, dtype=dtype)
        expand_pages(records, found)
        least = values.abs().amax(-1, keepdim=True) / MOST * 2**-7  # steps below the least normal
        assert ((found.float() - values).abs() <= values.abs() / 15 + least).all()
        assert found[0].abs().max() == 0
        assert float(found[1, 0, 7]) == pytest.approx(-1e4, rel=2**-8)


def test_every_code_is_expanded_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127] = codes[255] = 0  # not numbers; never written
    records = torch.zeros(1, record_bytes(256), dtype=torch.uint8)
    records[0, :256] = codes
    records[0, 256:260] = torch.tensor([0.25]).view(torch.uint8)
    found = torch.empty(1, 256)
    expand_pages(records, found)
    assert torch.equal(found[0], codes.view(torch.float8_e4m3fn).float() * 0.25)


def test_records_with_a_given_scale_are_cut_at_its_largest_number() -> None:
    found = torch.empty(2)
    expand_pages(round_pages(torch.tensor([1000.0, 1.0]), 1.0), found)
    assert found.tolist() == [MOST, 1.0]


def test_an_open_page_is_found_by_its_sequence_after_others_have_ended() -> None:
    """More sequences than open pages wait for their turn."""
    name = "GraniteForCausalLM"
    config = rounded(replace(a_config(), sched=SchedConfig(chunk_tokens=24, max_seqs=2)))
    engine = an_engine(name, config)
    assert isinstance(engine._runner, CpuRunner)
    assert isinstance(engine._runner.pages, RoundedPages)
    assert engine._runner.pages.num_open == 2
    exact_answers(name).check(ask(engine, prompts()))


def test_models_with_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype=fp8 .* recurrent layers"):
        an_engine("FalconH1ForCausalLM", rounded(a_config()))


def test_bf16_is_refused_for_another_compute_dtype() -> None:
    config = replace(a_config(), cache=CacheConfig(kv_tokens=64, kv_dtype=KvDType.BF16))
    with pytest.raises(ConfigError, match="float32 here"):
        an_engine("GraniteForCausalLM", config)


def test_a_moved_page_has_the_error_of_two_roundings() -> None:
    """A truncation expands a page, rotates its keys in fp32 and rounds them again."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(64, 16, 64, generator=generator)
    angles = 10 * torch.randn(64, 1, 32, generator=generator)
    turns = torch.polar(torch.ones_like(angles), angles)

    def as_kept(pages: torch.Tensor) -> torch.Tensor:
        found = torch.empty(64, 16 * 64)
        expand_pages(round_pages(pages.reshape(64, -1)), found)
        return found.view(pages.shape)

    def error(found: torch.Tensor, right: torch.Tensor) -> float:
        return float((found - right).norm() / right.norm())

    right, moved = keys.clone(), as_kept(keys)
    turn_keys(right, turns)
    turn_keys(moved, turns)
    once, twice = error(as_kept(keys), keys), error(as_kept(moved), right)
    assert 0.02 < once < 0.03
    assert once < twice < 1.5 * once


@pytest.mark.parametrize("overflow", [Overflow.KV, Overflow.IMPORTANT])
@pytest.mark.parametrize(
    "name", ["OlmoForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM" + BIASED]
)
def test_truncated_conversations_read_moved_pages(name: str, overflow: Overflow) -> None:
    """With one layer a moved page is a computed page, rotated: each answer must be near that to a
    prompt of the kept tokens."""
    model = a_model(name)
    model = replace(model, spec=replace(model.spec, layers=model.spec.layers[-1:]))
    config = rounded(replace(a_config(), sched=SchedConfig(chunk_tokens=24, max_model_len=160)))
    bus = EventBus()
    counters = Counters().attach(bus)
    runner, facts = load_cpu_runner(model, config)
    engine = join(runner, facts, config, bus)
    rng, said, far = np.random.default_rng(3), list[int](), 0.0
    for turn in range(6):
        said += rng.integers(3, VOCAB, 50).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=2, logprobs=20, ignore_eos=True)
        request = Request(
            RequestId(f"{turn}"),
            np.array(said, np.int32),
            sampling,
            session=SessionId("s"),
            overflow=overflow,
        )
        (found,) = run_requests(engine, [request])
        kept, _ = engine._scheduler._intake._truncator.fit(request)
        alone = Request(RequestId(f"alone {turn}"), kept.prompt_ids, sampling, salt=b"alone")
        far = max(far, distance([found[:1]], [run_requests(engine, [alone])[0][:1]]))
    assert counters.moved_pages > 0
    assert far < 20 * exact_answers(name).tolerance  # twice what rounding changes


@pytest.mark.parametrize("name", FEW)
def test_weighings_read_the_pages_as_rounded(name: str) -> None:
    """The masses of pages are near those of unrounded keys, and that of the open page is the
    same code path: it holds the tokens of two steps."""
    masses = []
    for config in (a_config(), rounded(a_config())):
        runner, _ = load_cpu_runner(a_model(name), config)
        ids = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, 45)]
        seq = Seq(slot=1, token_ids=ids, pages=[4, 0, 2])
        first = [Work(seq, 35, has_sample=False)]
        step = a_step(first, 16, VOCAB)
        run(runner, with_own_parts(step, runner), first)
        step = a_step([Work(seq, 10)], 16, VOCAB)
        weighing = PageWeighing(2, 8, np.array(seq.pages, np.int32))
        step = replace(with_own_parts(step, runner), weighings=(weighing,))
        masses.append(runner.launch(step).wait().page_masses[0])
    assert masses[1].sum() == pytest.approx(masses[0].sum(), rel=1e-4)  # weights of whole rows
    assert np.allclose(masses[1], masses[0], rtol=0.1)
    assert not np.array_equal(masses[1], masses[0])


def with_own_parts(step: Step, runner: CpuRunner) -> Step:
    """The step; if windowed parts have a pool of their own, each page's is at its own number."""
    if not runner.pages.num_parts:
        return step
    places = np.minimum(np.arange(runner.pages.num_pages), runner.pages.num_parts)
    return replace(step, window_parts=places.astype(np.int32))


def test_the_scales_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    declare_fp8_kv(tmp_path, {"k": 0.25, "v": 0.125})
    runner, facts = load_cpu_runner(
        folder_origin(tmp_path), EngineConfig(cache=CacheConfig(kv_tokens=64))
    )
    assert isinstance(runner.pages, RoundedPages)
    assert runner.pages.scales == dict.fromkeys(range(runner.pages.num_layers), (0.25, 0.125))
    own = CacheConfig(kv_tokens=64, kv_dtype=KvDType.FP8)
    of_pages, other = load_cpu_runner(folder_origin(tmp_path), EngineConfig(cache=own))
    assert isinstance(of_pages.pages, RoundedPages)
    assert of_pages.pages.scales is None
    assert facts.identity != other.identity
    seq = Seq(slot=0, token_ids=list(range(3, 21)), pages=[1, 0])
    works = [Work(seq, 18)]
    run(runner, a_step(works, 16, CHECKPOINT_VOCAB), works)
    records = runner.pages.rounded(0)[0, :, 1].contiguous()
    assert (records.view(torch.float32)[:, -4] == 0.25).all()


def test_a_declared_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    declare_fp8_kv(tmp_path, {"k": 0.02})
    config = EngineConfig(cache=CacheConfig(kv_tokens=64))
    with pytest.raises(UnsupportedModel, match=r"lacks model.layers.0.self_attn.v_scale"):
        load_cpu_runner(folder_origin(tmp_path), config)


def test_shifts_keep_large_biases_from_drowning_keys() -> None:
    """A shift that nobody needs changes nothing but the rounding; without it, more is lost."""
    name, config = "Qwen2MoeForCausalLM" + BIASED, rounded(a_config())
    right = [ask(an_engine(name, a_config()), [ids])[0] for ids in prompts()]
    shifted = [ask(an_engine(name, config), [ids])[0] for ids in prompts()]
    engine = an_engine(name, config)
    assert isinstance(engine._runner, CpuRunner)
    assert isinstance(engine._runner.pages, RoundedPages)
    engine._runner.pages.shifts.clear()
    plain = [ask(engine, [ids])[0] for ids in prompts()]
    assert distance(shifted, right) < distance(plain, right) / 2


def test_shifts_are_a_part_of_the_identity() -> None:
    """Pages of engines whose shifts differ cannot be mixed."""
    config, recipe = rounded(a_config()), RECIPES["Qwen2MoeForCausalLM"]
    origins = [RecipeOrigin(recipe, bias) for bias in (0.0, 300.0, 100.0, 100.1)]
    found = [load_cpu_runner(origin, config)[1].identity for origin in origins]
    assert len(set(found[:3])) == 3
    assert found[2] == found[3]  # shifts are whole numbers; the weights' digest is equal here
    plain = [load_cpu_runner(origin, a_config())[1].identity for origin in origins]
    assert len(set(plain)) == 1


@pytest.mark.parametrize(("part", "is_refused"), [("k", True), ("q", False), ("v", False)])
def test_large_biases_that_turn_are_refused(part: str, is_refused: bool, tmp_path: Path) -> None:
    """A shift cannot follow them, so that fp8 would round them by up to a 16th of their size. At
    the start, and when weights change."""
    make_checkpoint("qwen2", tmp_path / "a")
    make_checkpoint("qwen2", tmp_path / "b")
    file, name = tmp_path / "b" / "model.safetensors", f"model.layers.1.self_attn.{part}_proj.bias"
    tensors = load_file(file)
    tensors[name][0] = -300.0
    save_file(tensors, file)
    config = EngineConfig(cache=CacheConfig(kv_tokens=64))
    load_cpu_runner(folder_origin(tmp_path / "b"), config)
    runner, _ = load_cpu_runner(folder_origin(tmp_path / "a"), rounded(config))
    assert runner.weights is not None
    updates = (FolderUpdate(tmp_path / "b"), TensorUpdate([(name, tensors[name])]))
    if not is_refused:
        load_cpu_runner(folder_origin(tmp_path / "b"), rounded(config))
        for update in updates:
            runner.weights.update(update)
        return
    words = "kv_dtype=fp8 is not supported for this model: the keys of layer 1 have biases"
    with pytest.raises(UnsupportedModel, match=words):
        load_cpu_runner(folder_origin(tmp_path / "b"), rounded(config))
    before = runner.weights.update(FolderUpdate(tmp_path / "a"))
    for update in updates:
        with pytest.raises(InvalidRequest, match=words):
            runner.weights.update(update)
    assert runner.weights.update(FolderUpdate(tmp_path / "a")) == before


def declare_fp8_kv(folder: Path, scales: dict[str, float]) -> None:
    """Add a scheme and scales to a checkpoint whose weights are plain."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        for letter, scale in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{letter}_scale"] = torch.tensor([scale])
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
        "kv_cache_scheme": scheme,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_open_pages_sleep_with_the_others(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    config = replace(a_config(), cache=CacheConfig(kv_tokens=512))
    runner, facts = load_cpu_runner(folder_origin(tmp_path), rounded(config))
    assert isinstance(runner.pages, RoundedPages)
    engine = join(runner, facts, config, EventBus())
    expected = ask(engine, prompts())
    opened = runner.pages.opened(0).fill_(1)
    settle(engine, engine.sleep(1))
    assert (opened == 0).any()
    settle(engine, engine.wake())
    assert distance(ask(engine, prompts()), expected) == 0
    engine.close()
