"""compressed-tensors are read as the package that writes them does; skipped without the package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.quantized.cases import FLOAT8, compressed_config, ints
from tests.models.quantized.test_read import OUT, WIDTH, saved, taken
from tests.needs import reason

pytestmark = pytest.mark.torch
package: Any = pytest.importorskip("compressed_tensors", reason=reason("compressed_tensors"))

FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
CASES = {
    "groups": (ints(), "pack-quantized"),
    "groups, zero points": (ints(symmetric=False), "pack-quantized"),
    "channels": (ints(strategy="channel", group_size=None), "pack-quantized"),
    "channels, zero points": (
        ints(strategy="channel", group_size=None, symmetric=False),
        "pack-quantized",
    ),
    "8 bits, zero points": (ints(num_bits=8, symmetric=False), "pack-quantized"),
    "int8": (ints(num_bits=8, strategy="channel", group_size=None), "int-quantized"),
    "4 bits in bytes": (ints(), "int-quantized"),
    "4 bits in bytes, zero points": (ints(symmetric=False), "int-quantized"),
    "fp8, channels": (FLOAT8, "float-quantized"),
    "fp8, one scale": ({**FLOAT8, "strategy": "tensor"}, "float-quantized"),
    "fp8, blocks": (
        {**FLOAT8, "strategy": "block", "block_structure": [8, 16]},
        "float-quantized",
    ),
    "mxfp4": (FLOAT4, "mxfp4-pack-quantized"),
}


def scale_shape(weights: dict[str, object]) -> tuple[int, ...]:
    if weights["strategy"] == "group":
        size = weights["group_size"]
        assert isinstance(size, int)
        return OUT, WIDTH // size
    return {"channel": (OUT, 1), "tensor": (1,), "block": (OUT // 8, WIDTH // 16)}[
        str(weights["strategy"])
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in CASES
        for dtype in (torch.float16, torch.bfloat16)
        if name != "mxfp4" or dtype == torch.bfloat16  # the package's MXFP4 scales are bf16
    ],
    ids=str,
)
def test_numbers_are_those_of_the_package(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights, file_format = CASES[name]
    config = compressed_config(weights, file_format)
    scheme = package.quantization.QuantizationScheme(
        targets=["Linear"], weights=weights, format=file_format
    )
    torch.manual_seed(0)
    shape = scale_shape(weights)
    state: dict[str, Tensor] = {"weight": torch.randn(OUT, WIDTH).to(dtype)}
    state["weight_scale"] = (torch.rand(shape) * 0.2 + 0.05).to(dtype)
    if weights["type"] == "float" and weights["num_bits"] == 8:
        state["weight_scale"] = (torch.rand(shape) * 0.01 + 0.001).to(dtype)
    if not weights["symmetric"]:
        state["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
    compressor = package.compressors.BaseCompressor.get_value_from_registry(file_format)
    stored = compressor.compress(state, scheme)
    right = compressor.decompress(stored, scheme)["weight"]
    found = taken(saved(tmp_path, config, stored, dtype)).dense(right.dtype)
    assert len(set(found.flatten().tolist())) > 8
    assert torch.equal(found, right)
