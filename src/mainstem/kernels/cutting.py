"""How spans are cut into units for the span attention kernel, and what a unit costs. Numpy only."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.tuning import Tiles

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CANDIDATES = (1.5, 1.04, 0.9, 0.75, 0.52, 0.34, 0.26, 0.17)  # unit size over a program's fair share
STRETCH_KEYS = 64  # stretches of small spans are multiples of it
SMALL_TILE_KEYS = 64  # keys x heads in a step of a small unit
LEAST_ROWS = 16  # what a matrix instruction takes
MOST_SMALL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cutting depends on beside the spans."""

    group: int  # query heads per KV head
    kv_heads: int
    page_size: int
    num_programs: int
    tiles: Tiles
    fixed_stretch: int | None = None  # deterministic: cut at multiples of so many keys
    can_cut: bool = True  # otherwise no span is cut: the fewest Partials there can be

    # KV heads of a small unit: as many as make a tile of 64 keys x heads from a page.
    fold: int = field(init=False)
    # Rows of the small tile: those of one token in all heads of a unit, as a power of two, unless
    # the tiles have a number of their own.
    small_q: int = field(init=False)

    @property
    def small_rows(self) -> int:
        """Rows that a small unit has of each of its KV heads, at most: one token's, and more where
        the least tile has room for them.
        """
        return min(max(self.group, LEAST_ROWS // self.fold), self.small_q // self.fold)

    @property
    def num_large_programs(self) -> int:
        """Those that large units are shared out to: programs, or multiprocessors where large units
        take them whole.
        """
        tiles = self.tiles
        return self.num_programs // (tiles.programs_per_sm if tiles.is_split else 1)

    def __post_init__(self) -> None:
        if self.tiles.is_split and self.num_programs % self.tiles.programs_per_sm:
            raise ValueError(
                f"num_programs must be a multiple of {self.tiles.programs_per_sm}, "
                f"got {self.num_programs}"
            )
        most_rows = self.tiles.small_q or MOST_SMALL_ROWS
        fold = 1
        while (
            fold * 2 * self.page_size <= SMALL_TILE_KEYS
            and self.kv_heads % (fold * 2) == 0
            and fold * 2 * self.group <= most_rows
        ):
            fold *= 2
        small_q = self.tiles.small_q or LEAST_ROWS
        while small_q < min(self.group * fold, MOST_SMALL_ROWS):
            small_q *= 2
        object.__setattr__(self, "fold", fold)
        object.__setattr__(self, "small_q", small_q)


@dataclass(frozen=True, slots=True)
class Cut:
    """Per span."""

    stretches: Int64s  # keys of a unit
    parts: Int64s  # stretches
    is_large: Bools
    row_tiles: Int64s
    tile_rows: Int64s


def ceil_div(a: Int64s, b: Int64s | int) -> Int64s:
    return -(-a // b)


def cut_spans(spans: Spans, shape: Shape) -> Cut:
    """Keys per stretch, number of stretches, and tiles of rows, of each span."""
    keys = spans.key_tokens.astype(np.int64)
    rows = np.diff(spans.query_starts).astype(np.int64) * shape.group
    is_large = rows > shape.small_rows
    if shape.fixed_stretch is not None:
        is_large = np.ones(len(keys), np.bool_)
    tile_rows = np.where(is_large, shape.tiles.large_q, shape.small_rows)
    row_tiles = ceil_div(rows, tile_rows)
    stretches = np.maximum(keys, 1)
    if shape.fixed_stretch is not None:
        stretches = np.full(len(keys), shape.fixed_stretch, np.int64)
    elif shape.can_cut:
        stretches = _choose_stretches(keys, row_tiles, is_large, shape)
    parts = np.maximum(ceil_div(keys, stretches), 1)
    return Cut(stretches, parts, is_large, row_tiles, tile_rows)


def key_weight(row_tiles: Int64s, is_large: Bools, shape: Shape) -> Floats:
    """Time per key of a unit: bound by reads where the rows are few, by arithmetic where many share
    them. Where large units have multiprocessors to themselves the two are about the same.
    """
    tiles = shape.tiles
    alone = shape.num_large_programs / shape.num_programs
    large = np.maximum(tiles.large_weight, alone / np.maximum(row_tiles, 1))
    return np.where(is_large, large, float(shape.fold))


def _choose_stretches(keys: Int64s, row_tiles: Int64s, is_large: Bools, shape: Shape) -> Int64s:
    """Keys per unit of each span: short enough that all programs end together, no shorter.

    Where large units take whole multiprocessors, these are counted, and the small units of several
    programs on one as side by side.
    """
    tiles = shape.tiles
    programs = shape.num_large_programs if is_large.any() else shape.num_programs
    beside = programs / shape.num_programs
    work = keys * key_weight(row_tiles, is_large, shape)  # of a span's units, one head each
    work[~is_large] *= beside
    copies = row_tiles * np.where(is_large, shape.kv_heads, shape.kv_heads // shape.fold)
    share = float(work @ copies) / programs
    stretches = np.maximum(keys, 1)
    is_cut = work > share * CANDIDATES[-1]
    if not is_cut.any():
        return stretches
    # All candidates at once: rows are candidates, columns are the spans that one of them would cut.
    targets = share * np.array(CANDIDATES)[:, None]
    units, cost, longest, chosen = [], [], np.zeros(len(targets)), []
    for kind, fixed, tile in (
        (is_large, tiles.large_fixed, max(tiles.large_k, shape.page_size)),
        (~is_large, tiles.small_fixed * beside, STRETCH_KEYS),
    ):
        cut, whole = np.flatnonzero(kind & is_cut), kind & ~is_cut
        if not len(cut):
            units.append(np.full(len(targets), int(copies[whole].sum())))
            cost.append(float(work[kind] @ copies[kind]) + fixed * units[-1])
            continue
        parts = np.maximum(work[cut] // targets, 1.0).astype(np.int64)
        stretch = ceil_div(ceil_div(keys[cut], parts), tile) * tile
        parts = ceil_div(keys[cut], stretch)
        units.append(parts @ copies[cut] + int(copies[whole].sum()))
        cost.append(float(work[kind] @ copies[kind]) + fixed * units[-1])
        longest = np.maximum(longest, (work[cut] / parts).max(axis=1) + fixed)
        chosen.append((cut, stretch))
    ends = [
        _end_of_last(
            (int(u0), int(u1)), (float(c0), float(c1)), float(long), programs, tiles.late_fixed
        )
        for u0, u1, c0, c1, long in zip(*units, *cost, longest, strict=True)
    ]
    best = int(np.argmin(ends))
    for cut, stretch in chosen:
        stretches[cut] = stretch[best]
    return stretches


def _end_of_last(
    units: tuple[int, int], cost: tuple[float, float], longest: float, programs: int, late: float
) -> float:
    """When the last program ends, in the unit of the costs; [large, small] units of mean size.

    Large units go round, small ones fill up what they leave, `late` behind them. Small units alone
    that differ in length end up unevenly, by half of the longest.
    """
    large_size = cost[0] / units[0] if units[0] else 0.0
    small_size = cost[1] / units[1] if units[1] else 0.0
    rounds, more = divmod(units[0], programs)
    low, high = rounds * large_size, (rounds + 1) * large_size
    end = high if more else low
    if units[1]:
        low, high = low + late if rounds else 0.0, high + late
        mean = (low * (programs - more) + high * more + cost[1]) / programs
        best = np.inf
        for load in (low, high):
            level = load + small_size * max(int((mean - load) / small_size), 1)
            while level < best:
                room = (programs - more) * int((level - low) / small_size + 1e-6)
                room += more * max(int((level - high) / small_size + 1e-6), 0)
                if room >= units[1]:
                    best = level
                level += small_size
        end = max(end, best)
    is_uneven = not units[0] and longest > 1.2 * small_size
    return max(end, longest) + (longest / 2 if is_uneven else 0.0)
