"""Reads the `quantization_config` of compressed-tensors: groups of modules, each with a scheme."""

import re

from mainstem.models.config_file import Config
from mainstem.models.quantized.packing import (
    KV_SCALES,
    Layout,
    PackedKind,
    Packing,
    QuantizedSpec,
    Rule,
    refuse,
)

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
)


def read_compressed(table: Config) -> QuantizedSpec:
    file_format = table.text("format", "mixed-precision")
    if file_format != "mixed-precision":
        _check_format(file_format)
    sparsity = table.table("sparsity_config")
    sparsity.only("format", "dense")
    if transforms := table.table("transform_config").get("config_groups"):
        refuse("transform_config", transforms, "none")
    kv_scheme = table.table("kv_cache_scheme")
    ignored = [str(name) for name in table.items("ignore") or []]
    by_class: Packing | None = None
    exact, patterns = [], []
    groups = table.table("config_groups")
    has_order = False
    for name in groups.names():
        group = groups.table(name)
        if group.has("format"):
            _check_format(group.text("format"))
        packing = _packing(group)
        has_order |= group.table("weights").get("actorder") in ("group", "dynamic", True)
        for target in map(str, group.items("targets") or []):
            if target == "Linear":
                by_class = packing
            elif target.startswith("re:"):
                patterns.append(Rule(target.removeprefix("re:"), packing))
            else:
                exact.append(Rule(re.escape(target) + "$", packing))
    return QuantizedSpec(
        layout=Layout.COMPRESSED,
        packing=by_class,
        rules=(*map(_ignore, ignored), *exact, *patterns),
        has_order=has_order,
        ignored_endings=KV_SCALES,
        has_fp8_kv=_is_fp8_by_layer(kv_scheme),
    )


def _is_fp8_by_layer(kv_scheme: Config) -> bool:
    """Whether K and V are in fp8 with a scale for each layer. With other schemes they are kept in
    the compute dtype."""
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    return all(kv_scheme.get(name) == value for name, value in wanted.items())


def _ignore(name: str) -> Rule:
    if name.startswith("re:"):
        return Rule(name.removeprefix("re:"), None)
    return Rule(re.escape(name) + "$", None)


def _check_format(name: str) -> None:
    if name not in _FORMATS:
        refuse("format", name, ", ".join(_FORMATS))


def _packing(group: Config) -> Packing:
    weights, inputs = group.table("weights"), group.table("input_activations")
    group.only("output_activations")
    bits, kind_name = weights.whole("num_bits", 8), weights.text("type", "int").lower()
    if kind_name == "int" and inputs.get("num_bits") and inputs.get("dynamic") is not True:
        refuse(
            "input_activations",
            "int8 with static scales",
            "none, dynamic int8 or fp8 (activations are then kept in the compute dtype)",
        )
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    is_symmetric = weights.flag("symmetric", True)
    kinds = {
        ("int", 4): PackedKind.INT4,
        ("int", 8): PackedKind.INT8,
        ("float", 8): PackedKind.FP8,
        ("float", 4): PackedKind.MXFP4,
    }
    kind = kinds.get((kind_name, bits))
    if kind is None:
        refuse("num_bits", f"{bits} ({kind_name})", "4 and 8 (int), 8 (float), 4 (float, MXFP4)")
    if kind is PackedKind.MXFP4 and (strategy, size) != ("group", 32):
        refuse("weights", f"4-bit floats by {strategy} of {size}", "MXFP4, by group of 32")
    if strategy == "block":
        rows, columns = weights.sizes("block_structure", 2)
        if kind is not PackedKind.FP8:
            refuse("strategy", "block of integers", "group, channel or tensor")
        return Packing(kind, columns, rows)
    if strategy == "tensor" and not is_symmetric:
        refuse("strategy", "tensor with zero points", "group or channel")
    if strategy == "group":
        return Packing(kind, weights.whole("group_size"), has_zeros=not is_symmetric)
    if strategy not in ("channel", "tensor"):
        refuse("strategy", strategy, "group, channel, tensor or block")
    rows_sharing = 1 if strategy == "channel" else None
    return Packing(kind, None, rows_sharing, has_zeros=not is_symmetric)
