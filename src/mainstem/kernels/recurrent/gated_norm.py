# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0917
"""RMS norms of groups of columns with a gate, the last step of a recurrent layer, as a Triton
kernel. Qwen norms a head and multiplies the result by silu(gate); Granite and Nemotron multiply
first and norm all columns, or groups of them. Everything is in fp32; only the result is rounded."""

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv, next_power_of_2
from mainstem.kernels.overlap import overlap_options, wait_for_ahead
from mainstem.kernels.recurrent.blocks import DTYPES

MAX_GROUP = 32768
BLOCK_CELLS = 2048  # of programs with several groups


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, gain_ptr, out_ptr, stride_x, stride_gate, stride_out, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    IS_ONE_GAIN: tl.constexpr, GATE_FIRST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token and GROUPS groups."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    starts = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)) * GROUP
    cells = starts[:, None] + lanes[None, :]
    is_cell = (starts < WIDTH)[:, None] & (lanes < GROUP)[None, :]
    if IS_ONE_GAIN:
        gain = tl.load(gain_ptr + lanes, mask=lanes < GROUP, other=0.0).to(tl.float32)[None, :]
    else:
        gain = tl.load(gain_ptr + cells, mask=is_cell, other=0.0).to(tl.float32)
    wait_for_ahead(OVERLAPS)
    x = tl.load(x_ptr + token * stride_x + cells, mask=is_cell, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + cells, mask=is_cell, other=0.0).to(tl.float32)
    gate = gate * tl.sigmoid(gate)
    if GATE_FIRST:
        x = x * gate
    square = tl.sum(x * x, 1, keep_dims=True) / GROUP
    x = x * tl.rsqrt(square + eps) * gain
    if not GATE_FIRST:
        x = x * gate
    tl.store(out_ptr + token * stride_out + cells, x.to(out_ptr.dtype.element_ty), mask=is_cell)


def gated_norm(
    x: Tensor, gate: Tensor, gain: Tensor, eps: float, out: Tensor, *, group: int, gate_first: bool
) -> None:
    """Write an RMS norm of x [tokens, width], over each `group` columns, times silu(gate) to `out`.

    gate_first: the norm is of x * silu(gate). gain: [group] or [width].
    """
    tokens, width = x.shape
    for name, rows in (("x", x), ("gate", gate), ("out", out)):
        if tuple(rows.shape) != (tokens, width) or rows.stride(1) != 1:
            raise LayoutError(
                f"{name} must be [{tokens}, {width}] with a contiguous last axis, "
                f"got {tuple(rows.shape)}"
            )
        if rows.dtype not in DTYPES or rows.dtype != x.dtype:
            raise LayoutError(
                f"{name} must be bfloat16, float16 or float32, like x, got {rows.dtype}"
            )
    if width % group or group > MAX_GROUP:
        raise LayoutError(
            f"groups must divide the {width} columns and have at most {MAX_GROUP}, got {group}"
        )
    if gain.dim() != 1 or len(gain) not in (group, width) or not gain.is_contiguous():
        raise LayoutError(
            f"gain must be contiguous [{group}] or [{width}], got {tuple(gain.shape)}"
        )
    if tokens == 0:
        return
    lanes = next_power_of_2(group)
    groups = min(max(BLOCK_CELLS // lanes, 1), next_power_of_2(width // group))
    _gated_norm_kernel[(tokens, cdiv(width // group, groups))](
        x, gate, gain, out, x.stride(0), gate.stride(0), out.stride(0), eps,
        WIDTH=width, GROUP=group, LANES=lanes, GROUPS=groups, IS_ONE_GAIN=len(gain) == group,
        GATE_FIRST=gate_first, num_warps=min(max(lanes * groups // 512, 1), 16),
        **overlap_options(x.device),
    )  # fmt: skip
