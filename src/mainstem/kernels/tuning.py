"""Tile shapes of the span attention kernel per card, as measured; see docs/log/kernels.md for the
runs.

Small and large units live in one kernel and share its warps and registers, so a choice is one
record. Hopper has a kernel of its own for each kind (`hopper_large.py`, `hopper_small.py`).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one compiled kernel cuts its work. Rows are query tokens x the heads of one KV head."""

    small_stages: int  # steps of the small tile's loop in flight
    large_q: int  # rows of the large tile: shared prefixes and prompt chunks
    large_k: int  # keys per step of its loop
    large_stages: int
    num_warps: int
    programs_per_sm: int  # as many as fit: shares are cut for programs that all run at once
    max_registers: int | None = None
    # Times, in those of a small unit for a key of one KV head while all programs read.
    large_weight: float = 0.8  # of a large unit for a key
    small_fixed: float = 90.0  # of a unit beside its keys
    large_fixed: float = 500.0
    small_q: int | None = None  # rows of the small tile; None: as many as a token needs
    # Large units run ahead and take whole multiprocessors; small ones follow as these end, ...
    is_split: bool = False
    late_fixed: float = 0.0  # ... and have read their first keys so much later


HOPPER = Tiles(
    small_stages=3, large_q=64, large_k=64, large_stages=3,
    num_warps=4, programs_per_sm=2, max_registers=255,
)  # fmt: skip
HOPPER_SPLIT = Tiles(
    small_stages=2, large_q=128, large_k=128, large_stages=3, num_warps=4, programs_per_sm=2,
    large_weight=0.5, small_fixed=80.0, large_fixed=60.0, small_q=64, is_split=True,
    late_fixed=150.0,
)  # fmt: skip
SPLIT_HEAD_DIMS = (64, 128)
# Only has to fit: 99 KB of shared memory on consumer cards, one program per SM.
FALLBACK = Tiles(
    small_stages=2, large_q=64, large_k=32, large_stages=2, num_warps=4, programs_per_sm=1
)
# fp32 is for checking: plain arithmetic units, so small tiles.
WIDE_ELEMENTS = Tiles(
    small_stages=1, large_q=16, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)
INTERPRETER = Tiles(
    small_stages=1, large_q=32, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)


def choose_tiles(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, is_deterministic: bool
) -> Tiles:
    """The tuned record of a card, or one that fits any. Deterministic rows have one tile shape, so
    decodes, which would waste most of a tile of 128 rows, decide it.
    """
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        return WIDE_ELEMENTS
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9:
        return HOPPER_SPLIT if head_dim in SPLIT_HEAD_DIMS and not is_deterministic else HOPPER
    return FALLBACK


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may begin before the one ahead of it has ended (from Hopper on)."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
