"""Reads the scales of checkpoints that declare K and V in fp8: for each layer one for K and one for
V. A number of K is its e4m3 code times the scale."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mainstem.core.errors import UnsupportedModel
from mainstem.models.spec import ModelSpec
from mainstem.models.weight_files import weight_files

KvScales = Mapping[int, tuple[float, float]]  # by a layer's place in a page: of K and of V

# endings of their names after the module's, for K; for V with v instead of k
_ENDINGS = ("k_scale", "k_proj.k_scale", "k_proj.output_scale")


def read_kv_scales(folder: Path, spec: ModelSpec) -> KvScales:
    """Read the scales of all layers that keep K and V. Raises UnsupportedModel if one is
    missing or is not a single number above 0."""
    found: dict[str, tuple[Any, str]] = {}
    for file in weight_files(folder):
        handle = safe_open(file, framework="pt")
        for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            if name.endswith(("_scale", "output_scale")):
                found[spec.names.canonical(name)] = (handle, name)
    module = spec.names.out.rpartition(".")[0]
    scales = {}
    for index, place in enumerate(spec.page_layers):
        if place is not None:
            prefix = f"{spec.names.layer.format(index)}.{module}."
            keys = [prefix + ending for ending in _ENDINGS]
            values = [key.replace("k_", "v_") for key in _ENDINGS]
            scales[place] = (
                _read(found, keys),
                _read(found, [prefix + ending for ending in values]),
            )
    return scales


def _read(found: dict[str, tuple[Any, str]], names: list[str]) -> float:
    """The first of these tensors that there is."""
    for name in names:
        if name in found:
            handle, its_name = found[name]
            tensor = handle.get_tensor(its_name)
            if tensor.numel() == 1 and float(tensor) > 0:
                return float(tensor)
            raise UnsupportedModel(
                f"{its_name} must be one number above 0. Set kv_dtype=bf16 to do without it"
            )
    raise UnsupportedModel(
        f"the checkpoint declares K and V in fp8 (kv_cache_scheme), but lacks {names[0]}. Set "
        "kv_dtype=bf16 to do without it"
    )
