"""Finds a rank's rows of a product in the checkpoint's tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.models.names import QkvOrder
from mainstem.models.shard import RankCut
from mainstem.models.spec import LayerSpec, MlpSpec, ModelSpec


class Rows(NamedTuple):
    """Some rows of a product: `part` of the tensor's `whole` rows."""

    name: str
    whole: int
    part: slice


def qkv_rows(spec: ModelSpec, layer: LayerSpec, cut: RankCut, names: Sequence[str]) -> list[Rows]:
    """Return the rows of queries, keys and values, in this order, from three tensors or one. With
    gates, the rows of each query are followed by those of its gate."""
    attention = layer.attention
    assert attention is not None, "a recurrent layer has no queries"
    shape = spec.kv_shape(attention)
    dim, heads, kv_heads = shape.dim, spec.num_heads, shape.heads
    queries, keys = cut.heads(heads), cut.heads(kv_heads)
    if attention.has_gate:
        heads, queries = 2 * heads, times(queries, 2)
    if layer.kv_layer is not None:
        return [Rows(names[0], heads * dim, times(queries, dim))]
    if attention.has_keys_as_values:
        names = (names[0], names[1], names[1])
    if len(names) == 3:
        parts = zip(names, (heads, kv_heads, kv_heads), (queries, keys, keys), strict=True)
        return [Rows(name, count * dim, times(part, dim)) for name, count, part in parts]
    if spec.names.qkv_order is QkvOrder.PARTS:
        places = [queries, _moved(keys, heads), _moved(keys, heads + kv_heads)]
    else:
        places = _in_groups(queries, keys, heads // kv_heads)
    whole = (heads + 2 * kv_heads) * dim
    return _merged([Rows(names[0], whole, times(place, dim)) for place in places])


def gates_last(spec: ModelSpec) -> Tensor:
    """The order in which rows of queries, each followed by its gate, keys and values become
    queries, keys, values and gates."""
    dim, heads, kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
    both = torch.arange(2 * heads * dim).view(heads, 2, dim)
    others = torch.arange(2 * heads * dim, (2 * heads + 2 * kv_heads) * dim)
    return torch.cat((both[:, 0].reshape(-1), others, both[:, 1].reshape(-1)))


def first_rows(mlp: MlpSpec, columns: slice, names: Sequence[str]) -> list[Rows]:
    """Return the rows of gate and up, from two tensors or one; only up if there is no gate."""
    if not mlp.is_gated or len(names) == 2:
        return [Rows(name, mlp.size, columns) for name in names]
    both = (columns, _moved(columns, mlp.size))
    return _merged([Rows(names[0], 2 * mlp.size, part) for part in both])


def times(part: slice, size: int) -> slice:
    """Return the rows of `part`, a slice of heads that have `size` rows each."""
    return slice(part.start * size, part.stop * size)


def _in_groups(queries: slice, keys: slice, group: int) -> list[slice]:
    """Return the places of heads in a tensor that has, for each KV head, `group` queries, a key and
    a value, in this order."""
    places, ends = [], []
    for kv_head in range(keys.start, keys.stop):
        first = max(queries.start, kv_head * group)
        end = min(queries.stop, (kv_head + 1) * group)
        others = 2 * kv_head  # keys and values before this group
        places.append(slice(others + first, others + end))
        ends.append(others + (kv_head + 1) * group)
    return places + [slice(e, e + 1) for e in ends] + [slice(e + 1, e + 2) for e in ends]


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _merged(rows: Sequence[Rows]) -> list[Rows]:
    """Merge adjacent slices of one tensor."""
    merged = [rows[0]]
    for each in rows[1:]:
        before = merged[-1]
        if (before.name, before.part.stop) == (each.name, each.part.start):
            merged[-1] = each._replace(part=slice(before.part.start, each.part.stop))
        else:
            merged.append(each)
    return merged
