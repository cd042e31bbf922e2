"""Random numbers that depend only on (seed, index): there is no state, and order and batch have no
effect."""

import numpy as np

from mainstem.core.step import Int32s, Int64s

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(seeds: Int64s, indices: Int64s) -> Int64s:
    """A well-mixed 64-bit number for each pair (the finaliser of SplitMix64, applied twice)."""
    with np.errstate(over="ignore"):
        x = _finalise(seeds.astype(np.uint64) + _GOLDEN)
        x = _finalise(x ^ (indices.astype(np.uint64) * _GOLDEN + _GOLDEN))
    return x.astype(np.int64)


def noise_keys(seeds: Int64s, indices: Int32s) -> Int64s:
    """The noise key of an output token's draw, for each pair (seed, output index)."""
    return mix(seeds, indices.astype(np.int64))


def _finalise(
    x: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
