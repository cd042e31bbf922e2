"""Rows that sequences keep beside a state that they do not write. With S the *base*, a state that
any number of sequences read and none writes, G_i the product of a sequence's decays from the base
up to its token i, and a key k_i and a value u_i for each of these tokens, its state is

    S_t = G_t S + sum_{i<=t} (G_t/G_i) k_i u_i^T

    base  slot 3 | S |   read by the sequences 0, 1 and 4: a group; its product with all their keys
                         and queries is one read
    rows  slot 0 | k_0 u_0 | k_1 u_1 | k_2 u_2 |     |     of sequence 0, three tokens after S
          slot 1 | k_0 u_0 |         |         |     |     of sequence 1

A *row slot* has room for some rows of one sequence, with the logarithm of G_i for each, and the
last inputs of its convolution, if it has rows. A decode appends its row, or writes a state: it
*folds*. That state is S_t, to which its rows no longer belong. It may be written in place of its
base only if no other sequence reads that. A prompt's tokens become rows if it has none before the
step; its one segment then writes no state (-1). For the delta rule k is normalised and u is what
the token added to the state. For Mamba-2, k is b and u is dt x. Steps whose tokens are computed one
after the other (`Segments.is_serial`) have no rows: rows are rounded, so bits would show where a
base was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SIBLINGS = 16  # sequences that are multiplied by one read of a state
ROOM_STEP = 16  # the room of a slot is a multiple of this
NUM_PACKED = 6  # arrays of `pack_rows`
_ALIGNED = 4  # numbers: Triton compiles a kernel anew for arrays at other addresses

Ints = NDArray[np.int32]


class LayerRows(NamedTuple):
    """One layer's part of all row slots. Only the slots may lie apart. On a GPU keys and values
    have the model's dtype; on a CPU they are in fp32."""

    conv: Tensor  # [slots, kernel - 1, channels] the last inputs, oldest first; the model's dtype
    keys: Tensor  # [slots, key_heads, room, key_dim]
    values: Tensor  # [slots, heads, room, value_dim]
    sums: Tensor  # [slots, heads, room] fp32: logarithms of G_i, sums since the base


@dataclass(frozen=True, slots=True, eq=False)
class RowUse:
    """Which sequences of a step keep rows. Tensors are int32, on the device; those of decodes may
    be longer than their contents, whose `sizes` are known there. The numbers are upper bounds."""

    slots: Tensor  # [sequences] row slot; -1: has no rows
    counts: Tensor  # [sequences] rows before the step
    members: Tensor  # decodes that append a row; those that read the same base are neighbours
    group_starts: Tensor  # [groups + 1] first member of each group of at most SIBLINGS
    writers: Tensor  # decodes that write a state: folds, and decodes without rows
    sizes: Tensor  # [2] the number of groups and of writers
    num_groups: int
    num_writers: int

    @classmethod
    def of_graph(cls, packed: Tensor, num_decodes: int) -> "RowUse":
        """For a CUDA graph: what `pack_rows` returned, in a buffer whose contents may change."""
        slots, counts, members, group_starts, writers, sizes = packed.unbind()
        return cls(slots, counts, members, group_starts, writers, sizes, num_decodes, num_decodes)

    @classmethod
    def of_step(cls, packed: Sequence[Tensor], sizes: Ints) -> "RowUse":
        """For one step: the rows of what `pack_rows` returned; `sizes`: their last one."""
        slots, counts, members, group_starts, writers, of_lists = packed
        num_groups, num_writers = int(sizes[0]), int(sizes[1])
        return cls(slots, counts, members, group_starts, writers, of_lists, num_groups, num_writers)


def row_width(num_seqs: int) -> int:
    """The width of what `pack_rows` returns for up to this many sequences."""
    return max(-(-(num_seqs + 1) // _ALIGNED) * _ALIGNED, _ALIGNED)


def pack_rows(slots: Ints, counts: Ints, reads: Ints, decode_writes: Ints) -> Ints:
    """Return the arrays of RowUse, one below the other. Padding of a CUDA graph is a decode without
    rows.

    slots, counts, reads: of all sequences; decode_writes: of the leading ones, which are decodes.

    >>> packed = pack_rows(*np.array([[0, 1, -1], [2, 0, 0], [3, 3, 5]]), np.array([-1, 7, 5]))
    >>> packed[2:6].tolist()  # 0 is alone in a group; 1 folds; 2 has no rows
    [[0, 0, 0, 0], [0, 1, 1, 1], [1, 2, 0, 0], [1, 2, 0, 0]]
    """
    num_decodes = len(decode_writes)
    is_member = (slots[:num_decodes] >= 0) & (decode_writes < 0)
    members = np.flatnonzero(is_member).astype(np.int32)
    members = members[np.argsort(reads[members], kind="stable")]
    writers = np.flatnonzero(~is_member).astype(np.int32)
    group_starts = _group_starts(reads[members])
    packed = np.zeros((NUM_PACKED, row_width(len(slots))), np.int32)
    packed[3] = len(members)
    sizes = np.array([len(group_starts) - 1, len(writers)], np.int32)
    parts = (slots, counts, members, group_starts, writers, sizes)
    for row, part in zip(packed, parts, strict=True):
        row[: len(part)] = part
    return packed


def _group_starts(bases: Ints) -> Ints:
    """Cut sorted bases where they change, and after each SIBLINGS of one."""
    if len(bases) == 0:
        return np.zeros(1, np.int32)
    is_first = np.append(True, bases[1:] != bases[:-1])
    firsts = np.flatnonzero(is_first)
    within = np.arange(len(bases)) - firsts[np.cumsum(is_first) - 1]
    return np.append(np.flatnonzero(within % SIBLINGS == 0), len(bases)).astype(np.int32)
