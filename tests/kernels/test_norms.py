"""Norms of the residual, and of queries and keys."""

from collections.abc import Callable

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.dense import reference  # noqa: E402
from mainstem.kernels.dense.fp8_blocks import quantize_groups  # noqa: E402
from mainstem.kernels.dense.fp8_rows import Fp8Per  # noqa: E402
from mainstem.kernels.dense.head_norms import joint_norm_, joint_squares  # noqa: E402
from mainstem.kernels.dense.norms import (  # noqa: E402
    Delta,
    Norm,
    add_,
    norm_rows,
    norm_rows_fp8,
)
from tests.kernels.rows import (  # noqa: E402
    DTYPES,
    a_quantization,
    assert_close,
    assert_fp8_close,
    assert_rows_are_independent,
    some,
)

pytestmark = pytest.mark.torch

EPS = 1e-5
KINDS = ["rms", "rms, fp32 gain", "layer", "layer, no bias"]


def a_norm(kind: str, size: int, dtype: torch.dtype = torch.float32, seed: int = 10) -> Norm:
    gain = some(1, size, torch.float32 if "fp32" in kind else dtype, seed)[0]
    bias = some(1, size, dtype, seed + 1)[0] if kind == "layer" else None
    return Norm(gain, EPS, "layer" in kind, bias)


def right_norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.is_layer:
        return reference.layer_norm(x, norm.gain, norm.bias, norm.eps)
    return reference.rms_norm(x, norm.gain, norm.eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8, 1000])
def test_a_norm_agrees_with_the_reference(size: int, kind: str, dtype: torch.dtype) -> None:
    x, norm = some(3, size, dtype) + 1, a_norm(kind, size, dtype)
    kept = x.clone()
    assert_close(norm_rows(x, norm), right_norm(x, norm))
    assert torch.equal(x, kept)


def test_a_gain_in_fp32_is_multiplied_before_rounding() -> None:
    """fp16 cannot hold these gains, 1 + 2^-12: if they were rounded first, they would be 1.

    Rounding the product once to 11 bits changes it by at most 2^-11 of its size; rounding the gain
    too changes it by up to half as much again."""
    x, gain = some(4, 4096, torch.float16), torch.full((4096,), 1 + 2.0**-12)
    wide = x.double()
    right = wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * gain
    is_normal = right.abs() > 2.0**-14

    def worst(found: Tensor) -> float:
        return float(((found.double() - right) / right)[is_normal].abs().max())

    once, twice = norm_rows(x, Norm(gain, EPS)), norm_rows(x, Norm(gain.half(), EPS))
    assert worst(once) < 1.001 * 2.0**-11
    assert worst(twice) > 1.3 * 2.0**-11


DELTAS: dict[str, Callable[[Tensor, Tensor, Norm], Delta]] = {
    "plain": lambda rows, more, after: Delta(rows),
    "scaled (Granite)": lambda rows, more, after: Delta(rows, scale=0.22),
    "normed (Gemma)": lambda rows, more, after: Delta(rows, after=after),
    "parallel (Phi-2)": lambda rows, more, after: Delta(rows, more),
    "all": Delta,
}


def right_sum(x: Tensor, delta: Delta) -> Tensor:
    added = delta.rows if delta.more is None else delta.rows + delta.more
    if delta.after is not None:
        added = right_norm(added, delta.after)
    return x + added * delta.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["rms", "rms, fp32 gain", "layer"])
@pytest.mark.parametrize("name", list(DELTAS))
def test_rows_are_added_to_the_residual_before_the_norm(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    norm, after = a_norm(kind, 72, dtype), a_norm(kind, 72, dtype, seed=20)
    delta = DELTAS[name](some(3, 72, dtype, 1), some(3, 72, dtype, 2), after)
    kept = [x.clone() for x in (delta.rows, delta.more) if x is not None]
    x = some(3, 72, dtype)
    right, other = right_sum(x, delta), x.clone()
    found = norm_rows(x, norm, delta)
    assert_close(x, right)
    assert_close(found, right_norm(x, norm))
    add_(other, delta)
    assert torch.equal(other, x)
    changed = [x for x in (delta.rows, delta.more) if x is not None]
    assert all(torch.equal(a, b) for a, b in zip(changed, kept, strict=True))


def test_a_scale_of_one_adds_the_rows_unchanged() -> None:
    """Llama's arithmetic has no scale."""
    x, rows = some(3, 576, torch.float16), some(3, 576, torch.float16, 1)
    total = x + rows
    add_(x, Delta(rows, scale=1.0))
    assert torch.equal(x, total)


def test_fp8_variants_quantize_the_output_of_the_plain_ones() -> None:
    x, rows = some(3, 576), some(3, 576, seed=1)
    x[1] = rows[1] = 0.0
    for kind in KINDS:
        norm, plain, quantized = a_norm(kind, 576), x.clone(), x.clone()
        right = norm_rows(plain, norm, Delta(rows))
        out = norm_rows_fp8(x, norm)
        found = norm_rows_fp8(quantized, norm, Delta(rows), out)
        assert found is out
        assert_fp8_close(found, a_quantization(right))
        assert torch.equal(quantized, plain)


def test_each_group_of_columns_has_its_own_scale() -> None:
    x, rows, norm = some(3, 640), some(3, 640, seed=1), a_norm("rms", 640)
    x[1, :128] = rows[1, :128] = 0.0
    plain = x.clone()
    right = quantize_groups(norm_rows(plain, norm, Delta(rows)))
    found = norm_rows_fp8(x, norm, Delta(rows), per=Fp8Per.GROUP)
    assert found[1].shape == (3, 5)
    assert_fp8_close(found, right)
    assert torch.equal(x, plain)


def test_given_outputs_are_filled_and_no_other_memory_changes() -> None:
    whole, norm = some(2, 200), a_norm("layer", 64)
    x = whole[:, 8:72]  # rows with gaps between them
    wide = torch.full((4, 160), float("nan"))
    out = wide[1:3, 16:80]
    norm_rows(x, norm, out=out)
    assert_close(out, right_norm(x, norm))
    assert int(wide.isnan().sum()) == 4 * 160 - 2 * 64
    right = right_norm(x, norm)
    assert norm_rows(x, norm, out=x) is x
    assert_close(x, right)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_row_does_not_depend_on_other_rows(kind: str) -> None:
    norm = a_norm(kind, 128)
    assert_rows_are_independent(lambda x: norm_rows(x, norm))
    assert_rows_are_independent(
        lambda x: norm_rows(x.clone(), norm, Delta(x * 0.3, x * 0.7, norm, 0.5))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["rms", "rms, fp32 gain", "layer, no bias"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 80), (16, 8, 8)])
def test_joint_norms_of_queries_and_keys_do_not_change_values(
    heads: int, kv_heads: int, dim: int, kind: str, dtype: torch.dtype
) -> None:
    qkv = some(3, (heads + 2 * kv_heads) * dim, dtype) + 1
    ends = heads * dim, (heads + kv_heads) * dim
    q_norm, k_norm = a_norm(kind, heads * dim, dtype), a_norm(kind, kv_heads * dim, dtype, seed=1)
    found = qkv.clone()
    joint_norm_(found, q_norm, k_norm, heads, kv_heads, dim)
    assert_close(found[:, : ends[0]], right_norm(qkv[:, : ends[0]], q_norm))
    assert_close(found[:, ends[0] : ends[1]], right_norm(qkv[:, ends[0] : ends[1]], k_norm))
    assert torch.equal(found[:, ends[1] :], qkv[:, ends[1] :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["rms", "rms, fp32 gain"])
def test_joint_norms_agree_if_heads_are_split_over_ranks(kind: str, dtype: torch.dtype) -> None:
    """Each of two ranks has 3 query heads and a key head."""
    heads, kv_heads, dim = 6, 2, 24
    qkv = some(3, (heads + 2 * kv_heads) * dim, dtype) + 1
    q_norm, k_norm = a_norm(kind, heads * dim, dtype), a_norm(kind, kv_heads * dim, dtype, seed=1)
    whole = qkv.clone()
    joint_norm_(whole, q_norm, k_norm, heads, kv_heads, dim)

    def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of both ranks; each has half of the queries, keys and values."""
        sizes = [n * dim for n in (heads, kv_heads, kv_heads)]
        thirds = [third.chunk(2, dim=-1) for third in torch.split(x, sizes, dim=-1)]
        return [torch.cat(pair, dim=-1) for pair in zip(*thirds, strict=True)]

    parts = parts_of(qkv)
    squares = torch.zeros(3, 2)
    for part in parts:
        squares += joint_squares(part, 3, 1, dim, 2, torch.empty(3, 2))
    for index, (part, right) in enumerate(zip(parts, parts_of(whole), strict=True)):
        norms = [Norm(n.gain.chunk(2)[index].contiguous(), EPS) for n in (q_norm, k_norm)]
        joint_norm_(part, norms[0], norms[1], 3, 1, dim, squares)
        assert_close(part, right)
    with pytest.raises(LayoutError, match="squares must be"):
        joint_norm_(parts[0], norms[0], norms[1], 3, 1, dim, squares[:2])


def test_a_call_without_tokens_does_nothing() -> None:
    norm, empty = a_norm("rms", 64), torch.empty(0, 64)
    assert norm_rows(empty, norm).shape == (0, 64)
    assert norm_rows_fp8(empty, norm)[1].shape == (0, 1)
    add_(empty, Delta(empty))
    joint_norm_(torch.empty(0, 256), a_norm("rms", 128), norm, 2, 1, 64)


def test_the_error_names_a_refused_argument() -> None:
    x, norm = some(2, 64), a_norm("rms", 64)
    with pytest.raises(LayoutError, match="multiple of 8"):
        norm_rows(some(2, 60), a_norm("rms", 60))
    with pytest.raises(LayoutError, match="at most 16384"):
        norm_rows(some(1, 16392), a_norm("rms", 16392))
    with pytest.raises(LayoutError, match="gain"):
        norm_rows(x, a_norm("rms", 32))
    with pytest.raises(LayoutError, match="bias"):
        norm_rows(x, Norm(norm.gain, EPS, is_layer=True, bias=torch.ones(32)))
    with pytest.raises(LayoutError, match="gain"):
        add_(x, Delta(x, after=a_norm("rms", 32)))
    with pytest.raises(LayoutError, match="delta must be"):
        norm_rows(x, norm, Delta(some(3, 64)))
    with pytest.raises(LayoutError, match="delta must be"):
        norm_rows(x, norm, Delta(x, x.half()))
    with pytest.raises(LayoutError, match="out must be"):
        norm_rows(x, norm, out=torch.empty(2, 32))
    with pytest.raises(LayoutError, match="float64"):
        norm_rows(x.double(), norm)
    with pytest.raises(LayoutError, match="one kind"):
        norm_rows(x, norm, Delta(x, after=a_norm("layer", 64)))
    with pytest.raises(ValueError, match="no bias"):
        Norm(norm.gain, EPS, bias=norm.gain)
    with pytest.raises(LayoutError, match="float8_e4m3fn"):
        norm_rows_fp8(x, norm, out=(torch.empty(2, 64), torch.empty(2, 1)))
    qkv = some(2, 256)
    with pytest.raises(LayoutError, match="k_gain"):
        joint_norm_(qkv, a_norm("rms", 128), a_norm("rms", 32), 2, 1, 64)
    with pytest.raises(LayoutError, match="q_gain"):
        joint_norm_(qkv, norm, norm, 2, 1, 64)
    with pytest.raises(LayoutError, match="no bias"):
        joint_norm_(qkv, a_norm("layer", 128), norm, 2, 1, 64)
