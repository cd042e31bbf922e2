"""Random weights in the formats of quantized checkpoints."""

import argparse
from dataclasses import replace

from mainstem.models.quantized.packing import (
    Layout,
    PackedKind,
    Packing,
    QuantizedSpec,
    Rule,
    rules_for,
)
from mainstem.models.spec import ModelSpec
from mainstem_bench.shapes import SHAPES

_PLAIN = rules_for(("lm_head", "mlp.gate", "mlp.router", "block_sparse_moe.gate"))
PACKED = {
    "gptq": QuantizedSpec(Layout.GPTQ, Packing(PackedKind.INT4, 128), _PLAIN),
    "awq": QuantizedSpec(Layout.AWQ, Packing(PackedKind.INT4, 128, has_zeros=True), _PLAIN),
    "fp8": QuantizedSpec(Layout.COMPRESSED, Packing(PackedKind.FP8, None), _PLAIN),
    "fp8-blocks": QuantizedSpec(Layout.FP8, Packing(PackedKind.FP8, 128, 128), _PLAIN),
    "mxfp4": QuantizedSpec(  # only experts are packed, as in gpt-oss
        Layout.MXFP4, None, (Rule(r".*\bexperts\b.*", Packing(PackedKind.MXFP4, 32)),)
    ),
}


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", choices=list(PACKED), help="pack the weights in this format (none: 16 bits)"
    )


def shape_with(name: str, weights: str | None) -> ModelSpec:
    """Return the shape of this name with weights in this format, or in 16 bits."""
    return SHAPES[name] if weights is None else replace(SHAPES[name], quantized=PACKED[weights])
