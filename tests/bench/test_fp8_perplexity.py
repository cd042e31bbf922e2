"""The perplexity that fp8 costs on real text, with the card's rounding emulated on a CPU."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mainstem.kernels.dense.fp8 import Fp8Linear
from mainstem.models.cpu.decoder import Decoder, load_decoder
from mainstem.models.cpu.layers import DenseLinear, Linear, Mlp, Norm, RmsNorm, norm_scale
from mainstem.models.families import read_spec
from mainstem.models.weights import Checkpoint
from mainstem_bench.perplexity import perplexity

TEXT = Path(__file__).parents[1] / "data" / "wikitext2_head.txt"
QUANTIZED = ("qkv", "out", "gate_up", "down")  # the same as on a card


def emulated(decoder: Decoder, folder: Path, names: Collection[str] = QUANTIZED) -> Decoder:
    """A copy with these products in fp8. The fp32 decoder has the gains of norms folded into its
    weights; a card rounds the weights without gains."""
    checkpoint = Checkpoint(folder, torch.float32)

    def rounded(name: str, linear: Linear) -> Linear:
        return _in_fp8(linear) if name in names else linear

    def scale_of(layer: int, norm: str) -> torch.Tensor:
        name = f"model.layers.{layer}.{norm}.weight"
        return norm_scale(checkpoint.take(name, (decoder.spec.hidden_size,)))

    layers = []
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer.mlp, Mlp)
        first, second = (
            scale_of(index, "input_layernorm"),
            scale_of(index, "post_attention_layernorm"),
        )
        assert layer.qkv is not None
        assert layer.out is not None
        layers.append(
            replace(
                layer,
                attention_norm=_scaled(layer.attention_norm, first),
                qkv=rounded("qkv", _unfolded(layer.qkv, first)),
                out=rounded("out", layer.out),
                mlp_norm=_scaled(layer.mlp_norm, second),
                mlp=replace(
                    layer.mlp,
                    first=rounded("gate_up", _unfolded(layer.mlp.first, second)),
                    down=rounded("down", layer.mlp.down),
                ),
            )
        )
    head = rounded("head", decoder.head)
    return Decoder(decoder.spec, decoder.embedding, layers, decoder.norm, head)


def _scaled(norm: Norm, scale: torch.Tensor) -> RmsNorm:
    assert isinstance(norm, RmsNorm)
    return norm.scaled(scale)


def _unfolded(linear: Linear, scale: torch.Tensor) -> DenseLinear:
    dense = _dense(linear)
    return DenseLinear(dense.weight / scale, dense.bias)


def _dense(linear: Linear) -> DenseLinear:
    assert isinstance(linear, DenseLinear)
    return linear


def _in_fp8(linear: Linear) -> Linear:
    dense = _dense(linear)
    fp8: Linear = Fp8Linear.quantize(dense.weight, dense.bias, out_dtype=torch.float32)
    return fp8


def cost(folder: Path, text: str, num_tokens: int, names: Collection[str]) -> tuple[float, float]:
    """Perplexity without and with fp8."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(text).ids[:num_tokens], np.int32)
    dense = load_decoder(folder, read_spec(folder), torch.float32)
    window = min(1024, num_tokens)
    before = perplexity(dense, ids, window, window)
    return before, perplexity(emulated(dense, folder, names), ids, window, window)


@pytest.mark.slow
def test_fp8_costs_a_few_percent_on_real_text(smollm2_folder: Path) -> None:
    """512 tokens of WikiText-2; docs/log/gpu.md has the result for 4,096."""
    before, after = cost(smollm2_folder, TEXT.read_text(), 512, QUANTIZED)
    assert 5 < before < 40
    assert before != after
    assert after < 1.05 * before
