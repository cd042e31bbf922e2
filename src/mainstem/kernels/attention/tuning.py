"""Tile shapes of the span attention kernel per card, and the numbers by which its planner decides,
as measured; see docs/log/kernels.md for the runs. `mainstem calibrate` fits the numbers of a card
that nobody tuned.

Small and large units live in one kernel and share its warps and registers, so a choice is one
record. Hopper has a kernel of its own for each kind (`hopper/`).
"""

import logging
import math
from dataclasses import asdict, dataclass, replace

import torch

from mainstem.core.calibrated import Calibrated, Values, complete

MAY_BE_ZERO = {"yields", "late_us", "apart", "merge_us", "launch_us"}

log = logging.getLogger("mainstem.kernels")


@dataclass(frozen=True, slots=True)
class Pace:
    """What the planner knows of a card: how long units take. Measured values are in
    microseconds; the defaults are not, since only ratios matter.
    """

    large_us: float = 500.0  # fixed time of a large unit
    large_key_us: float = 0.9
    small_us: float = 90.0
    small_key_us: float = 1.0  # of a key of one KV head
    reads: float = math.inf  # keys of one KV head that memory delivers in a microsecond
    yields: float = 0.0  # large units' share of the delay if bandwidth is short
    late_us: float = 0.0  # delay of small units that follow large ones
    beside: float = 1.0  # small units' speed while large ones run, for `assign.py`; 1: undisturbed
    least_speed: float = 0.15  # beside large units, small ones keep this share of their fair speed
    apart: float = 0.35  # end times of programs differ by this share of the longest small unit
    merge_us: float = 0.0  # of one head's Partial
    launch_us: float = 0.0  # of one more kernel: that of large units, or the merge

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_right = isinstance(value, int | float) and value >= 0.0
            if not is_right or (value == 0.0 and name not in MAY_BE_ZERO):
                raise ValueError(f"{name} must be a number above 0 (some may be 0), got {value}")
            if value == math.inf and name != "reads":
                raise ValueError(f"{name} must be finite, got {value}")


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one compiled kernel cuts its work. Rows are query tokens x the heads of one KV head."""

    small_stages: int  # steps of the small tile's loop in flight
    large_q: int  # rows of the large tile: shared prefixes and prompt chunks
    large_k: int  # keys per step of its loop
    large_stages: int
    num_warps: int
    programs_per_sm: int  # at most as many as fit, since all programs must run at once
    max_registers: int | None = None
    pace: Pace = Pace()
    small_q: int | None = None  # rows of the small tile; None: as many as a token needs
    small_k: int = 64  # keys x KV heads per step of its loop; a page's keys, if more
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
    """Tiles of another head_dim than 128. Bytes are read and merged at the rate for 128."""
    share = head_dim / 128
    pace = replace(
        HOPPER_SPLIT.pace, large_key_us=large_key_us, small_key_us=small_key_us,
        reads=HOPPER_SPLIT.pace.reads / share, merge_us=HOPPER_SPLIT.pace.merge_us * share,
    )  # fmt: skip
    return replace(HOPPER_SPLIT, small_stages=stages, pace=pace)


def _wide(tiles: Tiles) -> Tiles:
    """Tiles of head_dim 256: K and V of the same keys take twice the room, queries and sums twice
    the registers. A multiprocessor has room for one program of small units, so it neither reads nor
    computes while this program writes its rows.
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


# Times a large unit's time for a key in 16 bits. 64 keys take 0.9 us if one group of warps has rows
# and 1.2 us if both have; with 1.25 plans are fastest (docs/log/gpu.md).
ROUNDED_KEY = 1.25


def for_rounded_pages(tiles: Tiles) -> Tiles:
    """Split tiles for pages in fp8: half of the bytes a key. Large units keep tiles in 16 bits,
    too, so theirs are smaller."""
    pace = replace(
        tiles.pace, large_key_us=ROUNDED_KEY * tiles.pace.large_key_us, reads=2.0 * tiles.pace.reads
    )
    stages = tiles.small_stages + 1
    return replace(tiles, small_stages=stages, large_k=64, large_stages=3, pace=pace)


TUNED_CARD = "NVIDIA H200"  # the paces of split tiles were measured on it
MOST_TUNED_DIM = 128
MOST_WIDE_DIM = 256
# Not tuned: it fits into the 99 KB of shared memory of consumer cards, one program per SM.
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
# Heads of 512: on Hopper two stages of 32 keys are 128 KB, and 32 rows of sums 64 registers a
# thread. Not tuned.
HOPPER_VERY_WIDE_HEADS = Tiles(
    small_stages=1, large_q=32, large_k=32, large_stages=2, num_warps=8, programs_per_sm=1,
    small_k=32,
)  # fmt: skip
FALLBACK_VERY_WIDE_HEADS = Tiles(
    small_stages=1, large_q=16, large_k=16, large_stages=1, num_warps=8, programs_per_sm=1,
    small_k=16,
)  # fmt: skip
# fp32 is for checking. It does not use tensor cores, so tiles are small.
WIDE_ELEMENTS = Tiles(
    small_stages=1, large_q=16, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)
WIDE_ELEMENTS_WIDE_HEADS = replace(WIDE_ELEMENTS, num_warps=8, small_k=16)
WIDE_ELEMENTS_VERY_WIDE_HEADS = replace(WIDE_ELEMENTS_WIDE_HEADS, large_k=16)
INTERPRETER = Tiles(
    small_stages=1, large_q=32, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)
_WIDE_ELEMENTS = (WIDE_ELEMENTS, WIDE_ELEMENTS_WIDE_HEADS, WIDE_ELEMENTS_VERY_WIDE_HEADS)
_FALLBACK = (FALLBACK, FALLBACK_WIDE_HEADS, FALLBACK_VERY_WIDE_HEADS)


def choose_tiles(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, can_split: bool
) -> Tiles:
    """The tuned record of a card, or one that fits any card. `can_split` is false for deterministic
    rows, which Hopper's own kernels do not support. Those rows have one tile shape, chosen for
    decodes, which would waste most of a tile of 128 rows.
    """
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        return _by_width(head_dim, *_WIDE_ELEMENTS)
    if _is_hopper(device):
        if can_split and head_dim in SPLIT_TILES:
            return SPLIT_TILES[head_dim]
        return hopper_tiles(head_dim)
    return _by_width(head_dim, *_FALLBACK)


def expands_rounded(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether prompts over rounded pages may run in Hopper's own kernels (`expanded.py`)."""
    if dtype == torch.float32 or head_dim not in SPLIT_TILES:
        return False
    return device.type != "cpu" and _is_hopper(device)


def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def hopper_tiles(head_dim: int) -> Tiles:
    """The tiles of Hopper for the portable kernel."""
    return _by_width(head_dim, HOPPER, HOPPER_WIDE_HEADS, HOPPER_VERY_WIDE_HEADS)


def _by_width(head_dim: int, usual: Tiles, wide: Tiles, very_wide: Tiles) -> Tiles:
    if head_dim <= MOST_TUNED_DIM:
        return usual
    return wide if head_dim <= MOST_WIDE_DIM else very_wide


def _tiles_of(values: Values) -> Tiles:
    return complete(Tiles, {**values, "pace": complete(Pace, values["pace"])})


# Tiles with their fitted paces, by `fitted_name`.
FITTED = Calibrated("paces.json", _tiles_of)


def fitted_name(device_name: str, head_dim: int) -> str:
    return f"{device_name}, head_dim {head_dim}"


def with_fitted_pace(tiles: Tiles, device: torch.device, head_dim: int) -> Tiles:
    """The tiles, with the pace that `mainstem calibrate` fitted for them if there is one and nobody
    tuned this card. A pace that was fitted for other tiles is not used.
    """
    device_name = torch.cuda.get_device_name(device)
    name = fitted_name(device_name, head_dim)
    fitted = None if device_name == TUNED_CARD else FITTED.load().get(name)
    if fitted is None:
        return tiles
    if replace(fitted, pace=tiles.pace) != tiles:
        log.warning(
            "attention is planned by built-in constants: those of %s in %s were fitted for other "
            "tiles; run `mainstem calibrate` again", name, FITTED.path,
        )  # fmt: skip
        return tiles
    return fitted
