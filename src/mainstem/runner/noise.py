"""Draws tokens on a CPU. Noise decides: 32 bits made from (noise key, token id), as in
`kernels/sampling/noise.py`.

A draw takes the token with the largest score - log(E): score is its logit / temperature, E is its
own exponential random number (Gumbel-max). Each token has its own noise. So if scores have errors
of at most d, the chosen token changes with a probability of at most 2 d, for any size of the
vocabulary.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from mainstem.core.step import Float32s, Int64s

UInt32s = NDArray[np.uint32]

_MIX_1, _MIX_2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)  # lowbias32, github.com/skeeto
_LOG_2 = 0.6931471805599453
_EXPONENT_STEPS = 2**23  # a float32's bits divided by this are nearly its log2, plus 127
_BOUND_BASE = _LOG_2 * (127 + 32)
_SLACK = 1e-3  # for rounding of sums in float32
_FEW = 1024  # up to this many tokens logarithms are cheap


def draw(logits: Float32s, temperature: Float32s, min_p: Float32s, keys: Int64s) -> Int64s:
    """Draw one token per row of logits [rows, vocab], without top_k and top_p; any token if logits
    are NaN."""
    rows, vocab = logits.shape
    mixed = _mixed_ids(vocab)
    bits, spare = np.empty((2, vocab), np.uint32)
    scores, token_ids = np.empty(vocab, np.float32), np.zeros(rows, np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0), inf - inf
        lowest, scale = np.log(min_p), np.float32(1.0) / temperature
        for row in range(rows):
            np.subtract(logits[row], logits[row].max(), out=scores)
            scores *= scale[row]
            if lowest[row] > -np.inf:
                ids = np.flatnonzero(scores >= lowest[row])
                if len(ids):
                    noise = bits_of(keys[row : row + 1], ids[None], vocab)
                    token_ids[row] = ids[pick(scores[None, ids], noise)[0]]
            else:
                _key(mixed, keys[row : row + 1], bits, spare)
                token_ids[row] = _pick_from_top(scores, bits, spare.view(np.float32))
    return token_ids


def bits_of(keys: Int64s, token_ids: Int64s, vocab: int) -> UInt32s:
    """The noise of tokens [rows, n] under keys [rows], evenly spread over 32 bits."""
    bits = _mixed_ids(vocab)[token_ids]
    _key(bits, keys[:, None], bits, np.empty_like(bits))
    return bits


def pick(scores: Float32s, bits: UInt32s) -> Int64s:
    """The index in each row [rows, n] where score - log(E) is largest; any index if NaN."""
    if scores.shape[1] <= _FEW:
        places: Int64s = (scores + gumbel(bits)).argmax(axis=1)
        return places
    bound = np.empty(scores.shape[1], np.float32)
    rows = zip(scores, bits, strict=True)
    return np.array([_pick_from_top(row, row_bits, bound) for row, row_bits in rows])


def gumbel(bits: UInt32s) -> NDArray[np.float64]:
    """Return -log(E) for E = -log(1 - v). The bits select a step of (0, 1), and v is its middle."""
    v = (bits.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise


def _pick_from_top(scores: Float32s, bits: UInt32s, bound: Float32s) -> int:
    """Like `pick`, for one row. Few tokens come near the winner, so `bound` is filled with upper
    bounds of the noisy scores, and exact scores are computed in descending order of the bounds."""
    _fill_bounds(scores, bits, bound)
    best, best_place = -np.inf, 0
    while float(bound.max()) + _BOUND_BASE > best - _SLACK:  # false for NaN
        place = int(bound.argmax())
        exact = float(scores[place]) + float(gumbel(bits[place : place + 1])[0])
        if exact > best or (exact == best and place < best_place):
            best, best_place = exact, place
        bound[place] = -np.inf
    return best_place


def _fill_bounds(scores: Float32s, bits: UInt32s, bound: Float32s) -> None:
    """Compute upper bounds of score - log(E), minus _BOUND_BASE, without a logarithm. E is at least
    v, and log2 is at least the straight line between powers of two. A float's bits give that line.
    """
    bound[:] = bits
    bound[:] = bound.view(np.int32)
    bound *= np.float32(-_LOG_2 / _EXPONENT_STEPS)
    bound += scores


def _key(mixed: UInt32s, keys: Int64s, out: UInt32s, spare: UInt32s) -> None:
    """Do the second round of mixing. Half of the key is mixed in before it, the other half within
    it."""
    np.bitwise_xor(mixed, keys.astype(np.uint32), out=out)
    out ^= np.right_shift(out, 16, out=spare)
    out *= _MIX_1
    out += (keys >> 32).astype(np.uint32)
    out ^= np.right_shift(out, 15, out=spare)
    out *= _MIX_2
    out ^= np.right_shift(out, 16, out=spare)


@cache
def _mixed_ids(vocab: int) -> UInt32s:
    """A round of mixing for each id: it does not depend on the key, so it is computed once."""
    x: UInt32s = np.arange(vocab, dtype=np.uint32)
    x = (x ^ x >> np.uint32(16)) * _MIX_1
    x = (x ^ x >> np.uint32(15)) * _MIX_2
    return x ^ x >> np.uint32(16)
