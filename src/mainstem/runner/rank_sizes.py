"""Computes what each rank of a tensor-parallel model holds from its config.json only, without
weights and torch."""

from dataclasses import dataclass
from pathlib import Path

from mainstem.core.config import DType
from mainstem.models.families import read_spec
from mainstem.models.quantized.packing import Layout
from mainstem.models.shard import Shard, part_of, shards_that_divide
from mainstem.models.spec import ModelSpec

MOST_RANKS = 16  # numbers of ranks above this are not listed


@dataclass(frozen=True, slots=True)
class RankSize:
    """Sizes of the largest rank, without norms, biases and zero points, which are small."""

    num_ranks: int
    weight_bytes: int
    kv_bytes_per_token: int


def rank_sizes(folder: Path, dtype: DType = DType.AUTO) -> tuple[RankSize, ...]:
    """Return the sizes for each number of ranks that the model can be split over, starting with
    one, in the checkpoint's dtype or in the given one. Raises UnsupportedModel for a model that the
    engine cannot run.
    """
    spec = read_spec(folder)
    kept = spec.dtype if dtype is DType.AUTO else dtype
    element_bytes = 4 if kept is DType.FP32 else 2
    sizes = []
    for of in shards_that_divide(spec, MOST_RANKS):
        parts = [part_of(spec, Shard(rank, of)) for rank in range(of)]
        sizes.append(
            RankSize(
                num_ranks=of,
                weight_bytes=max(_weight_bytes(part, element_bytes) for part in parts),
                kv_bytes_per_token=parts[0].kv_elements_per_token * element_bytes,
            )
        )
    return tuple(sizes)


def _weight_bytes(spec: ModelSpec, element_bytes: int) -> int:
    plain = spec.num_weights
    quantized = spec.quantized
    if quantized is None or not quantized.packings:
        return plain * element_bytes
    packed = spec.num_layer_params + spec.num_idle_params
    if quantized.layout is Layout.MXFP4:  # only experts are quantized
        packed = spec.num_expert_params + spec.num_idle_params
    packing = quantized.packing or quantized.packings[0]
    return (plain - packed) * element_bytes + round(packed * packing.bytes_per_param)
