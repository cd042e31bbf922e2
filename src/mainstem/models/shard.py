"""Which part of a model a rank has, under tensor parallelism.

    split over ranks      query heads with their KV heads, columns of MLPs and of every expert,
                          rows of the vocabulary
    kept by every rank    norms, routers, KV heads that are fewer than ranks

Each expert is cut like an MLP, rather than experts dealt out whole: a step's tokens then load all
ranks alike, and a lone token reads 1 / ranks of its experts on each.
"""

from dataclasses import dataclass, replace

from mainstem.core.errors import ConfigError
from mainstem.models.spec import ExpertsSpec, LayerSpec, MlpSpec, ModelSpec

MOST_RANKS = 64  # that `shards_that_divide` tries
_EQUAL_UNIT = 8  # parts of MLPs and experts are equal if these are multiples (kernels ask for it)
_UNIT = 16  # ... and multiples of this otherwise


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `of` parts; the default is the whole model."""

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ValueError(f"rank {self.rank} of {self.of}")

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    def columns(self, size: int) -> slice:
        """The rank's columns of an MLP of `size`: equal parts, or else some units of 16."""
        unit = size // self.of if _is_equal(size, self.of) else _UNIT
        units = size // unit
        end = units * (self.rank + 1) // self.of * unit
        return slice(units * self.rank // self.of * unit, size if end + unit > size else end)

    def heads(self, count: int) -> slice:
        """The rank's query heads, of `count`; those of KV heads, too, where there are enough."""
        return slice(count * self.rank // self.of, -(-count * (self.rank + 1) // self.of))

    def vocabulary(self, size: int) -> slice:
        """The rank's tokens; the last ranks may have fewer, or none."""
        rows = vocabulary_rows(size, self.of)
        return slice(min(size, rows * self.rank), min(size, rows * (self.rank + 1)))


WHOLE = Shard()


def vocabulary_rows(size: int, of: int) -> int:
    """Rows of embedding and head on each rank: equal, so that some at the end may be padding."""
    rows = -(-size // of)
    return size if of == 1 else -(-rows // _UNIT) * _UNIT


def part_of(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The recipe of what a rank computes; ConfigError where the model cannot be cut so."""
    if shard.is_whole:
        return spec
    if reason := _obstacle(spec, shard.of):
        possible = ", ".join(str(of) for of in shards_that_divide(spec))
        raise ConfigError(
            f"{spec.architecture} cannot be split over {shard.of} ranks: {reason}; possible "
            f"numbers of ranks: {possible}"
        )
    layers = {layer: _part_of_layer(layer, shard) for layer in set(spec.layers)}
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


def _part_of_layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    mlp = layer.mlp
    if isinstance(mlp, ExpertsSpec) and mlp.shared_size is not None:
        mlp = replace(mlp, shared_size=_length(shard.columns(mlp.shared_size)))
    return replace(layer, mlp=replace(mlp, size=_length(shard.columns(mlp.size))))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _obstacle(spec: ModelSpec, of: int) -> str | None:
    """Why this number of ranks is not possible."""
    if spec.num_heads % of:
        return f"num_attention_heads={spec.num_heads} is not a multiple of it"
    if spec.num_kv_heads % of and of % spec.num_kv_heads:
        return f"num_key_value_heads={spec.num_kv_heads} is neither a multiple nor a divisor of it"
    for mlp in {layer.mlp for layer in spec.layers}:
        for size in _sizes(mlp):
            if not _is_equal(size, of) and size // _UNIT < of:
                return f"an MLP of {size} columns has no {_UNIT} for each"
    return None


def _is_equal(size: int, of: int) -> bool:
    return size % (of * _EQUAL_UNIT) == 0


def _sizes(mlp: MlpSpec | ExpertsSpec) -> list[int]:
    sizes = [mlp.size]
    if isinstance(mlp, ExpertsSpec) and mlp.shared_size is not None:
        sizes.append(mlp.shared_size)
    return sizes
