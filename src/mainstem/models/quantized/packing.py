"""What a config.json says about quantized weights: plain data, read before any tensor."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from mainstem.core.errors import UnsupportedModel

SUPPORTED = (
    "Supported: GPTQ (4 and 8 bits, act-order), AWQ (4 bits, gemm), compressed-tensors (4 and 8 "
    "bits, FP8, MXFP4), FP8 (per tensor, channel or block), MXFP4. Otherwise use the model's "
    "16-bit checkpoint"
)
# scales of K and V in fp8, which are read by kv_scales.py
KV_SCALES = (
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", "k_proj.output_scale", "v_proj.output_scale",
)  # fmt: skip


class PackedKind(Enum):
    """How a stored value becomes a number (models/packed.py)."""

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"
    MXFP4 = "mxfp4"

    @property
    def columns_per_value(self) -> int:
        return 2 if self in (PackedKind.INT4, PackedKind.MXFP4) else 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric integers."""
        return 8 if self is PackedKind.INT4 else 128


@dataclass(frozen=True, slots=True)
class Packing:
    """How the weight of one linear layer is packed."""

    kind: PackedKind
    group: int | None  # columns that share a scale; None: all
    block_rows: int | None = 1  # rows that share a scale; None: all
    has_zeros: bool = False

    @property
    def bytes_per_param(self) -> float:
        """The mean bytes of one number of a weight, including the scales of groups."""
        scale_bytes = {PackedKind.FP8: 4, PackedKind.MXFP4: 1}.get(self.kind, 2) + self.has_zeros
        found = 1 / self.kind.columns_per_value
        if self.group is not None and self.block_rows is not None:
            found += scale_bytes / (self.group * self.block_rows)
        return found

    def __str__(self) -> str:
        words = {
            PackedKind.INT4: "4 bits",
            PackedKind.INT8: "8 bits",
            PackedKind.FP8: "FP8",
            PackedKind.MXFP4: "MXFP4",
        }[self.kind]
        if self.block_rows is None:
            scales = "one scale"
        elif self.group is None:
            scales = "a scale per channel"
        elif self.block_rows > 1:
            scales = f"blocks of {self.block_rows} x {self.group}"
        else:
            scales = f"groups of {self.group}"
        return f"{words}, {scales}{', zero points' if self.has_zeros else ''}"


class Layout(Enum):
    """The format of a checkpoint: names and shapes of the tensors that hold one packed weight. Each
    format has a reader."""

    GPTQ = "GPTQ"
    AWQ = "AWQ"
    COMPRESSED = "compressed-tensors"
    FP8 = "FP8"
    MXFP4 = "MXFP4"


@dataclass(frozen=True, slots=True)
class Rule:
    """The packing of the products whose names match `pattern`. The first rule that matches
    counts."""

    pattern: str  # a regular expression, from the beginning of the name
    packing: Packing | None  # None: not quantized


@dataclass(frozen=True, slots=True)
class QuantizedSpec:
    """How a checkpoint's weights are quantized."""

    layout: Layout
    packing: Packing | None  # the packing of products that match no rule
    rules: tuple[Rule, ...] = ()
    is_zero_less_one: bool = False  # GPTQ: zero points are stored minus 1
    has_order: bool = False  # columns may be grouped in another order (act-order)
    ignored_endings: tuple[str, ...] = ()  # endings of names of tensors that are not needed
    has_fp8_kv: bool = False  # K and V are to be kept in fp8, with a scale for each layer

    def packing_of(self, name: str) -> Packing | None:
        """The packing of a product by its name, without ".weight"; None if the config says that it
        is not quantized."""
        for rule in self.rules:
            if re.match(rule.pattern, name):
                return rule.packing
        return self.packing

    @property
    def packings(self) -> tuple[Packing, ...]:
        """The different ways in which products are packed."""
        found = (self.packing, *(rule.packing for rule in self.rules))
        return tuple(dict.fromkeys(packing for packing in found if packing is not None))

    def __str__(self) -> str:
        found = [str(packing) for packing in self.packings]
        order = ", act-order" if self.has_order else ""
        layout = "" if self.layout in (Layout.FP8, Layout.MXFP4) else f"{self.layout.value}, "
        return f"{layout}{'; '.join(found) or 'nothing quantized'}{order}"


def rules_for(names: Iterable[str]) -> tuple[Rule, ...]:
    """Rules that leave modules with these names, with any prefix, and all modules inside them as
    they are. `*` matches anything."""
    found = (re.escape(name).replace(r"\*", ".*") for name in names)
    return tuple(Rule(rf"(.*\.)?{name}(\..*)?$", None) for name in found)


def refuse(field: str, found: object, known: str) -> NoReturn:
    """Raise UnsupportedModel for a setting of quantization_config."""
    raise UnsupportedModel(
        f"quantization_config: {field}={found!r} is not supported, only {known}. {SUPPORTED}"
    )
