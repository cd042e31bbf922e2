"""The GPU runner under Triton's interpreter: the same tokens as the CPU runner."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedConfig, Share
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.request import Overflow, Request, SamplingParams, Scoring
from mainstem.core.step import Runner
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.kernels.attention.plan import Launches
from mainstem.models.spec import ModelSpec
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import Origin, RandomOrigin
from mainstem_bench.shapes import llama_shape
from tests.runner.conversations import check_conversation
from tests.runner.recipes import RECIPES, RecipeOrigin
from tests.runner.recorded_graphs import Recorder
from tests.runner.steps import Seq, Work, a_step, run

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPE = llama_shape(32, 48, 1, 2, 1, 64, 96, 10_000.0, max_positions=512)
interpreted = pytest.mark.skipif(
    not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1; see test_interpreter.py"
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=2, ignore_eos=True)
EDITED = SamplingParams(
    temperature=0.0, repetition_penalty=1.5, max_tokens=2, logprobs=2, ignore_eos=True
)


def a_config(share: Share = Share.READS, page_size: int = 16) -> EngineConfig:
    return EngineConfig(
        ModelConfig(dtype=DType.FP32),
        CacheConfig(page_size=page_size, kv_tokens=512),
        SchedConfig(chunk_tokens=24, share=share),
    )


def on_gpu(config: EngineConfig, shape: ModelSpec = SHAPE) -> Engine:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    runner, facts = load_gpu_runner(RandomOrigin(shape, 0), config, torch.device("cpu"))
    return join(runner, facts, config, EventBus())


def on_cpu(config: EngineConfig, shape: ModelSpec = SHAPE) -> Engine:
    runner, facts = load_cpu_runner(RandomOrigin(shape, 0), config)
    return join(runner, facts, config, EventBus())


def answers(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    for index, ids in enumerate(prompts):
        engine.submit(Request(RequestId(str(index)), np.array(ids, np.int32), sampling))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
    engine.check()
    return found


def prompts() -> list[list[int]]:
    """Two prompts share a page and a part of the next; one shares nothing."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, SHAPE.vocab_size, 19).tolist()
    tails = [rng.integers(3, SHAPE.vocab_size, 5).tolist() for _ in range(2)]
    return [*(head + tail for tail in tails), rng.integers(3, SHAPE.vocab_size, 9).tolist()]


@interpreted
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, EDITED], ids=["greedy", "drawn", "edited"])
def test_tokens_are_those_of_the_cpu(sampling: SamplingParams) -> None:
    assert answers(on_gpu(a_config()), prompts(), sampling) == answers(
        on_cpu(a_config()), prompts(), sampling
    )


@interpreted
@pytest.mark.slow
def test_layers_of_several_kinds_give_the_tokens_of_the_cpu() -> None:
    """Layers with a window and sinks, a softcap and no rotation, a window and another rotation."""
    plain = SHAPE.attentions[0]
    assert plain.rope is not None
    kinds = (
        replace(plain, window=14, has_sinks=True),
        replace(plain, rope=None, softcap=0.5),
        replace(plain, window=14, rope=replace(plain.rope, theta=500.0)),
    )
    shape = replace(SHAPE, layers=tuple(replace(SHAPE.layers[0], attention=kind) for kind in kinds))
    some = prompts()[:2]
    found = answers(on_gpu(a_config(), shape), some, GREEDY)
    assert found == answers(on_cpu(a_config(), shape), some, GREEDY)
    assert found != answers(on_cpu(a_config()), some, GREEDY)


@interpreted
def test_tokens_are_the_same_without_sharing() -> None:
    shared = answers(on_gpu(a_config()), prompts(), GREEDY)
    assert answers(on_gpu(a_config(Share.NONE)), prompts(), GREEDY) == shared


def scores(engine: Engine) -> list[float]:
    """Logprobs of each prompt's last two tokens, then of forty tokens that may follow it: more rows
    of logits than the step has tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    for index, ids in enumerate(prompts()):
        asked = Scoring(len(ids) - 2, tuple(range(40)))
        array = np.array(ids, np.int32)
        engine.submit(Request(RequestId(str(index)), array, sampling, scoring=asked))
    found: dict[str, list[float]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.prompt_logprobs is not None
            found[output.request_id] = [each.logprob for each in output.prompt_logprobs if each]
    return [each for name in sorted(found) for each in found[name]]


@interpreted
def test_scores_are_those_of_the_cpu() -> None:
    wanted = scores(on_cpu(a_config()))
    assert len(wanted) == 3 * 42
    assert scores(on_gpu(a_config())) == pytest.approx(wanted, abs=1e-4)


def told(runner: Runner) -> list[list[int]]:
    """Token ids of four sequences. Three share a page; steps compute the page, their own parts,
    decodes of all three, and a decode of one alone. The fourth copies a part of the page."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, SHAPE.vocab_size, 16).tolist()
    tails = rng.integers(3, SHAPE.vocab_size, (3, 3)).tolist()
    seqs = [Seq(i, head + tail, [0, i + 1], num_shared_pages=1) for i, tail in enumerate(tails)]
    first = Work(seqs[0], 16, has_sample=False)
    run(runner, a_step([first], 16, SHAPE.vocab_size), [first])
    for seq in seqs:
        seq.num_done = 16
    for works in (
        [Work(seq, 3) for seq in seqs],
        [Work(seq, 1) for seq in seqs],
        [Work(seq, 1) for seq in seqs],
    ):
        run(runner, a_step(works, 16, SHAPE.vocab_size), works)
    alone = Work(replace(seqs[0], num_shared_pages=0), 1)
    run(runner, a_step([alone], 16, SHAPE.vocab_size), [alone])
    seqs.append(Seq(3, head[:10] + tails[0], [4]))
    seqs[3].num_done = 10
    own = Work(seqs[3], 3)
    source = np.arange(10, dtype=np.int64)
    step = replace(a_step([own], 16, SHAPE.vocab_size), copy_from=source, copy_to=source + 4 * 16)
    run(runner, step, [own])
    return [seq.token_ids for seq in seqs]


@interpreted
@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(RandomOrigin(replace(SHAPE, layers=SHAPE.layers * 2), 0), id="dense"),
        pytest.param(
            RecipeOrigin(RECIPES["Qwen2MoeForCausalLM"]), id="experts", marks=pytest.mark.slow
        ),
        pytest.param(
            RecipeOrigin(RECIPES["Gemma 4 with inputs of layers"]),
            id="inputs of layers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_replayed_steps_give_the_same_tokens(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run as graphs of two sizes, without launches that their plan does not need, and each
    layer is a piece. The larger graph ends before the last layer."""
    from mainstem.runner import gpu, graphs  # noqa: PLC0415
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415

    for module in (gpu, graphs):
        monkeypatch.setattr(module, "LAYERS_AT_ONCE", 1)
        monkeypatch.setattr(module, "FEW_TOKENS", 3)
    runner, _ = load_gpu_runner(origin, a_config(), torch.device("cpu"))
    replayed: list[tuple[int, Launches]] = []

    def pieces_of(size: int, launches: Launches) -> list[graphs.Piece]:
        first, *others = runner._pieces(size, launches)

        def recorded_first() -> None:
            replayed.append((size, launches))
            first.run()

        return [first._replace(run=recorded_first), *others]

    with torch.inference_mode():
        kinds = runner._attention.kinds_of_steps
        count = origin.spec.num_layers
        assert [len(runner._pieces(size, kinds[0])) for size in (3, 16)] == [count, count - 1]
        recorded = Recorder(monkeypatch).wrap(pieces_of)
        page_layers = origin.spec.page_layers
        runner._graphs = graphs.StepGraphs((3, 16), kinds, recorded, page_layers)
    replayed.clear()
    assert told(runner) == told(load_cpu_runner(origin, a_config())[0])
    assert {launches for _, launches in replayed} == set(kinds)


@interpreted
def test_page_sizes_that_the_kernel_does_not_support_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        on_gpu(a_config(page_size=8))


@interpreted
def test_more_span_levels_than_the_buffers_hold_are_refused() -> None:
    config = a_config()
    with pytest.raises(ConfigError, match="span_levels on a GPU must be at most 8, got 9"):
        on_gpu(replace(config, sched=replace(config.sched, span_levels=9)))


def test_settings_that_need_a_gpu_are_refused_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from mainstem.core.config import Device, Quantize  # noqa: PLC0415
    from mainstem.runner.load import choose_device  # noqa: PLC0415

    with pytest.raises(ConfigError, match="device=cuda"):
        choose_device(ModelConfig(device=Device.CUDA))
    with pytest.raises(ConfigError, match="fp8"):
        choose_device(ModelConfig(quantize=Quantize.FP8))
    with pytest.raises(ConfigError, match="deterministic"):
        choose_device(ModelConfig(deterministic=True))


def test_fp8_is_refused_with_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.core.config import Quantize  # noqa: PLC0415
    from mainstem.runner.load import choose_device  # noqa: PLC0415

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device(ModelConfig(quantize=Quantize.FP8)).type == "cuda"
    with pytest.raises(ConfigError, match="deterministic cannot be combined with quantize=fp8"):
        choose_device(ModelConfig(quantize=Quantize.FP8, deterministic=True))


@interpreted
@pytest.mark.slow
def test_a_conversation_longer_than_the_window_is_cut_by_attention() -> None:
    config = a_config()
    config = replace(config, sched=replace(config.sched, max_model_len=80))
    engine = on_gpu(config)
    vocab = SHAPE.vocab_size
    assert check_conversation(engine, Overflow.IMPORTANT, vocab, turns=2, turn_tokens=44) == 1
