"""Computes what each rank of a tensor-parallel model holds. Reads only config.json: needs neither
weights nor torch."""

from dataclasses import dataclass
from pathlib import Path

from mainstem.core.config import DType
from mainstem.models.families import read_spec
from mainstem.models.quantized.packing import Layout, PackedKind, Packing
from mainstem.models.shard import Shard, part_of, shards_that_divide
from mainstem.models.spec import ModelSpec
from mainstem.runner.division import KvCosts

MOST_RANKS = 16  # numbers of ranks above this are not listed


@dataclass(frozen=True, slots=True)
class RankSize:
    """Sizes of the largest rank, without norms, biases and zero points, which are small."""

    num_ranks: int
    weight_bytes: int  # in the rank's memory
    kv_bytes_per_token: int
    stored_bytes: int  # of the same weights in the checkpoint
    bytes_per_state: int = 0  # of recurrent layers
    unpacked: tuple[str, ...] = ()  # quantized weights that are dequantized when they are loaded
    windowed_kv_bytes: int = 0  # of `kv_bytes_per_token`, in the windowed parts of pages


@dataclass(frozen=True, slots=True)
class Keeps:
    """The quantized weights that a device keeps packed. It dequantizes others when it loads
    them."""

    products: frozenset[PackedKind]
    experts: frozenset[PackedKind]

    def has_product(self, packing: Packing) -> bool:
        is_fp8 = packing.kind is PackedKind.FP8
        return packing.kind in self.products and (not is_fp8 or packing.group in (None, FP8_BLOCK))


FP8_BLOCK = 128  # the only block size for which there are GPU kernels
_FOUR_BITS = frozenset({PackedKind.INT4, PackedKind.MXFP4})
ON_CPU = Keeps(products=frozenset(), experts=frozenset(PackedKind))
ON_GPU = Keeps(products=_FOUR_BITS, experts=_FOUR_BITS)
ON_GPU_WITH_FP8 = Keeps(products=_FOUR_BITS | {PackedKind.FP8}, experts=_FOUR_BITS)


def rank_sizes(
    folder: Path, dtype: DType = DType.AUTO, keeps: Keeps = ON_GPU_WITH_FP8
) -> tuple[RankSize, ...]:
    """The sizes for each number of ranks that divides the model, starting with one. Weights have
    the checkpoint's dtype, or the given one. Raises UnsupportedModel for a model that the engine
    cannot run.
    """
    spec = read_spec(folder)
    stored_bytes = 4 if spec.dtype is DType.FP32 else 2
    element_bytes = stored_bytes if dtype is DType.AUTO else 4 if dtype is DType.FP32 else 2
    sizes = []
    for of in shards_that_divide(spec, MOST_RANKS):
        parts = [_Products.of(part_of(spec, Shard(rank, of))) for rank in range(of)]
        sizes.append(
            RankSize(
                num_ranks=of,
                weight_bytes=max(part.held_bytes(element_bytes, keeps) for part in parts),
                kv_bytes_per_token=parts[0].spec.kv_elements_per_token * element_bytes,
                bytes_per_state=parts[0].spec.state_bytes(element_bytes),
                stored_bytes=max(part.stored_bytes(stored_bytes) for part in parts),
                unpacked=parts[0].unpacked(keeps),
                windowed_kv_bytes=KvCosts.of(parts[0].spec, element_bytes).windowed_bytes,
            )
        )
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class _Products:
    """How the products of a model, or of a rank's part of it, are packed in the checkpoint."""

    spec: ModelSpec
    of_experts: Packing | None
    of_others: Packing | None  # a layer's other products; embedding and head count as unpacked

    @classmethod
    def of(cls, spec: ModelSpec) -> "_Products":
        if spec.quantized is None:
            return cls(spec, None, None)
        names, prefix = spec.names, spec.names.layer.format(0) + "."
        packing_of = spec.quantized.packing_of
        expert = packing_of(prefix + names.expert_gate.format(0))
        if spec.quantized.layout is Layout.MXFP4:  # only experts are quantized
            return cls(spec, expert, None)
        return cls(spec, expert, packing_of(prefix + names.out))

    def stored_bytes(self, element_bytes: int) -> int:
        return self._bytes(element_bytes, self.of_experts, self.of_others)

    def held_bytes(self, element_bytes: int, keeps: Keeps) -> int:
        experts = self.of_experts if self._keeps_experts(keeps) else None
        others = self.of_others
        if others is not None and not keeps.has_product(others):
            others = None
        return self._bytes(element_bytes, experts, others)

    def unpacked(self, keeps: Keeps) -> tuple[str, ...]:
        """The weights that are dequantized, in words."""
        found = []
        if self.of_others is not None and not keeps.has_product(self.of_others):
            found.append(f"products in {self.of_others}")
        if self._num_experts and self.of_experts is not None and not self._keeps_experts(keeps):
            found.append(f"experts in {self.of_experts}")
        return tuple(found)

    @property
    def _num_experts(self) -> int:
        return self.spec.num_expert_params + self.spec.num_idle_params

    def _keeps_experts(self, keeps: Keeps) -> bool:
        quantized = self.spec.quantized
        has_order = quantized is not None and quantized.has_order  # such experts are dequantized
        packing = self.of_experts
        return not has_order and packing is not None and packing.kind in keeps.experts

    def _bytes(self, element_bytes: int, experts: Packing | None, others: Packing | None) -> int:
        num_others = self.spec.num_layer_params - self.spec.num_expert_params
        num_ends = self.spec.num_weights - num_others - self._num_experts
        found = float(num_ends * element_bytes)
        for count, packing in ((self._num_experts, experts), (num_others, others)):
            found += count * (element_bytes if packing is None else packing.bytes_per_param)
        return round(found)
