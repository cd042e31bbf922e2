# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# mypy: no-warn-unreachable
# ruff: noqa: PLR0917
"""Causal convolutions of single channels over up to 4 tokens, as Triton kernels. A sequence's first
tokens need inputs of the last step, which are in a slot; after each segment the last inputs are
written to a slot, perhaps to the same one. So the program that computes a sequence's first tokens
reads the old inputs, and after that writes the slots of all its segments; the other programs of the
sequence need only inputs of this step. A sequence with rows (`rows.py`) has its last inputs in its
row slot, if it has rows already, and writes them there, unless it writes a state."""

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead
from mainstem.kernels.recurrent.blocks import (
    DTYPES,
    read_state_or_rows,
    write_state_or_rows,
)
from mainstem.kernels.recurrent.rows import LayerRows
from mainstem.kernels.recurrent.segments import Segments

TILE_TOKENS, TILE_CHANNELS = 32, 512  # of programs that are no decodes
STEP_TOKENS = 8  # whose inputs are loaded at a time
DECODE_CHANNELS = 512
KERNELS = (2, 3, 4)


@triton.jit
def _bias_of(bias_ptr, channels, is_channel):
    if bias_ptr is None:
        bias = tl.zeros_like(channels).to(tl.float32)
    else:
        bias = tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _old_inputs(
    conv_ptr, slot, row_conv_ptr, row_slot, channels, is_channel, stride_slot, stride_row_slot,
    size, KERNEL: tl.constexpr,
):  # fmt: skip
    """The inputs before the first token: parts 0, 1 and 2 of a slot, as far as there are any."""
    first = read_state_or_rows(
        conv_ptr, slot, row_conv_ptr, row_slot, channels, is_channel, stride_slot, stride_row_slot
    )
    second = first
    third = first
    if KERNEL > 2:
        second = read_state_or_rows(
            conv_ptr, slot, row_conv_ptr, row_slot, size + channels, is_channel,
            stride_slot, stride_row_slot,
        )  # fmt: skip
    if KERNEL > 3:
        third = read_state_or_rows(
            conv_ptr, slot, row_conv_ptr, row_slot, 2 * size + channels, is_channel,
            stride_slot, stride_row_slot,
        )  # fmt: skip
    return first, second, third


@triton.jit
def _row_slot_of(row_slots_ptr, seq):
    return -1 if row_slots_ptr is None else tl.load(row_slots_ptr + seq)


@triton.jit
def _convolve_decode_kernel(
    x_ptr, weight_ptr, bias_ptr, conv_ptr, row_conv_ptr, out_ptr, writes_ptr, reads_ptr,
    row_slots_ptr, counts_ptr, size, stride_x, stride_slot, stride_row_slot, stride_out,
    KERNEL: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK channels. A thread has the same channels throughout, and
    reads their old inputs before it writes."""
    token = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < size
    total = _bias_of(bias_ptr, channels, is_channel)
    wait_for_ahead(OVERLAPS)
    slot = tl.load(reads_ptr + token)
    write = tl.load(writes_ptr + token)
    row_slot = _row_slot_of(row_slots_ptr, token)
    old_rows = row_slot
    if row_slots_ptr is not None:
        old_rows = tl.where(tl.load(counts_ptr + token) > 0, row_slot, -1)
    row = token.to(tl.int64)
    x = tl.load(x_ptr + row * stride_x + channels, mask=is_channel, other=0.0)
    first, second, third = _old_inputs(
        conv_ptr, slot, row_conv_ptr, old_rows, channels, is_channel, stride_slot, stride_row_slot,
        size, KERNEL,
    )  # fmt: skip
    for tap in tl.static_range(KERNEL):
        weight = tl.load(weight_ptr + channels * KERNEL + tap, mask=is_channel, other=0.0)
        if tap == KERNEL - 1:
            value = x
        elif tap == 0:
            value = first
        elif tap == 1:
            value = second
        else:
            value = third
        total += value.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            write_state_or_rows(
                conv_ptr, write, row_conv_ptr, row_slot, (tap - 1) * size + channels, is_channel,
                stride_slot, stride_row_slot, value,
            )  # fmt: skip
    if ACTIVATION:
        total = total * tl.sigmoid(total)
    out_ptrs = out_ptr + row * stride_out + channels
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_channel)


@triton.jit
def _write_inputs(
    x_ptr, conv_ptr, row_conv_ptr, row_slot, starts_ptr, writes_ptr, segment, end_segment, begin,
    second, third, channels, is_channel, stride_x, stride_slot, stride_row_slot, size,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """Write the last inputs after each segment of a sequence, which begins at token `begin`."""
    for index in range(segment, end_segment):
        tokens = tl.load(starts_ptr + index + 1) - begin
        write = tl.load(writes_ptr + index)
        for row in tl.static_range(KERNEL - 1):
            source = tokens + row  # counted from the oldest of the old inputs
            is_new = tl.zeros_like(channels) + source >= KERNEL - 1
            token = (begin + source - (KERNEL - 1)).to(tl.int64)
            value = tl.load(
                x_ptr + token * stride_x + channels, mask=is_channel & is_new, other=0.0
            )
            if KERNEL > 2:
                value = tl.where(source == 1, second, value)
            if KERNEL > 3:
                value = tl.where(source == 2, third, value)
            write_state_or_rows(
                conv_ptr, write, row_conv_ptr, row_slot, row * size + channels, is_channel,
                stride_slot, stride_row_slot, value,
            )  # fmt: skip


@triton.jit(do_not_specialize=("first_seq",))
def _convolve_kernel(
    x_ptr, weight_ptr, bias_ptr, conv_ptr, row_conv_ptr, out_ptr,
    starts_ptr, writes_ptr, seq_segments_ptr, reads_ptr, row_slots_ptr,
    size, first_seq, stride_x, stride_slot, stride_row_slot, stride_out,
    KERNEL: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per TOKENS tokens of a sequence and BLOCK channels. It goes from token to token
    with the last inputs in registers, and loads those of STEP tokens at a time."""
    tile = tl.program_id(0)
    seq = first_seq + tl.program_id(1)
    channels = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < size
    bias = _bias_of(bias_ptr, channels, is_channel)
    weights = ()
    for tap in tl.static_range(KERNEL):
        weight = tl.load(weight_ptr + channels * KERNEL + tap, mask=is_channel, other=0.0)
        weights += (weight.to(tl.float32),)
    wait_for_ahead(OVERLAPS)
    segment = tl.load(seq_segments_ptr + seq)
    end_segment = tl.load(seq_segments_ptr + seq + 1)
    begin = tl.load(starts_ptr + segment)
    tokens = tl.load(starts_ptr + end_segment) - begin
    if tile * TOKENS < tokens:
        first_token = (begin + tile * TOKENS).to(tl.int64)
        x_ptrs = x_ptr + first_token * stride_x + channels
        out_ptrs = out_ptr + first_token * stride_out + channels
        if tile == 0:
            slot = tl.load(reads_ptr + seq)
            first, second, third = _old_inputs(
                conv_ptr, slot, None, -1, channels, is_channel, stride_slot,
                stride_row_slot, size, KERNEL,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have read the old inputs
            _write_inputs(
                x_ptr, conv_ptr, row_conv_ptr, _row_slot_of(row_slots_ptr, seq), starts_ptr,
                writes_ptr, segment, end_segment, begin, second, third, channels, is_channel,
                stride_x, stride_slot, stride_row_slot, size, KERNEL,
            )  # fmt: skip
        else:
            last = x_ptrs - (KERNEL - 1) * stride_x
            first = tl.load(last, mask=is_channel, other=0.0)
            second = tl.load(last + (KERNEL > 2) * stride_x, mask=is_channel, other=0.0)
            third = tl.load(last + (KERNEL > 3) * 2 * stride_x, mask=is_channel, other=0.0)
        first, second, third = first.to(tl.float32), second.to(tl.float32), third.to(tl.float32)
        num_rows = min(TOKENS, tokens - tile * TOKENS)
        for row in range(0, num_rows, STEP):
            new = ()
            for index in tl.static_range(STEP):
                is_new = is_channel & (channels * 0 + (row + index) < num_rows)
                new += (tl.load(x_ptrs + (row + index) * stride_x, mask=is_new, other=0.0),)
            for index in tl.static_range(STEP):
                x = new[index].to(tl.float32)  # type: ignore[var-annotated]
                total = bias + first * weights[0]
                if KERNEL > 2:
                    total += second * weights[1]
                if KERNEL > 3:
                    total += third * weights[2]
                total += x * weights[KERNEL - 1]
                if KERNEL == 2:
                    first = x
                elif KERNEL == 3:
                    first, second = second, x
                else:
                    first, second, third = second, third, x
                if ACTIVATION:
                    total = total * tl.sigmoid(total)
                is_new = is_channel & (channels * 0 + (row + index) < num_rows)
                to = out_ptrs + (row + index) * stride_out
                tl.store(to, total.to(out_ptr.dtype.element_ty), mask=is_new)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Segments,
    conv: Tensor,
    out: Tensor,
    activation: bool,
    rows: LayerRows | None = None,
) -> None:
    """Write the causal convolution of each channel of x [tokens, channels] to `out`, followed by
    SiLU if `activation`.

    weight: [channels, kernel]; conv: [slots, kernel - 1, channels], the last inputs, oldest first;
    rows: needed if sequences of the step keep rows.
    """
    size, kernel = weight.shape
    use = segments.rows
    row_conv = None if rows is None or use is None else rows.conv
    assert (use is None) == (row_conv is None), "rows: without a place for them"
    _check(x, weight, bias, conv, row_conv, out)
    row_slots, counts = (None, None) if use is None else (use.slots, use.counts)
    row_stride = 0 if row_conv is None else row_conv.stride(0)
    options = {"KERNEL": kernel, "ACTIVATION": activation, **overlap_options(x.device)}
    if segments.num_decodes:
        block = min(next_power_of_2(size), DECODE_CHANNELS)
        _convolve_decode_kernel[(cdiv(size, block), segments.num_decodes)](
            x, weight, bias, conv, row_conv, out, segments.writes, segments.reads,
            row_slots, counts, size, x.stride(0), conv.stride(0), row_stride, out.stride(0),
            BLOCK=block, **options,
        )  # fmt: skip
    if segments.num_decodes < segments.num_seqs:
        grid = (
            cdiv(segments.max_tokens, TILE_TOKENS),
            segments.num_seqs - segments.num_decodes,
            cdiv(size, TILE_CHANNELS),
        )
        _convolve_kernel[grid](
            x, weight, bias, conv, row_conv, out,
            segments.starts, segments.writes, segments.seq_segments, segments.reads, row_slots,
            size, segments.num_decodes, x.stride(0), conv.stride(0), row_stride, out.stride(0),
            TOKENS=TILE_TOKENS, STEP=STEP_TOKENS, BLOCK=TILE_CHANNELS, **options,
        )  # fmt: skip


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Tensor,
    row_conv: Tensor | None,
    out: Tensor,
) -> None:
    size, kernel = weight.shape
    if kernel not in KERNELS:
        raise LayoutError(f"convolutions must be over 2, 3 or 4 tokens, got {kernel}")
    for name, rows in (("x", x), ("out", out)):
        if tuple(rows.shape) != (len(x), size) or rows.stride(1) != 1:
            raise LayoutError(
                f"{name} must be [{len(x)}, {size}] with a contiguous last axis, "
                f"got {tuple(rows.shape)}"
            )
    if x.dtype not in DTYPES or x.dtype != conv.dtype or x.dtype != out.dtype:
        raise LayoutError(
            f"x, conv and out must be bfloat16, float16 or float32, all the same, "
            f"got {x.dtype}, {conv.dtype} and {out.dtype}"
        )
    for kept in (conv,) if row_conv is None else (conv, row_conv):
        if tuple(kept.shape[1:]) != (kernel - 1, size) or not kept[:1].is_contiguous():
            raise LayoutError(
                f"conv must be [slots, {kernel - 1}, {size}], contiguous in a slot, "
                f"got {tuple(kept.shape)}"
            )
        if kept.dtype != conv.dtype:
            raise LayoutError(f"conv of states and of rows must agree, got {kept.dtype}")
    is_whole = bias is None or (tuple(bias.shape) == (size,) and bias.is_contiguous())
    if not weight.is_contiguous() or not is_whole:
        raise LayoutError(f"weight [{size}, {kernel}] and bias [{size}] must be contiguous")
