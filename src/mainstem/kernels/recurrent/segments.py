"""Which tokens of a step belong to which recurrent states. A sequence's tokens in a step are cut
into segments, and after each segment its state is written to a slot:

    packed tokens    | a | b | c c c c c c c c | d d d d |
    segments         | 0 | 1 |   2   |    3    |    4    |    starts = 0 1 2 5 10 14
    sequences        | 0 | 1 |        2        |    3    |    seq_segments = 0 1 2 4 5
                      decodes

A sequence starts from the state in its slot `reads`, or from zeros. Several sequences may read one
slot. A sequence may write the slot it reads; no other sequence of the step may read or write a slot
that it writes. (Padding of a CUDA graph does: it reads and writes a slot that nobody else uses, and
what is in it does not matter.)

A sequence may instead keep rows beside a state that nobody writes: see `rows.py`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.kernels.recurrent.rows import RowUse, pack_rows

TILE = 64  # tokens; one size, so that a sequence's bits do not depend on other sequences
ALIGNED = 4  # numbers of 4 bytes: 16 bytes
ROUND_TILES = 256  # that have memory at a time, unless one sequence has more

Ints = NDArray[np.int32]


class Round(NamedTuple):
    """Neighbouring sequences of a TileList that are computed at the same time."""

    first_seq: int
    num_seqs: int
    first_tile: int
    num_tiles: int


@dataclass(frozen=True, slots=True, eq=False)
class TileList:
    """The tokens of the sequences that are not decodes, in tiles of at most TILE tokens. A tile
    ends where its segment ends. Tensors are int32."""

    starts: Tensor  # [tiles] first packed token
    ends: Tensor  # [tiles] packed token after the last one
    writes: Tensor  # [tiles] slot to which the state after the tile is written; -1: not written
    seq_tiles: Tensor  # [sequences + 1] the tiles of each sequence, neighbours
    rounds: tuple[Round, ...]  # all sequences, in order
    row_slots: Tensor | None = None  # [tiles] row slot to which the tile's rows are written, or -1
    first_rows: Tensor | None = None  # [tiles] where they begin there; both None: no rows at all


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The sequences of a step and the slots of their states. Tensors are int32, on the device."""

    starts: Tensor  # [segments + 1] first packed token of each segment; prefix sums
    writes: Tensor  # [segments] slot to which the state after the segment is written
    seq_segments: Tensor  # [sequences + 1] the segments of each sequence, neighbours
    reads: Tensor  # [sequences] slot of the state to start from; -1: starts with zeros
    num_decodes: int  # the leading sequences that have one segment of one token
    num_seqs: int
    max_tokens: int  # of the longest sequence in this step, or more
    tiles: TileList | None = None  # for GPUs; None if all sequences are decodes, or if serial
    rows: RowUse | None = None  # None: no sequence has rows

    @property
    def is_serial(self) -> bool:
        """Whether GPUs compute every sequence's tokens one after the other, without tiles. Then a
        token has the same bits wherever its sequence was cut, and decodes are no case of their
        own."""
        return self.tiles is None and self.num_decodes < self.num_seqs


def make_segments(
    starts: Ints,
    writes: Ints,
    seq_segments: Ints,
    reads: Ints,
    num_decodes: int,
    device: torch.device | str = "cpu",
    rows: tuple[Ints, Ints] | None = None,
) -> Segments:
    """Copy a step's segments to a device, in one piece, and cut them into tiles. No segment is
    empty; the arrays have the meaning that they have in Segments.

    rows: slots and counts of RowUse, if a sequence has rows.
    """
    _check(starts, writes, seq_segments, reads)
    assert starts[seq_segments][num_decodes] == num_decodes, "a decode has more than one token"
    cut = _cut(starts, writes, seq_segments, num_decodes) if num_decodes < len(reads) else []
    packed: list[Ints] = []
    if rows is not None and (rows[0] >= 0).any():
        _check_rows(*rows, writes, seq_segments, reads, num_decodes)
        packed = list(pack_rows(*rows, reads, writes[:num_decodes]))
        if cut:
            cut += _tile_rows(rows[0][num_decodes:], cut[0], cut[3])
    return _on_device((starts, writes, seq_segments, reads), cut, packed, num_decodes, device)


def make_serial_segments(
    starts: Ints,
    writes: Ints,
    seq_segments: Ints,
    reads: Ints,
    device: torch.device | str = "cpu",
) -> Segments:
    """Likewise for tokens that are computed one after the other; see `Segments.is_serial`."""
    _check(starts, writes, seq_segments, reads)
    return _on_device((starts, writes, seq_segments, reads), [], [], 0, device)


def _check(starts: Ints, writes: Ints, seq_segments: Ints, reads: Ints) -> None:
    lengths = np.diff(starts)
    assert len(writes) == len(lengths) == seq_segments[-1], "writes: one slot a segment"
    assert len(seq_segments) == len(reads) + 1, "seq_segments: one more than reads"
    assert (lengths > 0).all(), "a segment is empty"


def _check_rows(
    slots: Ints, counts: Ints, writes: Ints, seq_segments: Ints, reads: Ints, num_decodes: int
) -> None:
    has_rows = slots >= 0
    assert len(slots) == len(counts) == len(reads), "rows: one slot and count a sequence"
    assert len(np.unique(slots[has_rows])) == has_rows.sum(), "two sequences have one row slot"
    prompts = np.flatnonzero(has_rows[num_decodes:]) + num_decodes
    assert (counts[prompts] == 0).all(), "a prompt's tokens follow rows"
    assert (np.diff(seq_segments)[prompts] == 1).all(), "a prompt with rows has several segments"
    assert (writes[seq_segments[prompts]] == -1).all(), "a prompt with rows writes a state"
    written = writes[writes >= 0]
    for seq in np.flatnonzero(has_rows & np.isin(reads, written)):
        is_own = seq < num_decodes and writes[seq] == reads[seq]
        is_own = is_own and (reads == reads[seq]).sum() == 1
        assert is_own, "a base that is read is written"


def _on_device(
    of_segments: tuple[Ints, Ints, Ints, Ints],
    of_tiles: list[Ints],
    of_rows: list[Ints],
    num_decodes: int,
    device: torch.device | str,
) -> Segments:
    starts, _, seq_segments, reads = of_segments
    parts = _to_device([*of_segments, *of_tiles, *of_rows], torch.device(device))
    tiles, end_tiles = None, 4 + len(of_tiles)
    if of_tiles:
        tiles = TileList(parts[4], parts[5], parts[6], parts[7], make_rounds(of_tiles[3]))
        if len(of_tiles) > 4:
            tiles = replace(tiles, row_slots=parts[8], first_rows=parts[9])
    return Segments(
        parts[0],
        parts[1],
        parts[2],
        parts[3],
        num_decodes=num_decodes,
        num_seqs=len(reads),
        max_tokens=int(np.diff(starts[seq_segments]).max(initial=0)),
        tiles=tiles,
        rows=RowUse.of_step(parts[end_tiles:], of_rows[-1]) if of_rows else None,
    )


def _cut(starts: Ints, writes: Ints, seq_segments: Ints, num_decodes: int) -> list[Ints]:
    """Return starts, ends, writes and seq_tiles of a TileList."""
    first = seq_segments[num_decodes]
    begins, ends = starts[first:-1], starts[first + 1 :]
    counts = -(-(ends - begins) // TILE)
    firsts = np.concatenate(([0], np.cumsum(counts)))  # first tile of each segment
    tile_segments = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(firsts[-1]) - firsts[tile_segments]
    tile_starts = begins[tile_segments] + TILE * within
    tile_ends = np.minimum(tile_starts + TILE, ends[tile_segments])
    is_last = tile_ends == ends[tile_segments]
    tile_writes = np.where(is_last, writes[first:][tile_segments], -1)
    return [tile_starts, tile_ends, tile_writes, firsts[seq_segments[num_decodes:] - first]]


def make_rounds(seq_tiles: Ints, most: int = ROUND_TILES) -> tuple[Round, ...]:
    """Cut the sequences into rounds of at most `most` tiles each, or of one sequence.

    >>> [tuple(found) for found in make_rounds(np.array([0, 2, 3, 9, 10]), 4)]
    [(0, 2, 0, 3), (2, 1, 3, 6), (3, 1, 9, 1)]
    """
    rounds = []
    first, num_seqs = 0, len(seq_tiles) - 1
    while first < num_seqs:
        end = int(np.searchsorted(seq_tiles, seq_tiles[first] + most, side="right")) - 1
        end = max(min(end, num_seqs), first + 1)
        start_tile, end_tile = int(seq_tiles[first]), int(seq_tiles[end])
        rounds.append(Round(first, end - first, start_tile, end_tile - start_tile))
        first = end
    return tuple(rounds)


def _tile_rows(slots: Ints, tile_starts: Ints, seq_tiles: Ints) -> list[Ints]:
    """Return row_slots and first_rows of a TileList; slots: those of its sequences."""
    num_tiles = np.diff(seq_tiles)
    return [
        np.repeat(slots, num_tiles),
        tile_starts - np.repeat(tile_starts[seq_tiles[:-1]], num_tiles),
    ]


def _to_device(arrays: list[Ints], device: torch.device) -> list[Tensor]:
    """Copy the arrays in one piece. On a GPU each begins at a multiple of 16 bytes: Triton compiles
    a kernel anew for every combination of aligned and other pointers."""
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int32)) for array in arrays]
    lengths = [len(array) for array in arrays]
    padding = [-length % ALIGNED for length in lengths]
    rooms = [np.pad(array, (0, more)) for array, more in zip(arrays, padding, strict=True)]
    whole = torch.from_numpy(np.concatenate(rooms).astype(np.int32, copy=False)).pin_memory()
    parts = torch.split(whole.to(device, non_blocking=True), [len(room) for room in rooms])
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]
