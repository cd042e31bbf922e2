"""Which part of a model a rank has, under tensor parallelism.

    split over ranks      query heads with their KV heads, columns of MLPs and of every expert,
                          rows of the vocabulary
    kept by every rank    norms, routers
    kept by some ranks    each KV head, if there are fewer KV heads than ranks

Each expert is cut like an MLP, instead of giving whole experts to ranks. So a step's tokens load
all ranks equally, and for a single token each rank reads 1 / ranks of the token's experts.
"""

from dataclasses import dataclass, replace

from mainstem.core.errors import ConfigError
from mainstem.models.spec import ExpertsSpec, LayerSpec, MlpSpec, ModelSpec

MOST_RANKS = 64  # the largest number that `shards_that_divide` tries
_UNIT = 16  # unequal parts of an MLP, and parts of the vocabulary, are multiples of this
_EQUAL_UNIT = 8  # equal parts are multiples of this, which kernels need


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `of` parts; the default is the whole model."""

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ValueError(f"rank must be from 0 to {self.of - 1}, got {self.rank}")

    @property
    def is_whole(self) -> bool:
        return self.of == 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class RankCut:
    """Which parts of the model's tensors a rank has."""

    shard: Shard = WHOLE
    group: int = 1  # columns of a quantized weight that share a scale; not split if possible

    @classmethod
    def of(cls, spec: ModelSpec, shard: Shard) -> "RankCut":
        packings = () if spec.quantized is None else spec.quantized.packings
        return cls(shard, max((packing.group or 1 for packing in packings), default=1))

    def heads(self, count: int) -> slice:
        """The rank's part of `count` query heads or KV heads; one head if there are fewer heads
        than ranks."""
        rank, of = self.shard.rank, self.shard.of
        return slice(count * rank // of, -(-count * (rank + 1) // of))

    def columns(self, size: int) -> slice:
        """The rank's columns of an MLP of `size`: an equal part if kernels support it, otherwise
        about as many, in multiples of `_UNIT` or of the group."""
        rank, of = self.shard.rank, self.shard.of
        unit = self._unit(size)
        units = size // unit
        end = size if rank == of - 1 else units * (rank + 1) // of * unit
        return slice(units * rank // of * unit, end)

    def can_cut(self, size: int) -> bool:
        """Whether every rank gets some of `size` columns."""
        return size // self._unit(size) >= self.shard.of

    def _unit(self, size: int) -> int:
        of = self.shard.of
        if size % (of * max(_EQUAL_UNIT, self.group)) == 0:
            return size // of
        return max(_UNIT, self.group)

    def vocabulary(self, size: int) -> slice:
        """The rank's tokens; the last ranks may have fewer than `vocabulary_rows`, or none."""
        rows, rank = vocabulary_rows(size, self.shard.of), self.shard.rank
        return slice(min(size, rows * rank), min(size, rows * (rank + 1)))


def vocabulary_rows(size: int, of: int) -> int:
    """The number of rows of embedding and head on each rank. It is equal on all ranks, so the last
    rows may be padding."""
    return size if of == 1 else -(-size // (of * _UNIT)) * _UNIT


def part_of(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The recipe of a rank's part; ConfigError if the model cannot be split over these ranks."""
    if shard.is_whole:
        return spec
    if reason := _obstacle(spec, shard.of):
        possible = ", ".join(str(of) for of in shards_that_divide(spec))
        raise ConfigError(
            f"{spec.architecture} cannot be split over {shard.of} ranks: {reason}; possible "
            f"numbers of ranks: {possible}"
        )
    cut = RankCut.of(spec, shard)
    layers = {layer: _part_of_layer(layer, cut) for layer in set(spec.layers)}
    return replace(
        spec,
        num_heads=spec.num_heads // shard.of,
        num_kv_heads=max(1, spec.num_kv_heads // shard.of),
        layers=tuple(layers[layer] for layer in spec.layers),
        vocab_rows=vocabulary_rows(spec.vocab_size, shard.of),
    )


def shards_that_divide(spec: ModelSpec, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Numbers of ranks, 1 included, that a model can be split over."""
    return tuple(of for of in range(1, most + 1) if of == 1 or _obstacle(spec, of) is None)


def _part_of_layer(layer: LayerSpec, cut: RankCut) -> LayerSpec:
    mlp = layer.mlp
    if isinstance(mlp, ExpertsSpec) and mlp.shared_size is not None:
        mlp = replace(mlp, shared_size=length(cut.columns(mlp.shared_size)))
    attention = layer.attention
    if attention is not None and attention.kv_shape is not None:
        shape = attention.kv_shape
        shape = replace(shape, heads=max(1, shape.heads // cut.shard.of))
        attention = replace(attention, kv_shape=shape)
    mlp = replace(mlp, size=length(cut.columns(mlp.size)))
    return replace(layer, mlp=mlp, attention=attention)


def length(part: slice) -> int:
    """Length of a slice with both ends."""
    return int(part.stop - part.start)


def _obstacle(spec: ModelSpec, of: int) -> str | None:
    """Why this number of ranks is not possible."""
    if spec.recurrences:
        return "recurrent layers are not split over ranks yet"
    if spec.num_heads % of:
        return f"num_attention_heads={spec.num_heads} is not a multiple of this number"
    if spec.layer_inputs is not None:
        return "layers with embeddings of their own are not split over ranks yet"
    for kind in spec.attention_kinds:
        kv_heads = spec.kv_shape(kind).heads
        if kv_heads % of and of % kv_heads:
            return (
                f"num_key_value_heads={kv_heads} is neither a multiple nor a divisor of this number"
            )
    cut = RankCut.of(spec, Shard(0, of))
    for mlp in {layer.mlp for layer in spec.layers}:
        if isinstance(mlp, ExpertsSpec) and mlp.has_own_norms:
            return "experts whose outputs are normed on their own are not split over ranks yet"
        for size in _sizes(mlp):
            if not cut.can_cut(size):
                return (
                    f"an MLP of {size} columns has fewer than {max(_UNIT, cut.group)} for each rank"
                )
    return None


def _sizes(mlp: MlpSpec | ExpertsSpec) -> list[int]:
    sizes = [mlp.size]
    if isinstance(mlp, ExpertsSpec) and mlp.shared_size is not None:
        sizes.append(mlp.shared_size)
    return sizes
