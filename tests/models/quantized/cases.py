"""Every format that is read, except MXFP4, with its quantization_config."""

from functools import partial
from typing import Any

from tests.models.quantized.oracles import Case, awq, compressed, fp8, gptq, int_bytes


def gptq_config(**changes: object) -> dict[str, Any]:
    usual = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
    return {**usual, **changes}


def compressed_config(
    weights: dict[str, object], file_format: str = "pack-quantized", **group: object
) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def ints(**changes: object) -> dict[str, object]:
    usual = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    return {**usual, **changes}


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

CASES = (
    Case("gptq", gptq_config(), gptq),
    Case("gptq symmetric", gptq_config(sym=True), partial(gptq, is_symmetric=True)),
    Case("gptq whole rows", gptq_config(group_size=-1), lambda r, o, w: gptq(r, o, w, group=w)),
    Case("gptq v2", gptq_config(checkpoint_format="gptq_v2"), partial(gptq, version=2)),
    Case("gptq 8 bits", gptq_config(bits=8), partial(gptq, bits=8)),
    Case("gptq act-order", gptq_config(desc_act=True), partial(gptq, has_order=True)),
    Case(
        "gptq 8 bits act-order",
        gptq_config(bits=8, desc_act=True),
        partial(gptq, bits=8, has_order=True),
    ),
    Case("awq", AWQ, awq),
    Case("compressed 4 bits", compressed_config(ints()), compressed),
    Case(
        "compressed 4 bits zero points",
        compressed_config(ints(symmetric=False)),
        partial(compressed, has_zeros=True),
    ),
    Case(
        "compressed 4 bits act-order",
        compressed_config(ints(symmetric=False, actorder="group")),
        partial(compressed, has_zeros=True, has_order=True),
    ),
    Case(
        "compressed 4 bits per channel",
        compressed_config(ints(strategy="channel", group_size=None)),
        partial(compressed, group=None),
    ),
    Case(
        "compressed 8 bits zero points",
        compressed_config(ints(num_bits=8, symmetric=False)),
        partial(compressed, bits=8, has_zeros=True),
    ),
    Case(
        "compressed int8 bytes",
        compressed_config(
            ints(num_bits=8, strategy="channel", group_size=None),
            "int-quantized",
            input_activations=DYNAMIC,
        ),
        int_bytes,
    ),
    Case(
        "compressed 4 bits in bytes",
        compressed_config(ints(symmetric=False), "int-quantized", input_activations=DYNAMIC),
        partial(int_bytes, bits=4, group=16, has_zeros=True),
    ),
    Case("compressed fp8 per channel", compressed_config(FLOAT8, "float-quantized"), fp8),
    Case(
        "compressed fp8 per tensor",
        compressed_config({**FLOAT8, "strategy": "tensor"}, "float-quantized"),
        partial(fp8, scale_shape=(1,)),
    ),
    Case(
        "compressed fp8 blocks",
        compressed_config(
            {**FLOAT8, "strategy": "block", "block_structure": [16, 16]}, "float-quantized"
        ),
        partial(fp8, block=(16, 16)),
    ),
    Case(
        "fp8 blocks",
        {**FP8, "weight_block_size": [128, 128]},
        partial(fp8, block=(128, 128), scale_name="weight_scale_inv"),
    ),
    Case(
        "fp8 small blocks",
        {**FP8, "weight_block_size": [32, 16]},
        partial(fp8, block=(32, 16), scale_name="weight_scale_inv"),
    ),
    Case("fp8 per tensor", FP8, partial(fp8, scale_shape=())),
)
