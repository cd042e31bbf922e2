"""Quantizing a model: what is written is what was rounded; calibration and training improve it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

from mainstem.checkpoints.progress import unseen
from mainstem.core.errors import ConfigError, UnsupportedModel
from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.families import read_spec
from mainstem.models.packed import PackedWeight
from mainstem.models.weights import Checkpoint
from mainstem_bench.llama import Llama
from mainstem_bench.perplexity import perplexity
from mainstem_bench.quantized import by_name, main, round_products, sequences_of, write_checkpoint
from mainstem_bench.rounding import Grid, Rounded, for_inputs, nearest
from mainstem_bench.scales import train_scales
from tests.models.checkpoints import VOCAB, make_checkpoint

pytestmark = pytest.mark.torch
TEXT = Path(__file__).parents[1] / "data" / "wikitext2_head.txt"
CPU = torch.device("cpu")
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


def random_sequences(count: int, length: int = 32) -> torch.Tensor:
    ids = np.random.default_rng(0).integers(3, VOCAB, count * length).astype(np.int32)
    return sequences_of(ids, length)


@pytest.mark.parametrize("grid", GRIDS, ids=["zeros", "symmetric"])
@pytest.mark.parametrize("num_inputs", [0, 2])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_written_is_what_was_rounded(
    grid: Grid, num_inputs: int, steps: int, tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path)
    model, sequences = Llama(tmp_path, 32, CPU), random_sequences(2)
    layers = round_products(model, sequences[:num_inputs], grid)
    if steps:
        layers, _ = train_scales(model, layers, sequences, steps, unseen)
    products = by_name(model, layers)
    assert len(products) == 3 * 7
    out = tmp_path / "quantized"
    write_checkpoint(tmp_path, out, products, grid)
    spec = read_spec(out)
    source = Checkpoint(out, torch.float32, names=spec.names, quantized=spec.quantized)
    for name, rounded in products.items():
        packed = source.take_packed(name, rounded.weight.shape)
        assert isinstance(packed, PackedWeight)
        assert torch.equal(packed.dense(torch.float32), rounded.weight)


@pytest.mark.parametrize("name", ["llama", "smollm2 (tied)", "llama mha", "llama3 rope"])
@torch.no_grad()
def test_logits_are_those_of_transformers_and_of_the_decoder(name: str, tmp_path: Path) -> None:
    reference = make_checkpoint(name, tmp_path)
    ids = random_sequences(3)
    model = Llama(tmp_path, ids.shape[1], CPU)
    x = model.embed(ids)
    for index in range(model.spec.num_layers):
        layer = model.layer(index)
        x = model.run(layer, layer.weights, x)
    logits = model.logits(model.ends(), x).view(*ids.shape, -1)
    torch.testing.assert_close(logits, reference(ids).logits, atol=1e-4, rtol=1e-4)
    decoder = load_decoder(tmp_path, model.spec, torch.float32)
    found = perplexity(decoder, ids.flatten().numpy().astype(np.int32), 32, 32)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss.exp()) == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("grid", GRIDS, ids=["zeros", "symmetric"])
def test_training_changes_only_scales_and_brings_predictions_nearer(
    grid: Grid, tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path)
    model, sequences = Llama(tmp_path, 32, CPU), random_sequences(2)
    layers = round_products(model, sequences[:0], grid)
    trained, divergences = train_scales(model, layers, sequences, 60, unseen)
    assert len(divergences) == 60
    # every step has the same two sequences
    assert sum(divergences[-5:]) < 0.9 * sum(divergences[:5])
    _, again = train_scales(model, trained, sequences, 1, unseen)
    assert again[0] == pytest.approx(divergences[-1], rel=0.02)  # rounding to fp16 costs little
    for before, after in zip(layers, trained, strict=True):
        for kind, old in before.items():
            new = after[kind]
            assert torch.equal(new.levels, old.levels)
            assert torch.equal(new.zeros, old.zeros)
            assert not torch.equal(new.scales, old.scales)
            assert torch.equal(new.scales, new.scales.half().float())


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(UnsupportedModel, match="Qwen3ForCausalLM: only plain models in Llama's"):
        Llama(tmp_path, 32, CPU)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Scores two texts of 40 and 2,000 tokens. Calibration tokens come from the second text."""
    make_checkpoint("llama", tmp_path)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [tmp_path / "scored.txt", tmp_path / "inputs.txt"]
    for text, count in zip(texts, (40, 2000), strict=True):
        text.write_text(" ".join(f"w{index * count % VOCAB}" for index in range(count)))
    scored = [str(text) for text in texts]
    sizes = ["--score-tokens", "40", "--inputs", "512", "--group", "16"]
    return ["--model", str(tmp_path), "--text", *scored, "--inputs-text", scored[1], *sizes]


def test_several_texts_are_scored_and_inputs_may_come_from_another_text(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == ["scored.txt", "inputs.txt"]
    assert [line["scored_tokens"] for line in lines] == [40, 40]
    assert lines[0]["perplexity"] != lines[1]["perplexity"]
    assert (lines[0]["train"], lines[0]["train_divergences"]) == (0, [])
    with pytest.raises(ConfigError, match="has 2,000 tokens; 2,001 are asked for"):
        main([*command, "--inputs", "2001"])


@pytest.mark.parametrize("inputs", ["0", "512"])
def test_scales_are_trained_in_several_passes_if_the_text_is_short(
    command: list[str], inputs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for train in ("0", "4100"):  # the text has 3 sequences
        assert main([*command, "--inputs", inputs, "--train", train, "--json"]) == 0
        found[train] = json.loads(capsys.readouterr().out.splitlines()[1])
    before, after = found.values()
    assert after["train"] == 4096  # whole steps of 1,024
    assert len(after["train_divergences"]) == 2
    assert after["perplexity"] == before["perplexity"]
    assert after["perplexity_quantized"] != before["perplexity_quantized"]
    assert after["bytes"] == before["bytes"]
    assert main([*command, "--inputs", inputs, "--train", "4100"]) == 0
    rows = [row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines()]
    shown = dict(row for row in rows if len(row) == 2)  # of the second text, like `after`
    assert shown["train"] == "4096"
    assert shown["perplexity"] == f"{round(after['perplexity'], 4)}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train", "1023"], "--train 1023: must be 0, or at least 1,024 tokens"),
        (["--inputs", "511"], "--inputs 511: must be 0, or at least 512 tokens"),
    ],
)
def test_fewer_tokens_than_a_sequence_are_refused(
    command: list[str], flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        main([*command, *flags])


@pytest.mark.parametrize("flags", [["--train", "-1"], ["--inputs", "-1"], ["--device", "tpu"]])
def test_other_values_are_refused(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, *flags])
    assert f"argument {flags[0]}: must" in capsys.readouterr().err


def test_a_missing_gpu_is_refused_before_any_work(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda: torch finds no GPU"):
        main([*command, "--device", "cuda"])


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
