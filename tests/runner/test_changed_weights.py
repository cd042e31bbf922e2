"""Weights that change in place: pages of the old weights are not read again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.config import CacheConfig, EngineConfig, Fetch, ModelConfig, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.request import Request, SamplingParams
from mainstem.engine.build import build_engine
from tests.models.checkpoints import VOCAB, change_in_place, make_checkpoint

PROMPT = np.random.default_rng(0).integers(3, VOCAB, 70).astype(np.int32)
MIDDLE = "model.layers.2.mlp.down_proj.weight"
Answer = list[tuple[int, float]]


def ask(folder: Path, disk: Path | None) -> tuple[Answer, Counters]:
    """Tokens and their log-probabilities, from an engine that lives for this call only."""
    bus = EventBus()
    counters = Counters().attach(bus)
    store = StoreConfig(host_gb=0.01, fetch=Fetch.ALWAYS)
    if disk is not None:
        store = replace(store, disk_dir=str(disk), disk_gb=0.1)
    config = EngineConfig(
        model=ModelConfig(model=str(folder)),
        cache=CacheConfig(kv_tokens=512),
        store=store,
    )
    engine = build_engine(folder, config, bus)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
    engine.submit(Request(RequestId("0"), PROMPT, sampling))
    answer: Answer = []
    while engine.has_work:
        for output in engine.step():
            answer += [(entry.token_id, entry.logprob) for entry in output.logprobs]
    engine.close()
    return answer, counters


def test_weights_changed_in_place_reuse_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    model, disk = tmp_path / "model", tmp_path / "disk"
    make_checkpoint("llama", model, num_hidden_layers=6, intermediate_size=512)
    before, _ = ask(model, disk)
    again, counters = ask(model, disk)
    assert [token for token, _ in again] == [token for token, _ in before]
    assert counters.cached_tokens == 64, "the same weights reuse their pages"
    change_in_place(model, MIDDLE)
    after, counters = ask(model, disk)
    fresh, _ = ask(model, None)
    assert after == fresh
    assert after != before, "the change must be large enough to change answers"
    assert counters.cached_tokens == 0
    assert counters.loaded_pages["disk"] == 0
