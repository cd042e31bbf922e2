"""Quantizing a model: the checkpoint has the rounded weights, and calibration makes them better."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from mainstem.core.errors import ConfigError, UnsupportedModel
from mainstem.models.families import read_spec
from mainstem.models.packed import PackedWeight
from mainstem.models.weights import Checkpoint
from mainstem_bench.quantized import main, round_products, write_checkpoint
from mainstem_bench.rounding import Grid, Rounded, for_inputs, nearest
from tests.models.checkpoints import VOCAB, make_checkpoint

pytestmark = pytest.mark.torch
TEXT = Path(__file__).parents[1] / "data" / "wikitext2_head.txt"
GRIDS = [Grid(16, is_symmetric=False), Grid(16, is_symmetric=True)]


def error(weight: torch.Tensor, rounded: Rounded, x: torch.Tensor) -> float:
    """Relative error of the outputs."""
    answers = x @ weight.t()
    return float((x @ rounded.weight.t() - answers).norm() / answers.norm())


@pytest.mark.parametrize("grid", GRIDS, ids=["zeros", "symmetric"])
def test_rounding_for_inputs_gives_outputs_nearer_to_the_exact_ones(grid: Grid) -> None:
    torch.manual_seed(0)
    weight, mixing = torch.randn(40, 64), torch.randn(64, 64)
    x = torch.randn(500, 64) @ mixing  # columns of inputs are correlated
    near, fitted = nearest(weight, grid), for_inputs(weight, x.t() @ x / len(x), grid)
    for rounded in (near, fitted):
        assert rounded.levels.min() >= 0
        assert rounded.levels.max() <= 15
        assert torch.equal(rounded.levels, rounded.levels.round())
        assert torch.equal(rounded.scales, rounded.scales.half().float())
    assert float((near.weight - weight).abs().max()) < 0.5
    assert error(weight, fitted, x) < 0.7 * error(weight, near, x)


@pytest.mark.parametrize("grid", GRIDS, ids=["zeros", "symmetric"])
@pytest.mark.parametrize("num_inputs", [0, 64])
def test_what_is_written_is_what_was_rounded(grid: Grid, num_inputs: int, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    ids = np.random.default_rng(0).integers(3, VOCAB, 64).astype(np.int32)
    products = round_products(tmp_path, ids, num_inputs, grid, length=32)
    assert len(products) == 3 * 7
    out = tmp_path / "quantized"
    write_checkpoint(tmp_path, out, products, grid)
    spec = read_spec(out)
    source = Checkpoint(out, torch.float32, names=spec.names, quantized=spec.quantized)
    for name, rounded in products.items():
        packed = source.take_packed(name, rounded.weight.shape)
        assert isinstance(packed, PackedWeight)
        assert torch.equal(packed.dense(torch.float32), rounded.weight)


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(UnsupportedModel, match="Qwen3ForCausalLM: only plain models in Llama's"):
        round_products(tmp_path, np.zeros(8, np.int32), 0, GRIDS[0])


def test_several_texts_are_scored_and_inputs_may_come_from_another_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("llama", tmp_path)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [tmp_path / "scored.txt", tmp_path / "inputs.txt"]
    for text, count in zip(texts, (40, 600), strict=True):
        text.write_text(" ".join(f"w{index * count % VOCAB}" for index in range(count)))
    scored = [str(text) for text in texts]
    command = ["--model", str(tmp_path), "--text", *scored, "--inputs-text", str(texts[1])]
    sizes = ["--score-tokens", "40", "--inputs", "512", "--group", "16", "--json"]
    assert main([*command, *sizes]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == ["scored.txt", "inputs.txt"]
    assert [line["scored_tokens"] for line in lines] == [40, 40]
    assert lines[0]["perplexity"] != lines[1]["perplexity"]
    with pytest.raises(ConfigError, match="has 600 tokens; 601 are asked for"):
        main([*command, *sizes[:3], "601"])


@pytest.mark.slow
def test_4_bits_cost_little_on_real_text(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If calibration uses other text, 4 bits cost 2 to 4 % (docs/log/cpu.md)."""
    text = ["--text", str(TEXT), "--score-tokens", "2048", "--inputs", "4096"]
    assert main(["--model", str(smollm2_folder), *text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 5 < found["perplexity"] < 40
    assert 0.0 < found["change"] < 0.03
    assert found["bytes"] < 180_000_000
