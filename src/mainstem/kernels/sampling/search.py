# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Finds, without sorting, where a running sum over tokens, likeliest first, passes a target.

The sum over all tokens above a threshold does not depend on their order, so the threshold is
searched: each pass over the tokens reduces the interval around it to a quarter.

Keys and masses are whole numbers, so a sum has the same bits in any order:

    key   log2 of the probability relative to the likeliest token, in steps of 2^-25, 0 at most
    mass  the probability relative to the likeliest token, in steps of 2^-44

`top` is the row's largest logit, `scale` is log2(e) / temperature. Tokens less likely than `min_p`
times the likeliest have no mass. Kernels of `sample.py` call these functions with all threads of
one program.
"""

import triton
import triton.language as tl

KEY_STEPS = tl.constexpr(33554432.0)  # 2^25
LOWEST = tl.constexpr(-46.0)  # below 2^-44 a token has no mass
LOWEST_KEY = tl.constexpr(-46 * 2**25)
MASS_STEPS = tl.constexpr(17592186044416.0)  # 2^44: nearly 2^19 tokens fit in 63 bits
NO_KEY = tl.constexpr(2147483647)
MAX_ROUNDS = tl.constexpr(32)  # 16 are enough; the limit ends the search in a row of NaN


@triton.jit
def key_of(x, top, scale):
    return (tl.maximum((x - top) * scale, LOWEST) * KEY_STEPS).to(tl.int32)


@triton.jit
def keys_at(x_ptr, places, size, top, scale):
    x = tl.load(x_ptr + places, mask=places < size, other=float("-inf"))
    return key_of(x.to(tl.float32), top, scale)


@triton.jit
def mass_of(key, min_p):
    weight = tl.exp2(key.to(tl.float32) * (1.0 / KEY_STEPS))
    return tl.where(weight >= min_p, (weight * MASS_STEPS).to(tl.int64), 0)


@triton.jit
def mass_above(x_ptr, size, top, scale, min_p, key, BLOCK: tl.constexpr):
    """Return the mass of all tokens with larger keys."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        keys = keys_at(x_ptr, start + lanes, size, top, scale)
        total += tl.where(keys > key, mass_of(keys, min_p), 0)
    return tl.sum(total, 0)


@triton.jit
def _search(
    x_ptr, size, top, scale, min_p, target, low, high, above, enough,
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Narrow [low, high) around the key at which the sum over tokens, likeliest first, passes
    `target`, to one key or until at most `enough` tokens are left in it.

    The sum over keys >= low exceeds the target; the sum over keys >= high, `above`, does not.
    Returns low, high, above and the number of tokens in between.
    """
    lanes = tl.arange(0, BLOCK)
    num_in = tl.full([], NO_KEY, tl.int32)
    rounds = tl.zeros([], tl.int32)
    while (high - low > 1) & (num_in > enough) & (rounds < MAX_ROUNDS):
        rounds += 1
        span = high - low
        step = tl.maximum(span // 4, 1)
        # until a lower bound of the keys is known, search near the top
        is_open = (low == LOWEST_KEY) & (span > 64)
        key_1 = tl.where(is_open, high - span // 2, low + step)
        key_2 = tl.where(is_open, high - span // 8, low + 2 * step)
        key_3 = tl.where(is_open, high - span // 32, low + 3 * step)
        sums = tl.zeros([BLOCK], tl.int64)
        sum_1, sum_2, sum_3 = sums, sums, sums
        counts = tl.zeros([BLOCK], tl.int32)
        count_0, count_1, count_2, count_3 = counts, counts, counts, counts
        least = tl.full([BLOCK], NO_KEY, tl.int32)
        most = tl.full([BLOCK], -NO_KEY, tl.int32)
        for start in range(0, size, BLOCK):
            places = start + lanes
            key = keys_at(x_ptr, places, size, top, scale)
            is_in = (places < size) & (key >= low) & (key < high)
            least = tl.minimum(least, tl.where(is_in, key, NO_KEY))
            most = tl.maximum(most, tl.where(is_in, key, -NO_KEY))
            count_0 += is_in.to(tl.int32)
            count_1 += (is_in & (key >= key_1)).to(tl.int32)
            count_2 += (is_in & (key >= key_2)).to(tl.int32)
            count_3 += (is_in & (key >= key_3)).to(tl.int32)
            if not BY_COUNT:
                mass = tl.where(is_in, mass_of(key, min_p), 0)
                sum_1 += tl.where(key >= key_1, mass, 0)
                sum_2 += tl.where(key >= key_2, mass, 0)
                sum_3 += tl.where(key >= key_3, mass, 0)
        in_0, in_1 = tl.sum(count_0, 0), tl.sum(count_1, 0)
        in_2, in_3 = tl.sum(count_2, 0), tl.sum(count_3, 0)
        if BY_COUNT:
            down_to_1, down_to_2, down_to_3 = above + in_1, above + in_2, above + in_3
        else:
            down_to_1, down_to_2 = above + tl.sum(sum_1, 0), above + tl.sum(sum_2, 0)
            down_to_3 = above + tl.sum(sum_3, 0)
        # all tokens are within these bounds
        low = tl.maximum(low, tl.min(least, 0))
        high = tl.minimum(high, tl.max(most, 0) + 1)
        if down_to_3 > target:
            low, num_in = tl.maximum(low, key_3), in_3
        elif down_to_2 > target:
            low, high, num_in = tl.maximum(low, key_2), tl.minimum(high, key_3), in_2 - in_3
            above = down_to_3
        elif down_to_1 > target:
            low, high, num_in = tl.maximum(low, key_1), tl.minimum(high, key_2), in_1 - in_2
            above = down_to_2
        else:
            high, num_in = tl.minimum(high, key_1), in_0 - in_1
            above = down_to_1
    return low, high, above, num_in


@triton.jit
def _gather(x_ptr, few_ptr, vocab, top, scale, low, high, BLOCK: tl.constexpr):
    """Copy the logits whose keys lie in [low, high)."""
    lanes = tl.arange(0, BLOCK)
    place = tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + lanes
        x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf"))
        key = key_of(x.to(tl.float32), top, scale)
        is_in = (key >= low) & (key < high) & (ids < vocab)
        count = tl.sum(is_in.to(tl.int32), 0)
        if count > 0:
            places = place + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(few_ptr + places, x, mask=is_in)
        place += count
    tl.debug_barrier()  # threads read what others stored


@triton.jit
def find(
    x_ptr, vocab, few_ptr, few, cut, known, top, scale, min_p, target,
    BY_COUNT: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the key at which the sum passes `target`, and the sum over larger keys.

    `known` is the sum over the collected tokens: all tokens that reach `cut`. If the target is
    beyond this sum, the search narrows the row to at most FEW other tokens, which are stored after
    the collected ones in the buffers.
    """
    source, size = few_ptr, few
    low, high = tl.full([], LOWEST_KEY, tl.int32), tl.full([], 1, tl.int32)
    above = tl.zeros([], tl.int64)
    if target >= known:
        low, high, above, num_in = _search(
            x_ptr, vocab, top, scale, min_p, target, low, tl.minimum(cut, 1), known, FEW,
            BY_COUNT, BLOCK,
        )  # fmt: skip
        source, size = x_ptr, vocab
        if num_in <= FEW:  # otherwise too many tokens have the same key
            source, size = few_ptr + FEW, num_in
            _gather(x_ptr, source, vocab, top, scale, low, high, BLOCK)
    low, high, above, _ = _search(
        source, size, top, scale, min_p, target, low, high, above, 0, BY_COUNT, BLOCK
    )
    return low, above
