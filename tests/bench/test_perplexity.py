"""Perplexity, and how much int8 raises it on real text."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mainstem.models.cpu.decoder import load_decoder, pack
from mainstem.models.cpu.quantize import quantize_decoder
from mainstem.models.families import read_spec
from mainstem_bench.perplexity import perplexity
from tests.models.checkpoints import VOCAB, make_checkpoint

TEXT = Path(__file__).parents[1] / "data" / "wikitext2_head.txt"


@pytest.mark.parametrize(
    ("stride", "windows"),
    [
        (10, ((0, 20, 1), (10, 30, 20), (20, 40, 30), (30, 50, 40))),
        # the first token of each window is not scored
        (20, ((0, 20, 1), (20, 40, 21), (40, 50, 41))),
    ],
    ids=["overlapping", "side by side"],
)
def test_windows_score_each_token_at_most_once(
    stride: int, windows: tuple[tuple[int, int, int], ...], tmp_path: Path
) -> None:
    model = make_checkpoint("llama", tmp_path)
    decoder = load_decoder(tmp_path, read_spec(tmp_path), torch.float32)
    ids = np.random.default_rng(0).integers(3, VOCAB, 50).astype(np.int32)
    total, count = 0.0, 0
    for first, last, scored in windows:
        window = torch.from_numpy(ids[first:last].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(window[None]).logits[0], dim=-1)
        places = torch.arange(scored - first, last - first)
        total -= float(logprobs[places - 1, window[places]].sum())
        count += len(places)
    expected = math.exp(total / count)
    assert perplexity(decoder, ids, window=20, stride=stride) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("num_tokens", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_int8_costs_at_most_two_percent_on_real_text(smollm2_folder: Path, num_tokens: int) -> None:
    """The beginning of WikiText-2; the cost over 6,144 tokens is 1.2 % (docs/log/cpu.md)."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT.read_text()).ids[:num_tokens], np.int32)
    dense = load_decoder(smollm2_folder, read_spec(smollm2_folder), torch.float32)
    pack(dense, 1 << 40)
    before = perplexity(dense, ids, 256, 256)
    after = perplexity(quantize_decoder(dense), ids, 256, 256)
    assert 5 < before < 40
    assert after < 1.02 * before
