"""Activations, fp8 rows and what is done to logits."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.dense import reference  # noqa: E402
from mainstem.kernels.dense.activations import (  # noqa: E402
    Act,
    activate,
    activate_fp8,
    activate_gated,
    activate_gated_fp8,
)
from mainstem.kernels.dense.fp8_blocks import quantize_groups  # noqa: E402
from mainstem.kernels.dense.fp8_rows import Fp8Per, with_padding  # noqa: E402
from mainstem.kernels.dense.logits import scale_logits_  # noqa: E402
from mainstem.kernels.dense.rows import quantize_rows  # noqa: E402
from tests.kernels.rows import (  # noqa: E402
    DTYPES,
    a_quantization,
    assert_close,
    assert_fp8_close,
    assert_rows_are_independent,
    some,
)

pytestmark = pytest.mark.torch

PLAIN = [act for act in Act if act is not Act.CLAMPED_SILU]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 2504])
@pytest.mark.parametrize("act", list(Act))
def test_gates_agree_with_the_reference(act: Act, size: int, dtype: torch.dtype) -> None:
    gate_up = some(2, 2 * size, dtype)
    gate_up[0, :3] = torch.tensor([9.0, 9.0, -9.0], dtype=dtype)  # beyond the clamps
    gate_up[0, size : size + 3] = torch.tensor([9.0, -9.0, 9.0], dtype=dtype)
    assert_close(activate_gated(gate_up, act), reference.gated(gate_up, act.value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", PLAIN)
def test_without_gates_it_agrees_with_the_reference(act: Act, dtype: torch.dtype) -> None:
    x = some(2, 200, dtype)
    right = reference.activation(x, act.value)
    assert_close(activate(x, act), right)
    assert activate(x, act, out=x) is x
    assert_close(x, right)


@pytest.mark.parametrize("act", list(Act))
def test_nan_is_not_hidden(act: Act) -> None:
    for column in (0, 8):
        gate_up = torch.ones(1, 16)
        gate_up[0, column] = float("nan")
        assert bool(activate_gated(gate_up, act)[0, 0].isnan())


def test_fp8_variants_quantize_what_the_plain_ones_return() -> None:
    x = some(3, 576)
    x[1] = 0.0
    assert_fp8_close(quantize_rows(x), a_quantization(x))
    for act in (Act.SILU, Act.RELU_SQUARED, Act.CLAMPED_SILU):
        right = a_quantization(activate_gated(x, act))
        assert_fp8_close(activate_gated_fp8(x, act), right)
    assert_fp8_close(activate_fp8(x, Act.GELU_TANH), a_quantization(activate(x, Act.GELU_TANH)))


def test_groups_of_columns_have_scales_of_their_own() -> None:
    x = some(5, 4608) * torch.logspace(-2, 2, 36).repeat_interleave(128)
    x[1, :128] = 0.0
    found = quantize_rows(x, per=Fp8Per.GROUP)
    assert found[1].shape == (5, 36)
    for got, right in zip(found, quantize_groups(x), strict=True):
        assert torch.equal(got.float(), right.float())
    gated = activate_gated_fp8(x, Act.SILU, per=Fp8Per.GROUP)  # more than one program a row
    assert_fp8_close(gated, quantize_groups(activate_gated(x, Act.SILU)))
    plain = activate_fp8(x[:, :384], Act.RELU, per=Fp8Per.GROUP)  # fewer lanes than a block
    assert_fp8_close(plain, quantize_groups(activate(x[:, :384], Act.RELU)))
    with pytest.raises(LayoutError, match="multiple of 128 columns, got 576"):
        quantize_rows(some(3, 576), per=Fp8Per.GROUP)


def test_room_for_groups_ends_at_a_multiple_of_16_rows() -> None:
    values, scales = quantize_rows(some(5, 256), per=Fp8Per.GROUP)
    all_values, all_scales = with_padding((values, scales))
    assert all_values.shape == (16, 256)
    assert all_scales.shape == (16, 2)
    assert all_scales.stride() == (1, 16)
    assert torch.equal(all_values[:5].float(), values.float())
    assert torch.equal(all_scales[:5], scales)


def test_fp8_rows_reach_the_end_of_the_range() -> None:
    values, scales = quantize_rows(torch.tensor([[3.0, -6.0] * 4, [0.0] * 8]))
    assert values.float()[0, :2].tolist() == [224.0, -448.0]
    assert scales[0, 0] == pytest.approx(6.0 / 448.0)
    assert values.float()[1].abs().max() == 0


def test_outputs_that_are_given_are_filled_and_nothing_else() -> None:
    gate_up, wide = some(2, 128), torch.full((4, 96), float("nan"))
    out = wide[1:3, 16:80]
    assert activate_gated(gate_up, Act.SILU, out) is out
    assert_close(out, reference.gated(gate_up, "silu"))
    assert int(wide.isnan().sum()) == 4 * 96 - 2 * 64


def test_a_row_does_not_depend_on_other_rows() -> None:
    assert_rows_are_independent(lambda x: activate_gated(x, Act.GELU))
    assert_rows_are_independent(lambda x: activate(x, Act.GELU_TANH))
    assert_rows_are_independent(lambda x: quantize_rows(x)[0].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "cap"), [(0.125, None), (1.0, 30.0), (3.0, 5.0), (1.0, None)])
def test_logits_are_scaled_and_then_capped(
    scale: float, cap: float | None, dtype: torch.dtype
) -> None:
    whole = some(3, 5003, dtype) * 10
    kept, logits = whole.clone(), whole[:, :5001]
    right = logits.float() * scale
    if cap is not None:
        right = cap * torch.tanh(right / cap)
    scale_logits_(logits, scale, cap)
    assert_close(logits, right.to(dtype))
    assert torch.equal(whole[:, 5001:], kept[:, 5001:])


def test_the_largest_logits_are_capped_without_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1e-3, float("inf"), float("nan")]])
    scale_logits_(logits, 1.0, 30.0)
    assert logits[0, :3].tolist() == [30.0, -30.0, 0.0]
    assert float(logits[0, 3]) == pytest.approx(1e-3, abs=30 * 2**-23)
    assert float(logits[0, 4]) == 30.0
    assert bool(logits[0, 5].isnan())


def test_no_tokens_is_no_work() -> None:
    assert activate_gated(torch.empty(0, 64), Act.SILU).shape == (0, 32)
    assert activate(torch.empty(0, 64), Act.RELU).shape == (0, 64)
    assert quantize_rows(torch.empty(0, 64))[1].shape == (0, 1)
    scale_logits_(torch.empty(0, 64), 2.0)


def test_refused_arguments_are_named() -> None:
    x = some(2, 64)
    with pytest.raises(LayoutError, match="needs gates"):
        activate(x, Act.CLAMPED_SILU)
    with pytest.raises(LayoutError, match="at most 32768"):
        activate_fp8(some(1, 32776), Act.RELU)
    with pytest.raises(LayoutError, match="gate_up"):
        activate_gated(some(2, 65), Act.SILU)
    with pytest.raises(LayoutError, match="out must be"):
        activate_gated(x, Act.SILU, out=torch.empty(2, 64))
    with pytest.raises(LayoutError, match="float8_e4m3fn"):
        quantize_rows(x, (torch.empty(2, 64), torch.empty(2, 1)))
    with pytest.raises(LayoutError, match="softcap"):
        scale_logits_(x, 1.0, 0.0)
    with pytest.raises(LayoutError, match="logits"):
        scale_logits_(x.t())


def test_rows_may_be_wider_than_a_block_of_fp8() -> None:
    """As wide as Gemma 2 27B's; only fp8 needs a row in one block."""
    gate_up = torch.randn(1, 2 * 36_864)
    right = reference.gated(gate_up, Act.GELU_TANH.value)
    torch.testing.assert_close(activate_gated(gate_up, Act.GELU_TANH), right)
    with pytest.raises(LayoutError, match="columns"):
        activate_gated_fp8(gate_up.bfloat16(), Act.GELU_TANH)
