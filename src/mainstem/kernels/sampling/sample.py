# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""Chooses token ids from logits on the device: argmax, or a draw with temperature, top_k, top_p,
min_p.

The draw is the same as in `runner/sampler.py`: among the tokens that the limits keep, it takes the
one with the largest score after noise is added (`noise.py`). A row without top_k and top_p takes
two launches:

    tops     the largest logit of each part of a row
    draw     the best of each part, with noise; the last part to arrive writes the row's token

Limits need no sort. With tokens ordered from the likeliest to the least likely, each limit ends at
the first token at which a running sum passes a target (`search.py`):

    top_k   the sum counts tokens,          target k - 1
    top_p   the sum is probability mass,    target just below top_p of the whole

Sums are of whole numbers, so the token drawn does not depend on how many parts a row has. A batch
with limited rows takes four launches:

    tops     as above
    survey   mass of each part, and how many of its tokens lie within 1, 2, 4, 7, 10, 15 bits of
             the likeliest; rows without limits are drawn
    collect  the likeliest tokens: those within the largest of these bounds that has few tokens
    finish   the searches and the draw, among the collected tokens or, if the limits reach beyond
             them, over the whole row
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.sampling.noise import LOG2_E, halves_of, min_bits_of, noisy_score
from mainstem.kernels.sampling.search import (
    LOWEST_KEY,
    NO_KEY,
    find,
    key_of,
    keys_at,
    mass_above,
    mass_of,
)

CUT_1, CUT_2 = tl.constexpr(-1 * 2**25), tl.constexpr(-2 * 2**25)
CUT_3, CUT_4 = tl.constexpr(-4 * 2**25), tl.constexpr(-7 * 2**25)
CUT_5, CUT_6 = tl.constexpr(-10 * 2**25), tl.constexpr(-15 * 2**25)
SURVEY = tl.constexpr(8)  # numbers per part: its mass, six counts, and one that is not used
MAX_PARTS = tl.constexpr(64)
EMPTY = tl.constexpr(-(2**63))

_MAX_VOCAB = 300_000  # search.py: masses of up to 2^19 tokens add up to less than 2^63
_ARGMAX_BLOCK = 4096
_SPLIT_ROWS = 1024  # more rows fill the card without being split
_ARGMAX_PROGRAMS = 1024  # enough to keep a large card busy with loads
_PROGRAMS = 2048  # enough to keep a large card busy with arithmetic
_PART_BLOCK = 2048
_FEW = 4096


@triton.jit
def _part(vocab, BLOCK: tl.constexpr):
    """The tokens [begin, end) of program (row, part); there may be none."""
    length = tl.cdiv(tl.cdiv(vocab, tl.num_programs(1)), BLOCK) * BLOCK
    begin = tl.program_id(1) * length
    return begin, tl.minimum(begin + length, vocab)


@triton.jit
def _likeliest(x_ptr, begin, end, BLOCK: tl.constexpr):
    """Return the largest value of x[begin:end] and its first place."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = begin + lanes
    for start in range(begin, end, BLOCK):
        ids = start + lanes
        x = tl.load(x_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        place = tl.where(x > best, ids, place)
        best = tl.maximum(x, best)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, place, end), 0)


@triton.jit
def _meet(value, place, has_tokens, best_ptr, arrived_ptr, out_ptr, row):
    """Reduce over the parts of a row: the last part to arrive stores the place of the largest value
    (on a tie, the lowest place) and resets the row's entry for the next call."""
    parts = tl.num_programs(1)
    if parts == 1:
        tl.store(out_ptr + row, place.to(tl.int64))
    else:
        value = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0
        bits = value.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # now in the same order as the values
        if has_tokens:
            tl.atomic_max(best_ptr + row, (bits.to(tl.int64) << 32) + (0x7FFFFFFF - place))
        if tl.atomic_add(arrived_ptr + row, 1) == parts - 1:
            winner = tl.atomic_xchg(best_ptr + row, EMPTY)
            tl.atomic_xchg(arrived_ptr + row, 0)
            tl.store(out_ptr + row, 0x7FFFFFFF - (winner & 0xFFFFFFFF))


@triton.jit
def _argmax_kernel(logits_ptr, out_ptr, best_ptr, arrived_ptr, stride_row, vocab,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Programs (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _part(vocab, BLOCK)
    top, place = _likeliest(logits_ptr + row * stride_row, begin, end, BLOCK)
    _meet(top, place, begin < end, best_ptr, arrived_ptr, out_ptr, row)


@triton.jit
def _tops_kernel(
    logits_ptr, tops_ptr, top_ids_ptr, best_ptr, arrived_ptr, stride_row, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, end = _part(vocab, BLOCK)
    top, place = _likeliest(logits_ptr + row * stride_row, begin, end, BLOCK)
    here = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops_ptr + here, top)
    tl.store(top_ids_ptr + here, place)
    if tl.program_id(1) == 0:  # reset the entry of this row that its parts use in the next launch
        tl.store(best_ptr + row, EMPTY)
        tl.store(arrived_ptr + row, 0)


@triton.jit
def _top_of(tops_ptr, top_ids_ptr, row, parts):
    """The row's largest logit and its first place."""
    lanes = tl.arange(0, MAX_PARTS)
    here = row * parts + lanes
    tops = tl.load(tops_ptr + here, mask=lanes < parts, other=float("-inf"))
    places = tl.load(top_ids_ptr + here, mask=lanes < parts, other=NO_KEY)
    top = tl.max(tops, 0)
    return top, tl.min(tl.where(tops == top, places, NO_KEY), 0)


@triton.jit
def _draw_part(
    logits_ptr, tops_ptr, top_ids_ptr, best_ptr, arrived_ptr, temperature_ptr, min_p_ptr, keys_ptr,
    out_ptr, stride_row, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw in program (row, part), for a row without top_k and top_p. Temperature 0 takes the
    likeliest."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top, place = _top_of(tops_ptr, top_ids_ptr, row, tl.num_programs(1))
    if temperature > 0.0:
        scale = LOG2_E / temperature
        min_bits = min_bits_of(tl.load(min_p_ptr + row))
        low, high = halves_of(keys_ptr, row)
        begin, end = _part(vocab, BLOCK)
        lanes = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        places = begin + lanes
        for start in range(begin, end, BLOCK):
            ids = start + lanes
            is_in = ids < end
            x = tl.load(logits_ptr + row * stride_row + ids, mask=is_in, other=float("-inf"))
            score = noisy_score(x.to(tl.float32), ids, is_in, low, high, top, scale, min_bits)
            places = tl.where(score > best, ids, places)
            best = tl.maximum(score, best)
        value = tl.max(best, 0)
        place = tl.min(tl.where(best == value, places, end), 0)
        _meet(value, place, begin < end, best_ptr, arrived_ptr, out_ptr, row)
    elif tl.program_id(1) == 0:
        tl.store(out_ptr + row, place.to(tl.int64))


@triton.jit
def _draw_kernel(
    logits_ptr, tops_ptr, top_ids_ptr, best_ptr, arrived_ptr, temperature_ptr, min_p_ptr, keys_ptr,
    out_ptr, stride_row, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    _draw_part(
        logits_ptr, tops_ptr, top_ids_ptr, best_ptr, arrived_ptr, temperature_ptr, min_p_ptr,
        keys_ptr, out_ptr, stride_row, vocab, BLOCK,
    )  # fmt: skip


@triton.jit
def _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
    """Whether the row is drawn under top_k or top_p."""
    has_limit = (tl.load(top_k_ptr + row) < vocab) | (tl.load(top_p_ptr + row) < 1.0)
    return has_limit & (tl.load(temperature_ptr + row) > 0.0)


@triton.jit
def _survey_kernel(
    logits_ptr, tops_ptr, top_ids_ptr, survey_ptr, best_ptr, arrived_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, out_ptr, stride_row, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(1)
    if _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
        min_p = tl.load(min_p_ptr + row)
        scale = LOG2_E / tl.load(temperature_ptr + row)
        top, _ = _top_of(tops_ptr, top_ids_ptr, row, parts)
        begin, end = _part(vocab, BLOCK)
        lanes = tl.arange(0, BLOCK)
        mass = tl.zeros([BLOCK], tl.int64)
        # two counts of 16 bits in one number, since a lane counts few tokens
        pair_1, pair_2, pair_3 = (
            tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32),
        )  # fmt: skip
        for start in range(begin, end, BLOCK):
            key = keys_at(logits_ptr + row * stride_row, start + lanes, end, top, scale)
            mass += mass_of(key, min_p)
            pair_1 += _pair(key, CUT_1, CUT_2)
            pair_2 += _pair(key, CUT_3, CUT_4)
            pair_3 += _pair(key, CUT_5, CUT_6)
        here = survey_ptr + (row * parts + tl.program_id(1)) * SURVEY
        tl.store(here, tl.sum(mass, 0))
        _store_pair(here + 1, pair_1)
        _store_pair(here + 3, pair_2)
        _store_pair(here + 5, pair_3)
    else:
        _draw_part(
            logits_ptr, tops_ptr, top_ids_ptr, best_ptr, arrived_ptr, temperature_ptr, min_p_ptr,
            keys_ptr, out_ptr, stride_row, vocab, BLOCK,
        )  # fmt: skip


@triton.jit
def _pair(key, cut, lower_cut):
    return (key >= cut).to(tl.int32) + ((key >= lower_cut).to(tl.int32) << 16)


@triton.jit
def _store_pair(ptr, pair):
    tl.store(ptr, tl.sum(pair & 0xFFFF, 0).to(tl.int64))
    tl.store(ptr + 1, tl.sum(pair >> 16, 0).to(tl.int64))


@triton.jit
def _lower(survey_ptr, parts, part, index, key, cut, few, before, FEW: tl.constexpr):
    """Take cut number `index`, which has this key, if at most FEW tokens reach it."""
    lanes = tl.arange(0, MAX_PARTS)
    counts = tl.load(survey_ptr + lanes * SURVEY + index, mask=lanes < parts, other=0)
    count = tl.sum(counts, 0)
    is_few = count <= FEW
    earlier = tl.sum(tl.where(lanes < part, counts, 0), 0)
    return (
        tl.where(is_few, key, cut), tl.where(is_few, count, few),
        tl.where(is_few, earlier, before),
    )  # fmt: skip


@triton.jit
def _cut(survey_ptr, parts, part, FEW: tl.constexpr):
    """Return the lowest cut that at most FEW tokens reach, how many tokens reach it, and how many
    of them are in earlier parts."""
    cut = tl.full([], NO_KEY, tl.int32)
    few = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    cut, few, before = _lower(survey_ptr, parts, part, 1, CUT_1, cut, few, before, FEW)
    cut, few, before = _lower(survey_ptr, parts, part, 2, CUT_2, cut, few, before, FEW)
    cut, few, before = _lower(survey_ptr, parts, part, 3, CUT_3, cut, few, before, FEW)
    cut, few, before = _lower(survey_ptr, parts, part, 4, CUT_4, cut, few, before, FEW)
    cut, few, before = _lower(survey_ptr, parts, part, 5, CUT_5, cut, few, before, FEW)
    cut, few, before = _lower(survey_ptr, parts, part, 6, CUT_6, cut, few, before, FEW)
    return cut, few.to(tl.int32), before.to(tl.int32)


@triton.jit
def _collect_kernel(
    logits_ptr, tops_ptr, top_ids_ptr, survey_ptr, few_ptr, few_ids_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, stride_row, vocab,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the tokens that reach the cut, in the order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(1)
    if _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
        part = tl.program_id(1)
        cut, _, place = _cut(survey_ptr + row * parts * SURVEY, parts, part, FEW)
        scale = LOG2_E / tl.load(temperature_ptr + row)
        top, _ = _top_of(tops_ptr, top_ids_ptr, row, parts)
        begin, end = _part(vocab, BLOCK)
        lanes = tl.arange(0, BLOCK)
        for start in range(begin, end, BLOCK):
            ids = start + lanes
            x = tl.load(logits_ptr + row * stride_row + ids, mask=ids < end, other=float("-inf"))
            is_in = (key_of(x.to(tl.float32), top, scale) >= cut) & (ids < end)
            count = tl.sum(is_in.to(tl.int32), 0)
            if count > 0:
                places = place + tl.cumsum(is_in.to(tl.int32), 0) - 1
                tl.store(few_ptr + row * FEW * 2 + places, x, mask=is_in)
                tl.store(few_ids_ptr + row * FEW + places, ids, mask=is_in)
            place += count


@triton.jit
def _draw_kept(
    x_ptr, ids_ptr, size, low, high, top, scale, min_bits, threshold, num_ties,
    HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the best token, with noise, among the tokens above the key `threshold` and the first
    `num_ties` tokens at it; -1 if there is none. Tokens are in the order of their ids. The ids are
    in `ids_ptr`, or are the tokens' places.
    """
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.full([BLOCK], NO_KEY, tl.int32)
    for start in range(0, size, BLOCK):
        places = start + lanes
        is_in = places < size
        x = tl.load(x_ptr + places, mask=is_in, other=float("-inf")).to(tl.float32)
        ids = places
        if HAS_IDS:
            ids = tl.load(ids_ptr + places, mask=is_in, other=0)
        key = key_of(x, top, scale)
        is_tie = (is_in & (key == threshold)).to(tl.int32)
        is_kept = is_in & (key > threshold)
        count = tl.sum(is_tie, 0)
        if count > 0:
            is_kept = is_kept | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= num_ties))
        num_ties -= count
        score = noisy_score(x, ids, is_kept, low, high, top, scale, min_bits)
        found = tl.where(score > best, ids, found)
        best = tl.maximum(score, best)
    value = tl.max(best, 0)
    token_id = tl.min(tl.where(best == value, found, NO_KEY), 0)
    return tl.where(token_id < NO_KEY, token_id, -1)


@triton.jit(do_not_specialize=["parts"])
def _finish_kernel(
    logits_ptr, tops_ptr, top_ids_ptr, survey_ptr, few_ptr, few_ids_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, out_ptr, stride_row, vocab, parts,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row. Rows without limits have their token already."""
    row = tl.program_id(0).to(tl.int64)
    if _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
        x_ptr = logits_ptr + row * stride_row
        few_ptr += row * FEW * 2
        survey_ptr += row * parts * SURVEY
        top, likeliest = _top_of(tops_ptr, top_ids_ptr, row, parts)
        scale = LOG2_E / tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        min_p = tl.load(min_p_ptr + row)
        cut, few, _ = _cut(survey_ptr, parts, 0, FEW)
        # kept: all tokens above a key, and the first tokens at this key
        threshold = tl.full([], LOWEST_KEY, tl.int32)
        num_ties = tl.full([], NO_KEY, tl.int64)
        lanes = tl.arange(0, MAX_PARTS)
        mass = tl.sum(tl.load(survey_ptr + lanes * SURVEY, mask=lanes < parts, other=0), 0)
        if top_k < vocab:
            threshold, above = find(
                x_ptr, vocab, few_ptr, few, cut, few.to(tl.int64),
                top, scale, min_p, top_k - 1, True, FEW, BLOCK,
            )  # fmt: skip
            num_ties = top_k - above
            if top_p < 1.0:
                mass = num_ties * mass_of(threshold, min_p)
                if top_k <= few:
                    mass += mass_above(few_ptr, few, top, scale, min_p, threshold, BLOCK)
                else:
                    mass += mass_above(x_ptr, vocab, top, scale, min_p, threshold, BLOCK)
        if top_p < 1.0:
            share = top_p * mass.to(tl.float64)
            last = share.to(tl.int64)
            last = tl.maximum(tl.where(last.to(tl.float64) < share, last, last - 1), 0)
            few_mass = mass_above(few_ptr, few, top, scale, min_p, LOWEST_KEY, BLOCK)
            threshold, above = find(
                x_ptr, vocab, few_ptr, few, cut, few_mass,
                top, scale, min_p, last, False, FEW, BLOCK,
            )  # fmt: skip
            num_ties = (last - above) // tl.maximum(mass_of(threshold, min_p), 1) + 1
        num_ties = tl.minimum(num_ties, vocab).to(tl.int32)
        low, high = halves_of(keys_ptr, row)
        min_bits = min_bits_of(min_p)
        if threshold >= cut:  # all kept tokens were collected
            token_id = _draw_kept(
                few_ptr, few_ids_ptr + row * FEW, few, low, high, top, scale, min_bits,
                threshold, num_ties, True, BLOCK,
            )  # fmt: skip
        else:
            token_id = _draw_kept(
                x_ptr, few_ids_ptr, vocab, low, high, top, scale, min_bits,
                threshold, num_ties, False, BLOCK,
            )  # fmt: skip
        token_id = tl.where(token_id < 0, likeliest, token_id)
        tl.store(out_ptr + row, token_id.to(tl.int64))


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the likeliest id of each row, on a tie the lowest; logits [rows, vocab] -> int64
    [rows].

    If there are few rows, each is split over the whole card. The parts of a row meet in a small
    buffer of the device, which must exist before a CUDA graph is captured: call `argmax` once
    before. Two streams must not run `argmax` at once.
    """
    rows, vocab = _check_logits(logits)
    out = _check_ids(logits, out)
    if rows == 0:
        return out
    parts = 1
    if rows < _SPLIT_ROWS:
        parts = min(cdiv(vocab, _ARGMAX_BLOCK), max(_ARGMAX_PROGRAMS // rows, 1))
    best, arrived = _meeting_places(logits.device)
    _argmax_kernel[(rows, parts)](
        logits, out, best, arrived, logits.stride(0), vocab, BLOCK=_ARGMAX_BLOCK, num_warps=8
    )
    return out


def draw(
    logits: Tensor, temperature: Tensor, min_p: Tensor, keys: Tensor, out: Tensor | None = None
) -> Tensor:
    """`sample` without top_k and top_p, in half as many launches."""
    _check_settings(logits, temperature=temperature, min_p=min_p, keys=keys)
    out = _check_ids(logits, out)
    if len(logits) > 0:
        parts = _start_parts(logits)
        _draw_kernel[parts.grid](
            logits, parts.tops, parts.top_ids, parts.best, parts.arrived, temperature, min_p, keys,
            out, logits.stride(0), logits.shape[1], BLOCK=parts.block, num_warps=8,
        )  # fmt: skip
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token per row of logits [rows, vocab]; returns int64 [rows].

    Settings are [rows] in fp32, except top_k (int32, at least 1) and keys (int64 noise keys).
    Temperature 0 takes the likeliest token. A row's token does not depend on other rows.
    """
    _check_settings(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, keys=keys
    )
    out = _check_ids(logits, out)
    rows, vocab = logits.shape
    if rows == 0:
        return out
    parts = _start_parts(logits)
    num_parts, device = parts.grid[1], logits.device
    survey = torch.empty(rows, num_parts, SURVEY.value, dtype=torch.int64, device=device)
    few = logits.new_empty(rows, 2, _FEW)  # collected tokens, and those near a target
    few_ids = torch.empty(rows, _FEW, dtype=torch.int32, device=device)
    _survey_kernel[parts.grid](
        logits, parts.tops, parts.top_ids, survey, parts.best, parts.arrived,
        temperature, top_k, top_p, min_p, keys, out, logits.stride(0), vocab,
        BLOCK=parts.block, num_warps=8,
    )  # fmt: skip
    _collect_kernel[parts.grid](
        logits, parts.tops, parts.top_ids, survey, few, few_ids, temperature, top_k, top_p,
        logits.stride(0), vocab, FEW=_FEW, BLOCK=parts.block, num_warps=8,
    )  # fmt: skip
    _finish_kernel[(rows,)](
        logits, parts.tops, parts.top_ids, survey, few, few_ids, temperature, top_k, top_p, min_p,
        keys, out, logits.stride(0), vocab, num_parts,
        FEW=_FEW, BLOCK=min(next_power_of_2(vocab), _FEW), num_warps=16,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Parts:
    """Rows cut into parts, the largest logit of each part, and the buffer in which the parts of a
    row meet."""

    grid: tuple[int, int]
    block: int
    tops: Tensor
    top_ids: Tensor
    best: Tensor
    arrived: Tensor


def _start_parts(logits: Tensor) -> _Parts:
    rows, vocab = logits.shape
    count = min(cdiv(vocab, _PART_BLOCK), max(_PROGRAMS // rows, 1), MAX_PARTS.value)
    parts = _Parts(
        (rows, count),
        min(next_power_of_2(vocab), _PART_BLOCK),
        logits.new_empty(rows, count, dtype=torch.float32),
        torch.empty(rows, count, dtype=torch.int32, device=logits.device),
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.int32, device=logits.device),
    )
    _tops_kernel[parts.grid](
        logits, parts.tops, parts.top_ids, parts.best, parts.arrived, logits.stride(0), vocab,
        BLOCK=parts.block, num_warps=8,
    )  # fmt: skip
    return parts


@cache
def _meeting_places(device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row, the best value of its parts so far and how many parts have arrived; reset after
    use."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LayoutError("argmax must run once on this device before a graph is captured")
    best = torch.full((_SPLIT_ROWS,), EMPTY.value, dtype=torch.int64, device=device)
    return best, torch.zeros(_SPLIT_ROWS, dtype=torch.int32, device=device)


def _check_logits(logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise LayoutError(f"logits must be [rows, vocab] with a contiguous last axis, "
                          f"got {tuple(logits.shape)}")  # fmt: skip
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise LayoutError(f"logits must be bfloat16, float16 or float32, got {logits.dtype}")
    rows, vocab = logits.shape
    if not 0 < vocab <= _MAX_VOCAB:
        raise LayoutError(f"logits must have 1 to {_MAX_VOCAB} columns, got {vocab}")
    return rows, vocab


_DTYPES = {"top_k": torch.int32, "keys": torch.int64}


def _check_settings(logits: Tensor, **settings: Tensor) -> None:
    rows, _ = _check_logits(logits)
    for name, setting in settings.items():
        dtype = _DTYPES.get(name, torch.float32)
        if setting.dtype != dtype or setting.shape != (rows,) or not setting.is_contiguous():
            raise LayoutError(f"{name} must be contiguous {dtype} [{rows}], "
                              f"got {setting.dtype} {tuple(setting.shape)}")  # fmt: skip


def _check_ids(logits: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if out.dtype != torch.int64 or out.shape != (len(logits),) or not out.is_contiguous():
        raise LayoutError(f"out must be contiguous int64 [{len(logits)}], "
                          f"got {out.dtype} {tuple(out.shape)}")  # fmt: skip
    return out
