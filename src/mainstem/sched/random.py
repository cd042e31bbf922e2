"""Random numbers that depend on (seed, index) alone: no state, any order, any batch."""

import numpy as np

from mainstem.core.step import Float32s, Int32s, Int64s

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(seeds: Int64s, indices: Int64s) -> Int64s:
    """A well-mixed 64-bit number for each pair (the finaliser of SplitMix64, applied twice)."""
    with np.errstate(over="ignore"):
        x = _finalise(seeds.astype(np.uint64) + _GOLDEN)
        x = _finalise(x ^ (indices.astype(np.uint64) * _GOLDEN + _GOLDEN))
    return x.astype(np.int64)


def uniforms(seeds: Int64s, indices: Int32s) -> Float32s:
    """One number in [0, 1) for each pair."""
    bits = mix(seeds, indices.astype(np.int64)).astype(np.uint64) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


def _finalise(
    x: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
