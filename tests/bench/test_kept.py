"""A model that is loaded once for many engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig, Share
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.engine.build import load_folder
from mainstem_bench import kept
from mainstem_bench.kept import KeptModel
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.torch

CONFIG = EngineConfig(
    ModelConfig(threads=1), CacheConfig(kv_tokens=512), SchedConfig(max_model_len=128)
)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configs that the model was loaded with."""
    found: list[EngineConfig] = []

    def noted(folder: Path, config: EngineConfig) -> Any:
        found.append(config)
        return load_folder(folder, config)

    monkeypatch.setattr(kept, "load_folder", noted)
    return found


def answer(model: KeptModel, config: EngineConfig) -> tuple[list[int], int]:
    """Answer one prompt with a new engine; returns the tokens and how many were cached."""
    engine = model.build(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.submit(Request(RequestId("one"), np.arange(3, 50, dtype=np.int32), sampling))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check()
    engine.close()
    return [token for out in outputs for token in out.token_ids], outputs[-1].num_cached_tokens


def test_engines_that_share_differently_use_one_loaded_model(
    tmp_path: Path, loads: list[EngineConfig]
) -> None:
    make_checkpoint("llama", tmp_path)
    model = KeptModel(tmp_path)
    first = answer(model, CONFIG)
    assert answer(model, CONFIG.sharing(Share.NONE)) == first
    assert answer(model, CONFIG) == first, "the second engine found pages of the first"
    assert first[1] == 0
    assert len(loads) == 1
    model.close()


def test_another_window_or_memory_loads_the_model_again(
    tmp_path: Path, loads: list[EngineConfig]
) -> None:
    make_checkpoint("llama", tmp_path)
    model = KeptModel(tmp_path)
    longer = replace(CONFIG, sched=replace(CONFIG.sched, max_model_len=256))
    larger = replace(CONFIG, cache=CacheConfig(kv_tokens=1024))
    for config in (CONFIG, longer, larger, larger):
        answer(model, config)
    assert loads == [CONFIG, longer, larger]
    model.close()
