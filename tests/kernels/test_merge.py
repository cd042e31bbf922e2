"""merge: two Partials into one."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.attention import reference  # noqa: E402
from mainstem.kernels.attention.merge import merge  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_merge_agrees_with_the_reference_also_at_minus_infinity() -> None:
    torch.manual_seed(0)
    out_a, out_b = torch.randn(5, 7, 80), torch.randn(5, 7, 80)
    lse_a, lse_b = torch.randn(5, 7) * 40, torch.randn(5, 7) * 40
    lse_a[0], lse_b[1] = float("-inf"), float("-inf")
    lse_a[2], lse_b[2] = float("-inf"), float("-inf")
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    right, right_lse = reference.merge(out_a, lse_a, out_b, lse_b)
    assert torch.allclose(out, right, atol=1e-6)
    assert torch.allclose(lse, right_lse, atol=1e-5)
    assert (out[2] == 0).all()


def test_a_side_without_keys_has_no_weight_even_if_it_is_nan() -> None:
    out_a, out_b = torch.ones(1, 2, 64), torch.full((1, 2, 64), float("nan"))
    out, _ = merge(out_a, torch.zeros(1, 2), out_b, torch.full((1, 2), float("-inf")))
    assert torch.equal(out, out_a)


def test_merge_names_the_argument_that_it_refuses() -> None:
    out, lse = torch.ones(1, 2, 64), torch.zeros(1, 2)
    with pytest.raises(LayoutError, match="lse_b"):
        merge(out, lse, out, lse.half())
    with pytest.raises(LayoutError, match="out_b"):
        merge(out, lse, out.half(), lse)
