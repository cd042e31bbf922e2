"""A conversation with a hybrid model leaves the device, or the process, between its turns."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)

from mainstem.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    Fetch,
    ModelConfig,
    SchedConfig,
    StoreConfig,
)
from mainstem.core.request import SamplingParams
from mainstem.core.step import Runner
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem.kv.transfer import LoadId
from mainstem.models.families import read_spec
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.pages import DevicePages
from mainstem.runner.states import DeviceStates, pages_per_state
from mainstem.runner.transfer import CpuCopier
from tests.builders import a_request, run_all
from tests.families.test_mamba import GRANITE, MAMBA, STD
from tests.families.test_qwen_hybrid import HYBRID
from tests.models.checkpoints import SMALL, write_checkpoint

PAGE = 4
ANSWER = 9
OTHERS: dict[str, PreTrainedConfig] = {
    "mamba 2": GraniteMoeHybridConfig(**GRANITE, num_local_experts=0),
    "convolution": Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]),
    "beside attention": FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=96),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_checkpoint(Qwen3_5TextConfig(**HYBRID), folder)
    return folder


def an_engine(folder: Path, disk_dir: Path | None) -> Engine:
    """With host memory and a disk; without both if there is no folder for the disk."""
    store = StoreConfig()
    if disk_dir is not None:
        store = StoreConfig(
            host_gb=0.004, disk_dir=str(disk_dir), disk_gb=0.004, fetch=Fetch.ALWAYS
        )
    config = EngineConfig(
        model=ModelConfig(dtype=DType.FP32),
        cache=CacheConfig(page_size=PAGE, kv_tokens=2000, states=12),
        sched=SchedConfig(chunk_tokens=64),
        store=store,
    )
    return build_engine(folder, config, around=_with_dirty_states)


def _with_dirty_states(runner: Runner) -> Runner:
    assert isinstance(runner, CpuRunner)
    assert runner.states is not None
    runner.states.pieces.fill_(0xFF)  # NaN
    return runner


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """The answer to a prompt, and where it started."""
    request = a_request(
        prompt, name="r", sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER)
    )
    found = run_all(engine, [request])
    return found.tokens["r", 0], found.outputs[0].num_cached_tokens


def leave_the_device(folder: Path, disk_dir: Path, engine: Engine) -> Engine:
    engine.flush()
    engine.clear_device()
    return engine


def restart(folder: Path, disk_dir: Path, engine: Engine) -> Engine:
    engine.close()
    return an_engine(folder, disk_dir)


@pytest.mark.parametrize("between", [leave_the_device, restart])
def test_turns_are_continued_from_tiers(
    folder: Path, tmp_path: Path, between: Callable[[Path, Path, Engine], Engine]
) -> None:
    check_turns(folder, tmp_path, between, num_turns=6)


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_recurrences_are_continued_after_a_restart(name: str, tmp_path: Path) -> None:
    folder, disk_dir = tmp_path / "model", tmp_path / "disk"
    write_checkpoint(OTHERS[name], folder, std=STD)
    check_turns(folder, disk_dir, restart, num_turns=3)


def check_turns(
    folder: Path, tmp_path: Path, between: Callable[[Path, Path, Engine], Engine], num_turns: int
) -> None:
    """Every turn but the first starts less than a page before the end of the last one, and its
    answer is that of an engine that computes everything."""
    rng = np.random.default_rng(0)
    fresh = an_engine(folder, None)
    engine, said, end = an_engine(folder, tmp_path), rng.integers(3, 90, 45).tolist(), 0
    for _ in range(num_turns):
        found, start = answer(engine, said)
        assert end - PAGE < start <= end
        fresh.clear_cache()
        assert found == answer(fresh, said)[0]
        said += found
        end = len(said) - 1  # nothing has read the last token
        said += rng.integers(3, 90, int(rng.integers(2, 9))).tolist()
        engine = between(folder, tmp_path, engine)
    engine.close()
    fresh.close()


def test_the_division_of_memory_is_logged(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mainstem.engine"):
        an_engine(folder, tmp_path).close()
    spec = read_spec(folder)
    page_bytes = spec.kv_elements_per_token * 4 * PAGE
    state_bytes = pages_per_state(spec, 4, page_bytes) * page_bytes
    line = f"500 pages x {page_bytes:,} bytes, 12 states x {state_bytes:,} bytes"
    assert any(line in record.message for record in caplog.records)


def test_host_memory_without_room_for_states_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        model=ModelConfig(dtype=DType.FP32),
        cache=CacheConfig(page_size=PAGE, kv_tokens=2000, states=12),
        store=StoreConfig(host_gb=1e-5),
    )
    engine = build_engine(folder, config)
    assert "states of recurrent layers stay on the device" in caplog.text
    said = list(range(3, 50))
    assert answer(engine, said)[0] == answer(engine, said)[0]
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_copied_bit_by_bit(folder: Path, dtype: torch.dtype) -> None:
    spec = read_spec(folder)
    pages = DevicePages(spec, 8, PAGE, dtype)
    states = DeviceStates(spec, 3, dtype, torch.device("cpu"), pages.page_bytes)
    count = states.pages_per_state
    assert count == pages_per_state(spec, dtype.itemsize, pages.page_bytes) > 1
    assert count * pages.page_bytes >= spec.state_bytes(dtype.itemsize)
    for layer in states.layers:
        layer.conv.copy_(torch.rand(layer.conv.shape))
        layer.matrix.copy_(torch.rand(layer.matrix.shape))
    before = [(layer.conv[1].clone(), layer.matrix[1].clone()) for layer in states.layers]
    others = [layer.matrix[[0, 3]].clone() for layer in states.layers]
    copier = CpuCopier(pages, (count + 4) * 4096 * 4, states=states)
    first = pages.num_pages
    slots = np.arange(1, count + 1, dtype=np.int32)[::-1].copy()
    copier.save(np.arange(first + count, first + 2 * count, dtype=np.int32), slots).wait()
    numbers = np.arange(first + 2 * count, first + 3 * count, dtype=np.int32)
    copier.load(LoadId(0), slots, numbers).wait()
    for layer, (conv, matrix), other in zip(states.layers, before, others, strict=True):
        assert torch.equal(layer.conv[2], conv)
        assert torch.equal(layer.matrix[2], matrix)
        assert torch.equal(layer.matrix[[0, 3]], other)
    copier.close()
