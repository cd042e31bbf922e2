# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Noise that decides draws: 32 bits from (noise key, token id), the same as in `runner/noise.py`.

A draw takes the token with the largest  score - log2(E),  where each token has its own
exponential random number E (Gumbel-max). The score is log2 of the token's probability relative to
the likeliest.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
MIX_1, MIX_2 = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)  # lowbias32, github.com/skeeto
STEP = tl.constexpr(2.0**-32)
SMALL = tl.constexpr(0.125)


@triton.jit
def halves_of(keys_ptr, row):
    """A row's noise key as two numbers of 32 bits, low and high."""
    key = tl.load(keys_ptr + row)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def bits_of(low, high, ids):
    """Return the noise of these tokens, uniform over 32 bits. The first round mixes the id. One
    half of the key enters before the second round, the other half within it."""
    x = ids.to(tl.uint32)
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    x = x ^ (x >> 16) ^ low
    x = (x ^ (x >> 16)) * MIX_1 + high
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 16)


@triton.jit
def gumbel_of(bits):
    """Return -log2(E) for E = -log(1 - v). The bits select a step of (0, 1), and v is its middle.

    The smallest E wins, so E must be exact for small v: for these the logarithm is computed as a
    series. 1 - v is computed from the inverted bits, so it is never 0.
    """
    v = (bits.to(tl.float32) + 0.5) * STEP
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * STEP
    series = v * (1 / 7) + 1 / 6
    series = series * v + 1 / 5
    series = series * v + 1 / 4
    series = series * v + 1 / 3
    series = series * v + 1 / 2
    series = series * v * v + v
    return -tl.log2(tl.where(v < SMALL, series, tl.log2(rest) * -LOG_2))


@triton.jit
def noisy_score(x, ids, is_kept, low, high, top, scale, min_bits):
    """Return the value that a draw maximises: log2 of the probability relative to the likeliest
    token, plus noise; -inf for tokens that are not kept or are below `min_bits`.

    `top` is the row's largest logit, `scale` is log2(e) / temperature.
    """
    score = tl.where(x == top, 0.0, (x - top) * scale)  # inf - inf is NaN
    is_kept = is_kept & (score >= min_bits)
    return tl.where(is_kept, score + gumbel_of(bits_of(low, high, ids)), float("-inf"))


@triton.jit
def min_bits_of(min_p):
    """Return log2 of min_p; -inf if it is 0."""
    return tl.where(min_p > 0.0, tl.log2(tl.maximum(min_p, 1e-38)), float("-inf"))
