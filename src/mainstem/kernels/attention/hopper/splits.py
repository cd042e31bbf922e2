# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
# ruff: noqa: PLR0917
"""Attention on Hopper: turns a small unit's sums into rows, and merges the splits of its heads.

A head whose keys are split has SPLITS sections, [section, row, dim]. Each section has its own
softmax, and one or two warps compute it. Sections are merged through shared memory. (A sum over an
axis that lies across warps does the same, but takes four microseconds.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mainstem.kernels.attention.hopper.codes import natural
from mainstem.kernels.hopper import barrier, reshaped


@gluon.constexpr_function
def sums_of(dims: int) -> gl.SwizzledSharedLayout:
    """Return the layout of fp32 sums in shared memory. A warp writes 8 rows at once, to different
    banks."""
    return gl.SwizzledSharedLayout(8, 1, min(dims // 8, 8), [1, 0])


@gluon.jit
def _merge_splits(acc, sums, FOLD: gl.constexpr, SPLITS: gl.constexpr, LAYOUT: gl.constexpr):
    """Add up the sections of each head, through shared memory; returns [heads x rows, dims]."""
    ROWS: gl.constexpr = acc.shape[1]
    DIMS: gl.constexpr = acc.shape[2]
    acc = acc.reshape([FOLD, SPLITS, ROWS, DIMS]).permute((1, 0, 2, 3)).reshape([64, DIMS])
    reshaped(sums, [64, DIMS], sums_of(DIMS)).store(acc)
    barrier()
    merged = sums.index(0).load(LAYOUT)
    for i in gl.static_range(1, SPLITS):
        merged += sums.index(i).load(LAYOUT)
    return merged


@gluon.jit
def _weigh_splits(top, total, FOLD: gl.constexpr, SPLITS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the factors by which to multiply the sums of each section, [sections, rows], and each
    head's top and total over all its sections, [heads x rows].
    """
    ROWS: gl.constexpr = top.shape[1]
    tops = top.reshape([FOLD, SPLITS, ROWS])
    all_top = gl.max(tops, 1)
    base = gl.where(all_top == float("-inf"), 0.0, all_top)
    shrink = gl.exp2(tops - gl.expand_dims(base, 1))
    all_total = gl.sum(total.reshape([FOLD, SPLITS, ROWS]) * shrink, 1)
    return (
        gl.convert_layout(shrink.reshape(top.shape), top.type.layout),
        gl.convert_layout(all_top.reshape([FOLD * ROWS]), LAYOUT),
        gl.convert_layout(all_total.reshape([FOLD * ROWS]), LAYOUT),
    )


@gluon.jit
def finish_sums(
    acc, tail, top, total, sums, tail_sums,
    FOLD: gl.constexpr, SPLITS: gl.constexpr, HAS_TAIL: gl.constexpr,
    LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """Return a unit's sums as rows, [rows, dims], those of the tail (the dims after the last whole
    panel), and the rows' top and total."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if SPLITS > 1:
        shrink, top, total = _weigh_splits(top, total, FOLD, SPLITS, ROWS)
        acc = acc * shrink[:, :, None]
        if ROUNDED:
            acc = natural(acc)
        acc = _merge_splits(acc, sums, FOLD, SPLITS, LAYOUT)
        if HAS_TAIL:
            tail = tail * shrink[:, :, None]
            tail = _merge_splits(tail, tail_sums, FOLD, SPLITS, TAIL_LAYOUT)
    else:
        top = gl.convert_layout(top.reshape([64]), ROWS)
        total = gl.convert_layout(total.reshape([64]), ROWS)
        if ROUNDED:
            acc = natural(acc)
        acc = gl.convert_layout(acc.reshape([64, acc.shape[2]]), LAYOUT)
        if HAS_TAIL:
            tail = gl.convert_layout(tail.reshape([64, tail.shape[2]]), LAYOUT)
    return acc, tail, top, total
