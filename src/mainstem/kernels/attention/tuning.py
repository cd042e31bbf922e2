"""Tile shapes of the span attention kernel per card, and the numbers by which its planner decides,
as measured; see docs/log/kernels.md for the runs.

Small and large units live in one kernel and share its warps and registers, so a choice is one
record. Hopper has a kernel of its own for each kind (`hopper/`).
"""

from dataclasses import dataclass, replace

import torch

from mainstem.kernels.attention.pace import UNTUNED, Pace, saved_paces


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one compiled kernel cuts its work. Rows are query tokens x the heads of one KV head."""

    small_stages: int  # steps of the small tile's loop in flight
    large_q: int  # rows of the large tile: shared prefixes and prompt chunks
    large_k: int  # keys per step of its loop
    large_stages: int
    num_warps: int
    programs_per_sm: int  # as many as fit: all programs must run at once
    max_registers: int | None = None
    pace: Pace = UNTUNED
    small_q: int | None = None  # rows of the small tile; None: as many as a token needs
    small_k: int = 64  # keys x KV heads per step of its loop, or those of one page if that has more
    # Large units run first and take whole multiprocessors; small ones follow as these end.
    is_split: bool = False
    queued_share: float = 0.0  # of small units, for the work queue (`assign.py`)
    divides_pages: bool = False  # a step of a small unit may cover a part of a page


HOPPER = Tiles(
    small_stages=3, large_q=64, large_k=64, large_stages=3,
    num_warps=4, programs_per_sm=2, max_registers=255,
)  # fmt: skip
HOPPER_SPLIT = Tiles(
    small_stages=2, large_q=128, large_k=128, large_stages=3, num_warps=4, programs_per_sm=2,
    small_q=64, is_split=True, queued_share=0.25, divides_pages=True,
    pace=Pace(
        large_us=3.1, large_key_us=0.0108, small_us=0.9, small_key_us=0.0118, reads=9300.0,
        yields=0.2, late_us=4.6, beside=0.6, merge_us=0.0004, launch_us=3.5,
    ),
)  # fmt: skip


def _split(head_dim: int, stages: int, large_key_us: float, small_key_us: float) -> Tiles:
    """Tiles of another head_dim. Bytes are read and merged at the same rate."""
    share = head_dim / 128
    pace = replace(
        HOPPER_SPLIT.pace, large_key_us=large_key_us, small_key_us=small_key_us,
        reads=HOPPER_SPLIT.pace.reads / share, merge_us=HOPPER_SPLIT.pace.merge_us * share,
    )  # fmt: skip
    return replace(HOPPER_SPLIT, small_stages=stages, pace=pace)


def _wide(tiles: Tiles) -> Tiles:
    """K and V of the same keys take twice the room, queries and sums twice the registers. A
    multiprocessor has one program of small units, so it neither reads nor computes while this
    program writes its rows.
    """
    pace = replace(tiles.pace, small_us=6.0, reads=3900.0)
    return replace(tiles, large_k=64, large_stages=2, programs_per_sm=1, pace=pace)


SPLIT_TILES = {  # by head_dim
    64: _split(64, 3, 0.0084, 0.0073),
    80: _split(80, 3, 0.0115, 0.0080),
    96: _split(96, 3, 0.0120, 0.0090),
    128: HOPPER_SPLIT,
    256: _wide(_split(256, 2, 0.0310, 0.0175)),
}
TUNED_CARD = "NVIDIA H200"  # the paces of split tiles were measured on it
MOST_TUNED_DIM = 128
# Only has to fit: 99 KB of shared memory on consumer cards, one program per SM.
FALLBACK = Tiles(
    small_stages=2, large_q=64, large_k=32, large_stages=2, num_warps=4, programs_per_sm=1
)
# Head dimensions beyond 128: K and V of the same keys take twice the room. On Hopper two stages of
# 64 keys are 128 KB, beside 32 KB of queries.
HOPPER_WIDE_HEADS = Tiles(
    small_stages=2, large_q=64, large_k=64, large_stages=2, num_warps=8, programs_per_sm=1
)
FALLBACK_WIDE_HEADS = Tiles(
    small_stages=1, large_q=32, large_k=32, large_stages=1, num_warps=8, programs_per_sm=1
)
# fp32 is for checking: plain arithmetic units, so small tiles.
WIDE_ELEMENTS = Tiles(
    small_stages=1, large_q=16, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)
WIDE_ELEMENTS_WIDE_HEADS = replace(WIDE_ELEMENTS, num_warps=8, small_k=16)
INTERPRETER = Tiles(
    small_stages=1, large_q=32, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)


def choose_tiles(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, can_split: bool
) -> Tiles:
    """The tuned record of a card, or one that fits any card. `can_split` is false for deterministic
    rows, which Hopper's own kernels do not support. Those rows have one tile shape. Decodes decide
    it, since they would waste most of a tile of 128 rows. A card that nobody tuned has the pace
    that `mainstem calibrate` fitted, if it did.
    """
    tiles = built_in_tiles(device, dtype, head_dim, can_split=can_split)
    if device.type == "cpu" or dtype == torch.float32 or not can_split:
        return tiles
    name = torch.cuda.get_device_name(device)
    pace = None if name == TUNED_CARD else saved_paces(name).get(head_dim)
    return tiles if pace is None else replace(tiles, pace=pace)


def built_in_tiles(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, can_split: bool
) -> Tiles:
    """The same without what was fitted."""
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        return WIDE_ELEMENTS if head_dim <= MOST_TUNED_DIM else WIDE_ELEMENTS_WIDE_HEADS
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9:
        if can_split and head_dim in SPLIT_TILES:
            return SPLIT_TILES[head_dim]
        return HOPPER if head_dim <= MOST_TUNED_DIM else HOPPER_WIDE_HEADS
    return FALLBACK if head_dim <= MOST_TUNED_DIM else FALLBACK_WIDE_HEADS
