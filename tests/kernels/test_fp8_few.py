"""fp8 products of few tokens: the sums are right for both kinds of scales, whole or split."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.kernels.dense.fp8 import Fp8Linear, quantize_rows  # noqa: E402
from mainstem.kernels.dense.fp8_blocks import Fp8BlockLinear, quantize_groups  # noqa: E402
from mainstem.kernels.dense.fp8_few import TILES, FewRows, multiply  # noqa: E402
from mainstem.kernels.dense.fp8_rows import FP8, Fp8Rows  # noqa: E402
from mainstem.kernels.dense.split_columns import make_counters, num_splits  # noqa: E402

pytestmark = pytest.mark.torch


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(
    kind: str, tokens: int, num_out: int, num_in: int
) -> tuple[Fp8Rows, Tensor, Tensor, Tensor, Tensor]:
    """Rows, the weight's values, scales and bias, and the right product."""
    values = (100 * some(num_out, num_in)).clamp_(-448, 448).to(FP8)
    bias, x = 1000 * some(num_out, seed=1), some(tokens, num_in, seed=2)
    if kind == "channels":
        scales, rows = some(num_out, seed=3).exp(), quantize_rows(x)
        right = Fp8Linear(values, scales, bias, torch.float32)(rows)
    else:
        x *= some(tokens, num_in // 128, seed=4).exp().repeat_interleave(128, 1)
        scales, rows = some(num_out // 128, num_in // 128, seed=3).exp(), quantize_groups(x)
        right = Fp8BlockLinear(values, scales, bias, torch.float32)(rows)
    return rows, values, scales, bias, right


@pytest.mark.parametrize("kind", ["channels", "blocks"])
@pytest.mark.parametrize(
    ("tokens", "num_out", "num_in"),
    [(1, 128, 128), (3, 256, 640), (9, 128, 1024), (33, 256, 512), (64, 128, 256)],
)
def test_the_product_is_that_of_the_rounded_numbers(
    kind: str, tokens: int, num_out: int, num_in: int
) -> None:
    rows, values, scales, bias, right = case(kind, tokens, num_out, num_in)
    counters = make_counters(values.device)
    for given in (None, bias):
        out = torch.full((tokens, num_out), float("nan"))
        multiply(rows, values, scales, given, counters, out)
        expected = right if given is not None else right - bias
        assert float((out - expected).norm() / expected.norm()) < 1e-5
    assert not counters.any()


def test_some_cases_split_columns_and_some_do_not() -> None:
    """Otherwise the test above would not cover both ways."""
    parts = {num_splits(num_out, num_in // 128, TILES[0]) for num_out, num_in in
             ((128, 128), (256, 640), (128, 1024))}  # fmt: skip
    assert parts == {1, 2}


def test_rows_past_the_last_output_are_not_written() -> None:
    """72 outputs are a tile of 64 and a part of one."""
    rows, values, scales, bias, right = case("channels", 2, 72, 256)
    room = torch.full((2, 128), float("nan"))
    multiply(rows, values, scales, bias, make_counters(values.device), room[:, :72])
    assert float((room[:, :72] - right).norm() / right.norm()) < 1e-5
    assert room[:, 72:].isnan().all()


def test_only_cards_that_were_measured_multiply_few_rows() -> None:
    _, values, scales, bias, _ = case("channels", 1, 128, 128)
    assert not FewRows(values, scales, bias).can_take(1)
