"""The forward pass alone: running rows in pieces does not change the result."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import StableLmConfig

from mainstem.models.block import OpenGate
from mainstem.models.cpu import decoder as module
from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.cpu.layers import DenseLinear, Mlp
from mainstem.models.families import read_spec
from mainstem.models.spec import ModelSpec
from tests.models.checkpoints import SMALL, make_checkpoint, write_checkpoint


class RunningMean:
    """Stands in for attention: every token sees about the mean of all tokens up to it."""

    def __init__(self, spec: ModelSpec) -> None:
        self._width = spec.num_heads * spec.head_dim

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        counts = torch.arange(1, len(qkv) + 1)[:, None]
        return qkv[:, : self._width].cumsum(0) / (counts + layer)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("wanted", [None, [2, 3, 11]])
def test_pieces_of_a_step_change_nothing(
    name: str, wanted: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(name, tmp_path)
    spec = read_spec(tmp_path)
    decoder = load_decoder(tmp_path, spec, torch.float32)
    ids = torch.arange(12) % spec.vocab_size
    rows = None if wanted is None else torch.tensor(wanted)
    whole = decoder.forward(ids, rows, RunningMean(spec), OpenGate())
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 5)
    pieces = decoder.forward(ids, rows, RunningMean(spec), OpenGate())
    assert pieces.shape == (12 if wanted is None else 3, spec.hidden_size)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


def test_parallel_outputs_are_scaled(tmp_path: Path) -> None:
    """Outputs that are scaled are those of scaled weights."""
    config = StableLmConfig(**SMALL | {"hidden_size": 96}, use_parallel_residual=True)
    write_checkpoint(config, tmp_path, seed=0)
    spec = read_spec(tmp_path)
    ids = torch.arange(12) % spec.vocab_size
    scaled = load_decoder(tmp_path, replace(spec, residual_scale=0.25), torch.float32)
    plain = load_decoder(tmp_path, spec, torch.float32)
    for layer in plain.layers:
        assert isinstance(layer.out, DenseLinear)
        assert isinstance(layer.mlp, Mlp)
        assert isinstance(layer.mlp.down, DenseLinear)
        layer.out.weight.mul_(0.25)
        layer.mlp.down.weight.mul_(0.25)
    want = plain.forward(ids, None, RunningMean(spec), OpenGate())
    got = scaled.forward(ids, None, RunningMean(spec), OpenGate())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
