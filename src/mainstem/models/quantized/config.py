"""Makes a QuantizedSpec from the `quantization_config` of a config.json.

Unsupported settings are refused; the error names the setting and the supported values.
"""

from collections.abc import Callable, Iterable, Mapping

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config, words_of
from mainstem.models.quantized.compressed_config import read_compressed
from mainstem.models.quantized.packing import (
    KV_SCALES,
    SUPPORTED,
    Layout,
    PackedKind,
    Packing,
    QuantizedSpec,
    Rule,
    refuse,
    rules_for,
)

# settings of quantization tools and other programs, which are not needed to read the weights
_HARMLESS = words_of((
    "damp_percent damp_auto_increment static_groups true_sequential act_group_aware mse",
    "model_name_or_path model_file_base_name meta tokenizer dataset batch_size model_seqlen",
    "pad_token_id block_name_to_quantize modules_in_block_to_quantize cache_block_outputs",
    "module_name_preceding_first_block disable_exllama use_exllama exllama_config backend",
    "use_cuda_fp16 max_input_length device pack_impl parallel_packing offload_to_disk",
    "offload_to_disk_path autoround_version nsamples seqlen iters lr minmax_lr amp",
    "enable_minmax_tuning enable_quanted_input low_gpu_mem_usage to_quant_block_names",
    "do_fuse fuse_max_seq_len modules_to_fuse scale_fmt dequantize kv_cache_scheme",
    "quantization_status global_compression_ratio version scale_dtype gradient_accumulate_steps",
    "provider",
))  # fmt: skip
_KINDS = {4: PackedKind.INT4, 8: PackedKind.INT8}


def read_quantized(config: Config) -> QuantizedSpec | None:
    """The QuantizedSpec; None if the weights are plain."""
    if not config.get("quantization_config"):
        return None
    table = config.table("quantization_config")
    method = table.text("quant_method", "")
    if method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        bits = 4 if table.get("load_in_4bit") else table.get("bits")
        raise UnsupportedModel(
            f"quantization_config: the weights are quantized with quant_method={method or None!r}"
            f"{f', {bits} bits' if bits else ''}; known: {known}. {SUPPORTED}"
        )
    quantized = _METHODS[method](table)
    unread = (name for name, value in table.unread().items() if value not in (None, False, {}, []))
    if unknown := sorted(set(unread) - _HARMLESS):
        fields = ", ".join(f"{name}={table.get(name)!r}" for name in unknown)
        raise UnsupportedModel(
            f"quantization_config: {fields} is not known to {method} and may change the answers"
        )
    return quantized


def _read_gptq(table: Config) -> QuantizedSpec:
    version = table.text("checkpoint_format", table.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        refuse("checkpoint_format", version, "gptq or gptq_v2")
    if table.get("is_marlin_format"):
        refuse("is_marlin_format", True, "gptq or gptq_v2")
    _check_repeated(table, "gptq")
    for changing in ("adapter", "rotation"):
        table.only(changing)
    packing = _gptq_packing({name: table.get(name) for name in ("bits", "group_size", "sym")})
    changes = table.get("dynamic")
    rules = tuple(_dynamic_rules(changes, packing))
    if not table.flag("lm_head"):
        rules += rules_for(["lm_head"])
    return QuantizedSpec(
        layout=Layout.GPTQ,
        packing=packing,
        rules=rules,
        is_zero_less_one=version == "gptq",
        has_order=table.flag("desc_act") or _has_order(changes),
    )


def _check_repeated(table: Config, method: str) -> None:
    """Check the fields that GPTQModel and AutoRound write for every method."""
    table.only("data_type", "int")
    table.only("method", method)
    table.only("pack_dtype", "int32")


def _gptq_packing(fields: Mapping[str, object]) -> Packing:
    bits, is_symmetric = fields.get("bits"), fields.get("sym")
    return Packing(
        _kind("bits", bits, (4, 8)),
        _group("group_size", fields.get("group_size")),
        has_zeros=is_symmetric is False,
    )


def _has_order(found: object) -> bool:
    """Whether `dynamic` has modules in act-order."""
    each = found.values() if isinstance(found, dict) else ()
    return any(isinstance(changes, dict) and bool(changes.get("desc_act")) for changes in each)


def _dynamic_rules(found: object, packing: Packing) -> Iterable[Rule]:
    """Read GPTQModel's `dynamic`: patterns of modules, each with the settings that differ for these
    modules. "-:" means not quantized."""
    if found is None or found is False:
        return
    if not isinstance(found, dict):
        refuse("dynamic", found, "an object of patterns")
    usual: dict[str, object] = {
        "bits": 4 if packing.kind is PackedKind.INT4 else 8,
        "group_size": packing.group or -1,
        "sym": not packing.has_zeros,
    }
    for pattern, changes in found.items():
        if pattern.startswith("-:"):
            yield Rule(pattern.removeprefix("-:"), None)
            continue
        known = {*usual, "desc_act", "mse", "damp_percent", "static_groups"}
        if not isinstance(changes, dict) or not changes.keys() <= known:
            refuse(f"dynamic {pattern}", changes, f"an object of {', '.join(sorted(known))}")
        yield Rule(pattern.removeprefix("+:"), _gptq_packing({**usual, **changes}))


def _read_awq(table: Config) -> QuantizedSpec:
    for field in ("version", "format", "checkpoint_format"):
        if (version := table.text(field, "gemm").lower()) != "gemm":
            refuse(field, version, "gemm")
    _check_repeated(table, "awq")
    table.only("zero_point", True)
    bits = table.get("w_bit") if table.get("bits") is None else table.get("bits")
    older = table.get("q_group_size")
    newer = table.get("group_size")
    group = _group("group_size", older if newer is None else newer)
    packing = Packing(_kind("bits", bits, (4,)), group, has_zeros=True)
    return QuantizedSpec(Layout.AWQ, packing, _plain_rules(table) + rules_for(["lm_head"]))


def _read_fp8(table: Config) -> QuantizedSpec:
    table.only("fmt", "e4m3")
    table.only("activation_scheme", "dynamic", "static")
    packing = Packing(PackedKind.FP8, None, None)
    if table.has("weight_block_size"):
        rows, columns = table.sizes("weight_block_size", 2)
        packing = Packing(PackedKind.FP8, columns, rows)
    rules = _plain_rules(table) + rules_for(["lm_head"])
    return QuantizedSpec(Layout.FP8, packing, rules, ignored_endings=KV_SCALES)


def _read_mxfp4(table: Config) -> QuantizedSpec:
    return QuantizedSpec(Layout.MXFP4, Packing(PackedKind.MXFP4, 32), _plain_rules(table))


def _plain_rules(table: Config) -> tuple[Rule, ...]:
    """Rules for modules that are not quantized."""
    names = (table.items("modules_to_not_convert") or []) + (table.items("ignored_layers") or [])
    return rules_for(str(name) for name in names)


def _kind(field: str, bits: object, known: tuple[int, ...]) -> PackedKind:
    if not isinstance(bits, int) or bits not in known:
        refuse(field, bits, " or ".join(map(str, known)))
    return _KINDS[bits]


def _group(field: str, found: object) -> int | None:
    """The group size; -1 and None mean one group of all columns."""
    if found is None or found == -1:
        return None
    if not isinstance(found, int) or found < 8 or found % 8:
        refuse(field, found, "-1 or a multiple of 8")
    return found


_METHODS: dict[str, Callable[[Config], QuantizedSpec]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": read_compressed,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}
