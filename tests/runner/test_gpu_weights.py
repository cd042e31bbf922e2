"""Weights of the GPU's runner change in place, and it gives memory back. Without a GPU, in Triton's
interpreter (test_interpreter.py); with CUDA graphs in tests/gpu/test_weights_gpu.py."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from mainstem.core.config import CacheConfig, DType, EngineConfig, KvDType, ModelConfig, SchedConfig
from mainstem.core.errors import InvalidRequest, WeightsLost
from mainstem.core.events import EventBus
from mainstem.core.weights import FolderUpdate, Tag, TensorUpdate
from mainstem.engine.build import join
from mainstem.engine.engine import Engine
from mainstem.models.pour import CannotPour, pour
from mainstem.runner.gpu import GpuRunner
from mainstem.runner.gpu_rounded import RoundedGpuPages
from mainstem.runner.gpu_weights import Freed
from mainstem.runner.origin import folder_origin
from tests.builders import a_request, run_all
from tests.engine.test_weights import change, settle, tensors_of
from tests.models.checkpoints import SMALL, write_checkpoint

CONFIG = EngineConfig(
    model=ModelConfig(model="tiny", dtype=DType.FP32),
    cache=CacheConfig(kv_tokens=128),
    sched=SchedConfig(chunk_tokens=16),
)
TWO = SMALL | {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; see test_interpreter.py",
)


def an_engine(folder: Path, config: EngineConfig = CONFIG) -> Engine:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs the interpreter

    loaded = load_gpu_runner(folder_origin(folder), config, torch.device("cpu"))
    return join(*loaded, config, EventBus())


def answer(engine: Engine) -> list[int]:
    request = a_request([5, 6, 7, 8, 9, 10, 11], 3)
    return run_all(engine, [request]).tokens[request.request_id, 0]


def fresh(folder: Path) -> list[int]:
    engine = an_engine(folder)
    try:
        return answer(engine)
    finally:
        engine.close()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for seed, name in enumerate(("a", "b")):
        write_checkpoint(LlamaConfig(**TWO), tmp_path / name, seed=seed)
    return tmp_path / "a", tmp_path / "b"


@interpreted
def test_whole_and_in_part(folders: tuple[Path, Path]) -> None:
    engine, (a, b) = an_engine(folders[0]), folders
    first, second = answer(engine), fresh(b)
    assert first != second
    tensors = tensors_of(b)
    change(engine, TensorUpdate(tensors.items()))
    assert answer(engine) == second
    change(engine, FolderUpdate(a))
    assert answer(engine) == first
    for part in ("model.layers.0.", "model.layers.1.", ("model.embed", "model.norm")):
        change(engine, TensorUpdate([i for i in tensors.items() if i[0].startswith(part)]))
    assert answer(engine) == second
    with pytest.raises(InvalidRequest, match=r"layers.0\S* is needed too"):
        change(engine, TensorUpdate([("model.layers.0.input_layernorm.weight", torch.ones(48))]))
    with pytest.raises(InvalidRequest, match="must be equal"):
        change(engine, TensorUpdate([*tensors.items(), ("lm_head.weight", torch.ones(199, 48))]))
    assert answer(engine) == second
    engine.check()
    engine.close()


@interpreted
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(folders: tuple[Path, Path], level: int) -> None:
    engine = an_engine(folders[0])
    change(engine, FolderUpdate(folders[1]))
    settle(engine, engine.sleep(level))
    settle(engine, engine.wake(frozenset({Tag.WEIGHTS})))
    settle(engine, engine.wake(frozenset({Tag.KV_CACHE})))
    assert answer(engine) == fresh(folders[1])
    change(engine, TensorUpdate(tensors_of(folders[0]).items()))
    settle(engine, engine.sleep(level))
    settle(engine, engine.wake())
    if level == 2:
        with pytest.raises(WeightsLost):
            answer(engine)
        change(engine, TensorUpdate(tensors_of(folders[0]).items()))
    assert answer(engine) == fresh(folders[0])
    engine.close()


@interpreted
def test_rounded_pages_sleep_with_their_open_pages(folders: tuple[Path, Path]) -> None:
    cache = replace(CONFIG.cache, kv_dtype=KvDType.FP8)
    engine = an_engine(folders[0], replace(CONFIG, cache=cache))
    expected = answer(engine)
    runner = engine._runner
    assert isinstance(runner, GpuRunner)
    assert isinstance(runner.pages, RoundedGpuPages)
    tensors = [*runner.pages.tensors, *runner.pages.opened.tensors]
    settle(engine, engine.sleep(1))
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    settle(engine, engine.wake())
    assert answer(engine) == expected
    engine.close()


def failing_once(real: Callable[..., None]) -> Callable[..., None]:
    num_calls = count(1)

    def limited(*args: object) -> None:
        if next(num_calls) == 3:
            raise MemoryError
        real(*args)

    return limited


@interpreted
def test_too_little_memory_to_sleep_or_to_wake(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were moved come back once, whatever happens to the others."""
    engine = an_engine(folders[0])
    expected = answer(engine)
    works: dict[str, Callable[[], object]] = {
        "__init__": lambda: engine.sleep(1),
        "restore": engine.wake,
    }
    for name, work in works.items():
        monkeypatch.setattr(Freed, name, failing_once(getattr(Freed, name)))
        with pytest.raises(MemoryError):
            settle(engine, work())
        if name == "__init__":
            assert answer(engine) == expected
        settle(engine, work())
    assert answer(engine) == expected
    engine.close()


@interpreted
def test_experts(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        config = Qwen3MoeConfig(**TWO, **EXPERTS)
        write_checkpoint(config, tmp_path / name, seed=seed)
    engine = an_engine(tmp_path / "a")
    change(engine, TensorUpdate(tensors_of(tmp_path / "b").items()))
    assert answer(engine) == fresh(tmp_path / "b")
    engine.close()


def test_what_differs_in_more_than_tensors_is_refused() -> None:
    with pytest.raises(CannotPour, match=r"dict\.scale is 1\.0 and would be 2\.0"):
        pour({"scale": 1.0}, {"scale": 2.0})
    with pytest.raises(CannotPour, match=r"\[2\] and would be torch.float32 \[3\]"):
        pour([torch.zeros(2)], [torch.zeros(3)])


def test_tensors_in_closures_are_poured() -> None:
    def scaled(by: torch.Tensor) -> object:
        return lambda x: x * by

    old, kept = scaled(by := torch.ones(2)), by
    pour((old,), (scaled(torch.full((2,), 3.0)),))
    assert kept.tolist() == [3.0, 3.0]
