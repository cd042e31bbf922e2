"""Weights change under CUDA graphs, and memory is given back and taken again; needs CUDA, run with
`make test-gpu`. Answers are long enough that graphs of several sizes run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from transformers import LlamaConfig, Qwen3MoeConfig

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig
from mainstem.core.errors import EngineAsleep, WeightsLost
from mainstem.core.weights import FolderUpdate, Tag, TensorUpdate, UpdateMode
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from tests.builders import a_request, run_all
from tests.engine.test_weights import change, settle, tensors_of
from tests.models.checkpoints import SMALL, write_checkpoint

pytestmark = pytest.mark.gpu
SIZES = SMALL | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CONFIG = EngineConfig(model=ModelConfig(model="tiny"), cache=CacheConfig(kv_tokens=4096))
PROMPTS = [list(range(1, 40)), [*range(1, 20), *range(50, 70)], [7, 8, 9]]


@pytest.fixture(scope="module", params=["llama", "experts"])
def folders(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    for seed, name in enumerate(("a", "b")):
        config = LlamaConfig(**SIZES)
        if request.param == "experts":
            config = Qwen3MoeConfig(**SIZES, **experts)
        write_checkpoint(config, root / name, seed=seed, dtype=torch.bfloat16, std=0.1)
    return root / "a", root / "b"


@pytest.fixture
def engine(folders: tuple[Path, Path]) -> Iterator[Engine]:
    made = build_engine(folders[0], CONFIG)
    yield made
    made.close()


def answers(engine: Engine) -> list[list[int]]:
    requests = [a_request(prompt, 40) for prompt in PROMPTS]
    found = run_all(engine, requests)
    return [found.tokens[request.request_id, 0] for request in requests]


def fresh(folder: Path) -> list[list[int]]:
    engine = build_engine(folder, CONFIG)
    try:
        return answers(engine)
    finally:
        engine.close()


def test_updates_under_graphs(engine: Engine, folders: tuple[Path, Path]) -> None:
    first, second = answers(engine), fresh(folders[1])
    assert first != second
    change(engine, TensorUpdate(tensors_of(folders[1]).items()))
    assert answers(engine) == second
    change(engine, FolderUpdate(folders[0]))
    assert answers(engine) == first
    on_device = ((name, each.cuda()) for name, each in tensors_of(folders[1]).items())
    change(engine, TensorUpdate(on_device))
    assert answers(engine) == second
    engine.check()


def test_a_layer_alone(engine: Engine, folders: tuple[Path, Path]) -> None:
    for part in (
        "model.layers.0.",
        "model.layers.1.",
        "model.layers.2.",
        ("model.e", "model.n", "lm_head"),
    ):
        chosen = [each for each in tensors_of(folders[1]).items() if each[0].startswith(part)]
        change(engine, TensorUpdate(chosen))
    assert answers(engine) == fresh(folders[1])


def test_continue(engine: Engine, folders: tuple[Path, Path]) -> None:
    engine.submit(a_request(PROMPTS[0], 60, name="before"))
    for _ in range(9):
        engine.step()
    change(engine, FolderUpdate(folders[1]), UpdateMode.CONTINUE)
    while engine.has_work:
        engine.step()
    assert answers(engine) == fresh(folders[1])
    engine.check()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(engine: Engine, folders: tuple[Path, Path], level: int) -> None:
    first = answers(engine)
    before = torch.cuda.memory_reserved()
    settle(engine, engine.sleep(level))
    assert torch.cuda.memory_reserved() < before
    with pytest.raises(EngineAsleep):
        engine.submit(a_request(PROMPTS[0]))
    others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    settle(engine, engine.wake(frozenset({Tag.WEIGHTS})))
    settle(engine, engine.wake(frozenset({Tag.KV_CACHE})))
    del others
    assert answers(engine) == first
    change(engine, FolderUpdate(folders[1]))
    assert answers(engine) == fresh(folders[1])


def test_level_2_after_tensors(engine: Engine, folders: tuple[Path, Path]) -> None:
    tensors = tensors_of(folders[1])
    change(engine, TensorUpdate(tensors.items()))
    settle(engine, engine.sleep(2))
    settle(engine, engine.wake())
    with pytest.raises(WeightsLost):
        engine.submit(a_request(PROMPTS[0]))
    change(engine, TensorUpdate(tensors.items()))
    assert answers(engine) == fresh(folders[1])


def test_logprobs_equal_a_scoring_pass_bit_for_bit(folders: tuple[Path, Path]) -> None:
    """With --deterministic: those of sampled tokens, and those of the same tokens in a prompt."""
    from dataclasses import replace  # noqa: PLC0415

    from mainstem.core.request import SamplingParams  # noqa: PLC0415

    model = replace(CONFIG.model, deterministic=True)
    engine = build_engine(folders[0], replace(CONFIG, model=model))
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=0, ignore_eos=True)
    asked = a_request(PROMPTS[0], sampling=sampling)
    found = run_all(engine, [asked])
    ids = found.tokens[asked.request_id, 0]
    drawn = [each.logprob for output in found.outputs for each in output.logprobs]
    engine.clear_cache()
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scored = run_all(engine, [a_request([*PROMPTS[0], *ids], sampling=scoring)])
    (entries,) = [o.prompt_logprobs for o in scored.outputs if o.prompt_logprobs is not None]
    told = [each.logprob for each in entries[len(PROMPTS[0]) :] if each is not None]
    assert told == drawn
    engine.close()
