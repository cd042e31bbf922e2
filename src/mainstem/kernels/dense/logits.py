# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Scales and soft-caps logits, which some models do after the last product."""

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels.dense.rows import DTYPES
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.host import cdiv
from mainstem.kernels.overlap import overlap_options, wait_for_ahead

_BLOCK = 4096


@triton.jit
def _scale_logits_kernel(
    logits_ptr, stride_row, scale, cap, vocab,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per row and block."""
    wait_for_ahead(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ptrs = logits_ptr + row * stride_row + lanes
    x = tl.load(ptrs, mask=lanes < vocab, other=0.0).to(tl.float32) * scale
    if HAS_CAP:  # tanh, computed with an exponential that does not overflow
        shrunk = tl.exp(tl.abs(x) * (-2.0 / cap))
        size = cap * ((1.0 - shrunk) / (1.0 + shrunk))
        x = tl.where(x < 0.0, -size, size)
    tl.store(ptrs, x.to(logits_ptr.dtype.element_ty), mask=lanes < vocab)


def scale_logits_(logits: Tensor, scale: float = 1.0, softcap: float | None = None) -> None:
    """Compute logits [rows, vocab] * scale, then softcap * tanh(logits / softcap), in place.
    Computed in fp32; the cap adds an error of at most 2^-23 * softcap."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype not in DTYPES:
        raise LayoutError(f"logits must be [rows, vocab] of floats with a contiguous last axis, "
                          f"got {logits.dtype} {tuple(logits.shape)}")  # fmt: skip
    if softcap is not None and not softcap > 0:
        raise LayoutError(f"softcap must be above 0, got {softcap}")
    rows, vocab = logits.shape
    if rows == 0 or (scale == 1.0 and softcap is None):
        return
    _scale_logits_kernel[(rows, cdiv(vocab, _BLOCK))](
        logits, logits.stride(0), scale, softcap or 1.0, vocab,
        HAS_CAP=softcap is not None, BLOCK=_BLOCK, num_warps=4, **overlap_options(logits.device),
    )  # fmt: skip
