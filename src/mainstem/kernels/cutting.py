"""How spans are cut into units for the span attention kernel, and what a unit costs. Numpy only."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Spans
from mainstem.kernels.overlap import Costs, Sms
from mainstem.kernels.tuning import Tiles

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CANDIDATES = (
    1.5,
    1.04,
    0.9,
    0.75,
    0.52,
    0.34,
    0.26,
    0.17,
    0.1,
)  # unit size over a program's fair share
LEAST_CUT = 0.3  # of a program's fair share: shorter small spans are not cut
HELD_UP = 0.1  # of the time of the program with the most small units
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
    # Rows of the small tile: those of one token in all heads of a unit, as a power of two.
    small_q: int = field(init=False)

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
    sms: Sms | None  # where multiprocessors take large units whole


def ceil_div(a: Int64s, b: Int64s | int) -> Int64s:
    return -(-a // b)


def cut_spans(spans: Spans, shape: Shape) -> Cut:
    """Keys per stretch, number of stretches, and tiles of rows, of each span."""
    keys = spans.key_tokens.astype(np.int64)
    rows = np.diff(spans.query_starts).astype(np.int64) * shape.group
    small_rows = min(max(shape.group, LEAST_ROWS // shape.fold), shape.small_q // shape.fold)
    is_large = rows > small_rows
    if shape.fixed_stretch is not None:
        is_large = np.ones(len(keys), np.bool_)
    tile_rows = np.where(is_large, shape.tiles.large_q, shape.small_q // shape.fold)
    row_tiles = ceil_div(rows, tile_rows)
    sms = _sms_of(keys[is_large], row_tiles[is_large], shape)
    stretches = np.maximum(keys, 1)
    if shape.fixed_stretch is not None:
        stretches = np.full(len(keys), shape.fixed_stretch, np.int64)
    elif shape.can_cut:
        stretches = _choose_stretches(keys, row_tiles, is_large, shape, sms)
    parts = np.maximum(ceil_div(keys, stretches), 1)
    return Cut(stretches, parts, is_large, row_tiles, tile_rows, sms)


def _sms_of(keys: Int64s, row_tiles: Int64s, shape: Shape) -> Sms | None:
    """As large units will find them: the first row tile of a span reads from memory, the others
    from L2.
    """
    tiles = shape.tiles
    if not tiles.is_split:
        return None
    reads = float(keys.sum()) / max(float(keys @ row_tiles), 1.0)
    return Sms(shape.num_large_programs, tiles.programs_per_sm, tiles.headroom, reads)


def key_weight(row_tiles: Int64s, is_large: Bools, shape: Shape) -> Floats:
    """Time per key of a unit: bound by reads where the rows are few, by arithmetic where many share
    them. Where large units have multiprocessors to themselves the two are about the same.
    """
    tiles = shape.tiles
    alone = shape.num_large_programs / shape.num_programs
    large = np.maximum(tiles.large_weight, alone / np.maximum(row_tiles, 1))
    return np.where(is_large, large, float(shape.fold))


def _choose_stretches(
    keys: Int64s, row_tiles: Int64s, is_large: Bools, shape: Shape, sms: Sms | None
) -> Int64s:
    """Keys per unit of each span: short enough that all programs end together, no shorter."""
    tiles = shape.tiles
    work = keys * key_weight(row_tiles, is_large, shape)  # of a span's units, one head each
    copies = row_tiles * np.where(is_large, shape.kv_heads, shape.kv_heads // shape.fold)
    large_total, small_total = (float(work[kind] @ copies[kind]) for kind in (is_large, ~is_large))
    share = _fair_share(large_total, small_total, shape)
    stretches = np.maximum(keys, 1)
    is_cut = work > share * np.where(is_large, CANDIDATES[-1], LEAST_CUT)
    if not is_cut.any():
        return stretches
    # All candidates at once: rows are candidates, columns are the spans that one of them would cut.
    targets = share * np.array(CANDIDATES)[:, None]
    costs, chosen = [], []
    for kind, kind_total, fixed, tile in (
        (is_large, large_total, tiles.large_fixed, max(tiles.large_k, shape.page_size)),
        (~is_large, small_total, tiles.small_fixed, STRETCH_KEYS),
    ):
        cut, whole = np.flatnonzero(kind & is_cut), kind & ~is_cut
        units = np.full(len(targets), int(copies[whole].sum()))
        longest = np.full(len(targets), work[whole].max(initial=-fixed) + fixed)
        stretch = np.empty((len(targets), 0), np.int64)
        if len(cut):
            parts = np.maximum(work[cut] // targets, 1.0).astype(np.int64)
            stretch = ceil_div(ceil_div(keys[cut], parts), tile) * tile
            parts = ceil_div(keys[cut], stretch)
            units += parts @ copies[cut]
            longest = np.maximum(longest, (work[cut] / parts).max(axis=1) + fixed)
        costs.append(Costs(units, kind_total + fixed * units, longest))
        chosen.append((cut, stretch))
    large, small = costs
    if sms is None:
        best = [int(np.argmin(_ends_of_last(large, small, shape.num_programs)))] * 2
    else:
        best = _best_of_split(large, small, sms)
    for (cut, stretch), which in zip(chosen, best, strict=True):
        stretches[cut] = stretch[which]
    return stretches


def _fair_share(large: float, small: float, shape: Shape) -> float:
    """What a program has to do, if all end together."""
    if not shape.tiles.is_split:
        return (large + small) / shape.num_programs
    per_sm = shape.tiles.programs_per_sm
    by_time = (large + small / (per_sm * shape.tiles.headroom)) / shape.num_large_programs
    return max(by_time, small / shape.num_programs)


def _best_of_split(large: Costs, small: Costs, sms: Sms) -> list[int]:
    """Which candidate of each kind lets the last program end first, where multiprocessors have
    large units to themselves: the same of both, or small units as long as they may be.

    Who has the most of small units holds the others up a little: towards the end, those that are
    left do not fill the memory's bandwidth.
    """
    count = len(large.units)
    of_large, of_small = (
        np.tile(np.arange(count), 2),
        np.append(np.arange(count), np.zeros(count, int)),
    )
    large = Costs(large.units[of_large], large.total[of_large], large.longest[of_large])
    small = Costs(small.units[of_small], small.total[of_small], small.longest[of_small])
    ends, _ = sms.spread_large(large, small)
    rounds = ceil_div(small.units, sms.count * sms.per_sm)
    most = np.maximum(rounds * small.total / np.maximum(small.units, 1), small.longest)
    best = int(np.argmin(np.maximum(ends, most / sms.headroom) + HELD_UP * most))
    return [int(of_large[best]), int(of_small[best])]


def _ends_of_last(large: Costs, small: Costs, programs: int) -> list[float]:
    """When the last program ends, of each candidate."""
    return [
        _end_of_last((int(u0), int(u1)), (float(c0), float(c1)), (float(l0), float(l1)), programs)
        for u0, u1, c0, c1, l0, l1 in zip(
            large.units, small.units, large.total, small.total, large.longest, small.longest,
            strict=True,
        )
    ]  # fmt: skip


def _end_of_last(
    units: tuple[int, int], cost: tuple[float, float], longest: tuple[float, float], programs: int
) -> float:
    """When the last program ends, in the unit of the costs; [large, small] units of mean size.

    Large units go round, small ones fill up what they leave. Small units alone that differ in
    length end up unevenly, by half of the longest.
    """
    large_size = cost[0] / units[0] if units[0] else 0.0
    small_size = cost[1] / units[1] if units[1] else 0.0
    rounds, more = divmod(units[0], programs)
    low, high = rounds * large_size, (rounds + 1) * large_size
    end = high if more else low
    if units[1]:
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
    is_uneven = not units[0] and longest[1] > 1.2 * small_size
    return max(end, *longest) + (longest[1] / 2 if is_uneven else 0.0)
