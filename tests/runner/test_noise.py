"""The noise of draws is uniform, independent and as documented; rounding logits hardly changes
draws."""

import numpy as np
import pytest
from numpy.typing import NDArray

from mainstem.core.step import Float32s, Int64s
from mainstem.runner import noise
from mainstem.sched.random import noise_keys
from mainstem_bench.kernels.samples import some_keys

VOCAB = 16384


def all_bits(keys: Int64s, vocab: int = VOCAB) -> noise.UInt32s:
    return noise.bits_of(keys, np.broadcast_to(np.arange(vocab), (len(keys), vocab)), vocab)


def plain_draws(logits: Float32s, keys: Int64s, temperature: float = 1.0) -> Int64s:
    ones = np.ones(len(logits), np.float32)
    return noise.draw(logits, ones * np.float32(temperature), ones * 0, keys)


def test_the_hash_is_the_documented_one() -> None:
    """lowbias32 of the id; then lowbias32 of that result XOR the key's lower half, with the key's
    upper half added inside."""
    mask = 0xFFFFFFFF

    def mixed(x: int, added: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D + added) & mask
        x = (x ^ x >> 15) * 0x846CA68B & mask
        return x ^ x >> 16

    keys = np.array([0, 1, -1, 2**63 - 1, -(2**63), *some_keys(5)], np.int64)
    found = all_bits(keys, 300)
    for row, key in enumerate(keys.tolist()):
        right = [mixed(mixed(i, 0) ^ key & mask, key >> 32 & mask) for i in range(300)]
        assert found[row].tolist() == right


def pairs(name: str) -> tuple[noise.UInt32s, noise.UInt32s]:
    """2^20 pairs of numbers that must be independent."""
    rows = 2**20 // VOCAB
    ids = np.arange(VOCAB)
    if name == "neighbouring ids":
        bits = all_bits(some_keys(rows))
        return bits, np.roll(bits, 1, axis=1)
    if name == "neighbouring positions":
        return all_bits(some_keys(rows)), all_bits(some_keys(rows + 1)[1:])
    if name == "neighbouring seeds":
        seeds, index = np.arange(rows, dtype=np.int64), np.zeros(rows, np.int32)
        return all_bits(noise_keys(seeds, index)), all_bits(noise_keys(seeds + 1, index))
    if name == "one id, positions apart by one":
        keys = some_keys(2**20 + 1)
        bits = noise.bits_of(keys, np.full((len(keys), 1), 4711), VOCAB)[:, 0]
        return bits[1:], bits[:-1]
    keys = some_keys(2**20)
    bits = noise.bits_of(keys, np.broadcast_to(ids[[17, 18]], (2**20, 2)), VOCAB)
    return bits[:, 0], bits[:, 1]


@pytest.mark.parametrize("shift", [27, 11])
@pytest.mark.parametrize(
    "name",
    ["neighbouring ids", "neighbouring positions", "neighbouring seeds",
     "one id, positions apart by one", "two ids, many positions"],
)  # fmt: skip
def test_noise_is_uniform_and_independent(name: str, shift: int) -> None:
    """Five bits of each number of a pair give 1,024 cells. Chi-square of 1,023 degrees of freedom
    exceeds 1,023 + 2 sqrt(21 x 1,023) + 42 in one case of 10^9 (Laurent and Massart 2000, lemma
    1)."""
    a, b = ((bits.ravel() >> shift & 31).astype(np.int64) for bits in pairs(name))
    found = np.bincount(a * 32 + b, minlength=1024)
    mean = len(a) / 1024
    assert ((found - mean) ** 2 / mean).sum() < 1023 + 2 * (21 * 1023) ** 0.5 + 42


def test_the_ends_of_the_noise_are_finite() -> None:
    low, high = noise.gumbel(np.array([2**32 - 1, 0], np.uint32))
    assert low == pytest.approx(-np.log(33 * np.log(2)))
    assert high == pytest.approx(33 * np.log(2))


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 100.0])
def test_a_draw_is_the_largest_noisy_score(spread: float) -> None:
    """Scores that a bound excludes are not computed; the largest is never excluded."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((40, VOCAB)) * spread).astype(np.float32)
    keys = some_keys(40)
    noisy = logits.astype(np.float64) + noise.gumbel(all_bits(keys))
    assert plain_draws(logits, keys).tolist() == noisy.argmax(axis=1).tolist()
    assert noise.pick(logits, all_bits(keys)).tolist() == noisy.argmax(axis=1).tolist()


def inverted(logits: Float32s, uniform: NDArray[np.float64]) -> Int64s:
    """The token at which the distribution, summed in the order of ids, passes a random number."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    reached = weights.cumsum(axis=1)
    places: Int64s = (reached <= uniform[:, None] * reached[:, -1:]).sum(axis=1)
    return places


def test_rounding_hardly_changes_a_draw() -> None:
    """Logits that are off by at most d change a draw with a probability of at most 2 d: token i is
    drawn both times with a probability of at least e^(-2 d) p_i.

    Here logits are up to 200 and off by 1e-5 of that, so d is 0.002. At most 4 changes are expected
    in 1,000 rows; 20 or more come in one case of 10^8. Inverting the distribution with one random
    number per row sums errors over ids: about d sqrt(vocabulary) / 5 of the rows change, here 50.
    """
    rng = np.random.default_rng(2)
    rows = 1000
    logits = rng.uniform(198, 200, (rows, VOCAB)).astype(np.float32)
    off = logits * (1 + 1e-5 * rng.uniform(-1, 1, logits.shape)).astype(np.float32)
    keys = some_keys(rows)
    assert (plain_draws(logits, keys) != plain_draws(off, keys)).sum() < 20
    uniform = rng.random(rows)
    assert (inverted(logits, uniform) != inverted(off, uniform)).sum() >= 20
