"""What plans of span attention depend on besides the spans: heads, pages, programs and tiles.

    Shape(group=4, kv_heads=8, page_size=16, num_programs=264, tiles=HOPPER_SPLIT)

is Llama-8B on one H200: a small unit has 4 of the 8 KV heads (`fold`), with one token's 4 query
heads and 16 keys of each in a step.
"""

from dataclasses import dataclass
from functools import cached_property

from mainstem.kernels.attention.tuning import Tiles

STRETCH_KEYS = 32  # stretches of small spans are multiples of this, of pages and of a step's keys
LEAST_ROWS = LEAST_KEYS = 16  # what a matrix instruction takes
MOST_SMALL_ROWS = 32
FOLDS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Shape:
    group: int  # query heads per KV head
    kv_heads: int
    page_size: int
    num_programs: int
    tiles: Tiles
    fixed_stretch: int | None = None  # deterministic: cut at multiples of this
    can_cut: bool = True  # False: no span is cut, which leaves the fewest Partials
    max_partials: int | None = None  # cuts with more are left out, if there is another cut
    has_windows: bool = False  # plans say from which key on each query sees

    def __post_init__(self) -> None:
        if self.tiles.is_split and self.num_programs % self.tiles.programs_per_sm:
            raise ValueError(
                f"num_programs must be a multiple of {self.tiles.programs_per_sm}, "
                f"got {self.num_programs}"
            )

    @cached_property
    def fold(self) -> int:
        """KV heads of a small unit: as many as fit in a tile of `small_k` keys x heads, with the
        keys of a page, or with the fewest keys that a matrix instruction takes.
        """
        keys = LEAST_KEYS if self.tiles.divides_pages else self.page_size
        most = min(
            self.tiles.small_k // keys, (self.tiles.small_q or MOST_SMALL_ROWS) // self.group
        )
        return max((fold for fold in FOLDS if fold <= most and not self.kv_heads % fold), default=1)

    @cached_property
    def small_q(self) -> int:
        """Rows of the small tile: `tiles.small_q`, or those of one token in all heads of a unit,
        rounded up to a power of two.
        """
        rows = min(self.group * self.fold, MOST_SMALL_ROWS)
        return max(self.tiles.small_q or LEAST_ROWS, 1 << (rows - 1).bit_length())

    @cached_property
    def splits(self) -> int:
        """Parts of a KV head's keys in a small tile that have a softmax each, if the tile has more
        rows than one token needs (Hopper).
        """
        times = self.small_q // (self.fold * max(self.group, LEAST_ROWS))
        return 1 << (times.bit_length() - 1) if self.tiles.is_split and times else 1

    @cached_property
    def most_small_rows(self) -> int:
        """Most rows of a small unit, of each of its KV heads."""
        return self.small_q // (self.fold * self.splits)

    @cached_property
    def small_rows(self) -> int:
        """Rows of each KV head up to which a span is always small: one token's, or more if the
        least tile has room for them.
        """
        return min(max(self.group, LEAST_ROWS // self.fold), self.most_small_rows)

    @cached_property
    def num_large_programs(self) -> int:
        """Slots of large units: programs, or multiprocessors if a large unit takes a whole one."""
        return self.num_programs // (self.tiles.programs_per_sm if self.tiles.is_split else 1)

    def units(self, is_large: bool) -> int:
        """Units of a tile of rows over one stretch, for all KV heads."""
        return self.kv_heads if is_large else self.kv_heads // self.fold

    def stretch_tile(self, is_large: bool) -> int:
        """Stretches are multiples of this number of keys."""
        if is_large:
            return max(self.tiles.large_k, self.page_size)
        return max(self.tiles.small_k // self.fold, self.page_size, STRETCH_KEYS)
