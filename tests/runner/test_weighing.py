"""Attention to pages, summed over a real (tiny) model, equals that of transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mainstem.core.config import CacheConfig, EngineConfig
from mainstem.core.step import PageWeighing
from mainstem.models.collectives import Alone
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from tests.models.checkpoints import VOCAB, make_checkpoint
from tests.runner.steps import Seq, Work, a_step, run

pytestmark = pytest.mark.torch

PAGE, NUM_TOKENS, NUM_QUERIES = 4, 42, 7


@pytest.mark.parametrize("name", ["llama", "qwen3", "yarn rope"])
def test_masses_are_the_attention_that_transformers_reports(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, NUM_TOKENS)]
    with torch.no_grad():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    by_key = sum(layer[0, :, -NUM_QUERIES:].sum((0, 1)) for layer in layers)
    wanted = [float(part.sum()) for part in torch.split(by_key, PAGE)]

    cache = CacheConfig(page_size=PAGE, kv_tokens=64 * PAGE)
    runner, _ = load_cpu_runner(folder_origin(tmp_path), EngineConfig(cache=cache))
    other = Seq(slot=1, token_ids=ids[::-1], pages=list(range(20, 31)))
    seq = Seq(slot=0, token_ids=ids, pages=[9, 3, 4, 5, 0, 1, 2, 12, 11, 10, 8])
    first = [Work(seq, NUM_TOKENS - NUM_QUERIES - 2, has_sample=False)]
    run(runner, a_step(first, PAGE, VOCAB), first)
    # the queries are a part of the chunk, after the chunk of another sequence
    works = [Work(other, 5), Work(seq, NUM_QUERIES + 2)]
    step = a_step(works, PAGE, VOCAB)
    weighing = PageWeighing(5 + 2, NUM_QUERIES, np.array(seq.pages, np.int32))
    plain = runner.launch(step).wait()
    result = runner.launch(replace(step, weighings=(weighing, weighing))).wait()
    assert plain.page_masses == ()
    assert result.token_ids.tolist() == plain.token_ids.tolist()
    assert np.allclose(result.page_masses, [wanted, wanted], rtol=1e-4)


def test_masses_are_summed_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has some of the heads only."""
    make_checkpoint("llama", tmp_path)
    cache = CacheConfig(page_size=PAGE, kv_tokens=64 * PAGE)
    runner, _ = load_cpu_runner(folder_origin(tmp_path), EngineConfig(cache=cache))
    seq = Seq(slot=0, token_ids=list(range(3, 13)), pages=[2, 0, 1])
    step = a_step([Work(seq, 10)], PAGE, VOCAB)
    step = replace(step, weighings=(PageWeighing(7, 3, np.array(seq.pages, np.int32)),))
    (alone,) = runner.launch(step).wait().page_masses

    class Two(Alone):
        def sum_(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    monkeypatch.setattr(runner._decoder, "ranks", Two())
    (both,) = runner.launch(step).wait().page_masses
    assert np.allclose(both, 2 * alone)
