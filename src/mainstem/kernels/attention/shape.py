"""What plans of span attention depend on besides the spans: heads, pages, programs and tiles.

    Shape(group=4, kv_heads=8, page_size=16, num_programs=264, tiles=HOPPER_SPLIT)

is Llama-8B on one H200: a small unit has 4 of the 8 KV heads (`fold`). For each it has the 4 query
heads of at most 4 tokens, and reads 16 keys in a step of its loop.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.kernels.attention.tuning import Tiles, for_rounded_pages, hopper_tiles

Floats = NDArray[np.float64]

STRETCH_KEYS = 32  # stretches of small spans are multiples of this, of pages and of a step's keys
LEAST_ROWS = LEAST_KEYS = 16  # the fewest that a matrix instruction takes
MOST_SMALL_ROWS = 32
FOLDS = (1, 2, 4, 8)

ROUNDED_DIMS = (64, 128)  # head dims of which Hopper's kernels read pages in fp8


class UnitKind(NamedTuple):
    """What all units of a kind have in common."""

    rows: int  # maximum rows of a unit, for each of its KV heads
    units: int  # of a piece
    slots: int  # units that run at once
    stretch: int  # stretches are multiples of this number of keys
    step: int  # keys in a step of the loop
    us: float  # fixed time of a unit
    key_us: float  # time of a key, in all KV heads of a unit

    def unit_us(self, keys: Floats) -> Floats:
        """How long units of `keys` take if no other unit uses the memory."""
        us: Floats = np.ceil(keys / self.step)
        us *= self.step * self.key_us
        us += self.us
        return us


@dataclass(frozen=True)
class Shape:
    group: int  # query heads per KV head
    kv_heads: int
    page_size: int
    num_programs: int
    tiles: Tiles
    fixed_stretch: int | None = None  # deterministic: cut at multiples of this
    can_cut: bool = True  # False: no span is cut, which leaves the fewest Partials
    max_partials: int | None = None  # cuts with more are taken only if there is no other
    has_windows: bool = False  # plans have the first key of each query

    def __post_init__(self) -> None:
        if self.tiles.is_split and self.num_programs % self.tiles.programs_per_sm:
            raise ValueError(
                f"num_programs must be a multiple of {self.tiles.programs_per_sm}, "
                f"got {self.num_programs}"
            )

    @cached_property
    def fold(self) -> int:
        """KV heads of a small unit: the largest of `FOLDS` that divides `kv_heads` and fits in a
        tile, by keys x heads (`small_k`) and by rows. Each head has the keys of a page in it; with
        `divides_pages`, the fewest keys that a matrix instruction takes.
        """
        keys = LEAST_KEYS if self.tiles.divides_pages else self.page_size
        most = min(
            self.tiles.small_k // keys, (self.tiles.small_q or MOST_SMALL_ROWS) // self.group
        )
        return max((fold for fold in FOLDS if fold <= most and not self.kv_heads % fold), default=1)

    @cached_property
    def small_q(self) -> int:
        """Rows of the small tile: those of one token in all heads of a unit, up to 32, rounded up
        to a power of two; at least `tiles.small_q`, or 16 without it.
        """
        rows = min(self.group * self.fold, MOST_SMALL_ROWS)
        return max(self.tiles.small_q or LEAST_ROWS, 1 << (rows - 1).bit_length())

    @cached_property
    def splits(self) -> int:
        """Into how many parts a KV head's keys in a small tile are split; each has its own softmax.
        More than 1 only on Hopper, if the tile has more rows than one token needs.
        """
        times = self.small_q // (self.fold * max(self.group, LEAST_ROWS))
        return 1 << (times.bit_length() - 1) if self.tiles.is_split and times else 1

    @cached_property
    def has_whole_pages(self) -> bool:
        """Whether the keys that a warp of Hopper's small tile takes are in one page, so that they
        have one scale."""
        return self.tiles.small_k // (self.fold * self.splits) <= self.page_size

    @cached_property
    def small_rows(self) -> int:
        """A span with at most this many rows of each KV head is always small: those of one token,
        or more if the smallest tile has room for them.
        """
        return min(max(self.group, LEAST_ROWS // self.fold), self.small.rows)

    @cached_property
    def large(self) -> UnitKind:
        tiles, pace = self.tiles, self.tiles.pace
        return UnitKind(
            rows=tiles.large_q,
            units=self.kv_heads,
            # A large unit takes a whole multiprocessor if large units have their own kernel.
            slots=self.num_programs // (tiles.programs_per_sm if tiles.is_split else 1),
            stretch=max(tiles.large_k, self.page_size),
            step=tiles.large_k,
            us=pace.large_us,
            key_us=pace.large_key_us,
        )

    @cached_property
    def small(self) -> UnitKind:
        step, pace = self.tiles.small_k // self.fold, self.tiles.pace
        return UnitKind(
            rows=self.small_q // (self.fold * self.splits),
            units=self.kv_heads // self.fold,
            slots=self.num_programs,
            stretch=max(step, self.page_size, STRETCH_KEYS),
            step=step,
            us=pace.small_us,
            key_us=pace.small_key_us * self.fold,
        )


def tiles_for_rounded(
    tiles: Tiles, group: int, kv_heads: int, head_dim: int, page_size: int
) -> Tiles:
    """The tiles for pages in fp8 in place of split ones. Hopper's own kernels read them if a warp
    has keys of one page in each tile (`Shape.has_whole_pages`): true for groups of at most 16 query
    heads. Otherwise the portable kernel reads them.
    """
    rounded = for_rounded_pages(tiles)
    shape = Shape(group, kv_heads, page_size, rounded.programs_per_sm, rounded)
    if head_dim in ROUNDED_DIMS and shape.has_whole_pages:
        return rounded
    return hopper_tiles(head_dim)
