"""Loading takes little more memory than the packed weights."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from mainstem.models.families import read_spec
from mainstem.models.packed import PackedWeight
from mainstem.models.tensors import MlpTensors, TensorReader
from mainstem.models.weights import Checkpoint
from tests.models.checkpoints import SMALL
from tests.models.live_bytes import LiveBytes
from tests.models.quantized.checkpoints import write_quantized
from tests.models.quantized.test_engine import BY_NAME

pytestmark = pytest.mark.torch
LAYERS = 32  # reading one layer takes little memory compared with all of them


@pytest.mark.parametrize("name", ["gptq act-order", "awq", "compressed 4 bits zero points"])
def test_loading_takes_little_more_memory_than_the_packed_weights(
    name: str, tmp_path: Path
) -> None:
    config = LlamaConfig(**SMALL | {"num_hidden_layers": 1, "vocab_size": 16})
    write_quantized(config, tmp_path, BY_NAME[name])
    spec = read_spec(tmp_path)
    held = []
    with LiveBytes() as live:
        for _ in range(LAYERS):  # every layer is the same, from the same file
            source = Checkpoint(tmp_path, torch.float32, names=spec.names, quantized=spec.quantized)
            layer = TensorReader(source, spec).layer(0)
            assert isinstance(layer.mlp, MlpTensors)
            assert layer.qkv is not None
            assert layer.out is not None
            held += [layer.qkv, layer.out, layer.mlp.first, layer.mlp.down]
    assert all(isinstance(product.weight, PackedWeight) for product in held)
    packed = sum(product.weight.nbytes for product in held)
    assert live.now <= packed, "nothing but the weights stays in memory"
    assert live.most <= 1.1 * packed
    dense = sum(product.weight.shape.numel() for product in held) * 4
    assert packed < 0.3 * dense
