"""Products with 4-bit weights: weights are dequantized exactly, and the sums are right."""

from dataclasses import dataclass

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.dense import split_columns  # noqa: E402
from mainstem.kernels.dense.int4 import (  # noqa: E402
    dequantize,
    deterministic_tile,
    multiply,
    tile_for,
)
from mainstem.kernels.dense.nibbles import Nibbles  # noqa: E402
from mainstem.kernels.dense.split_columns import ColumnTile, num_splits  # noqa: E402
from mainstem.models.gpu.packed import pack_nibbles  # noqa: E402
from mainstem.models.packed import PackedKind, PackedWeight  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
# Errors relative to the largest output, from the order of sums and the rounding of the output (the
# interpreter truncates bf16 instead of rounding it, for weights too).
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
SPLIT = ColumnTile(outs=16, tokens=16, warps=4, stages=1, programs=1)


@dataclass(frozen=True)
class Case:
    name: str
    num_out: int
    num_in: int
    group: int
    has_zeros: bool = True
    is_mxfp4: bool = False

    def weight(self, dtype: torch.dtype, seed: int = 0) -> PackedWeight:
        generator = torch.Generator().manual_seed(seed)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            made = torch.empty(shape, dtype=torch.uint8)
            return made.random_(low, high, generator=generator)

        values = whole(0, 256, self.num_out, self.num_in // 2)
        scales = (self.num_out, -(-self.num_in // self.group))
        if self.is_mxfp4:
            return PackedWeight(PackedKind.MXFP4, values, whole(100, 129, *scales), None, 32)
        found = (0.1 * torch.rand(scales, generator=generator)).to(dtype)
        zeros = whole(0, 16, *scales) if self.has_zeros else None
        return PackedWeight(PackedKind.INT4, values, found, zeros, self.group)


CASES = [
    Case("groups of 128", 48, 256, 128),
    Case("symmetric groups of 32", 40, 160, 32, has_zeros=False),
    Case("groups of 64, an odd number of rows", 33, 320, 64),
    Case("one group", 20, 72, 72),
    Case("groups of 256", 16, 512, 256),
    Case("mxfp4", 36, 288, 32, is_mxfp4=True),
]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def packed(weight: PackedWeight, dtype: torch.dtype) -> Nibbles:
    found = pack_nibbles(weight, dtype)
    assert found is not None
    return found


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_packed_weights_are_dequantized_exactly(case: Case, dtype: torch.dtype) -> None:
    if case.is_mxfp4 and dtype == torch.float16:
        pytest.skip("MXFP4 is not supported in fp16")
    weight = case.weight(dtype)
    out = torch.full((case.num_out, case.num_in), float("nan"), dtype=dtype)
    assert torch.equal(dequantize(packed(weight, dtype), out), weight.dense(dtype))


def test_the_extreme_exponents_of_mxfp4_are_dequantized_exactly() -> None:
    weight = Case("mxfp4", 16, 192, 32, is_mxfp4=True).weight(torch.float32)
    weight.scales[:] = torch.tensor([0, 1, 2, 126, 127, 128], dtype=torch.uint8)
    dense = weight.dense(torch.float32)
    assert float(dense[:, :32].abs().max()) == 6 * 2.0**-127
    assert float(dense[:, -32:].abs().max()) == 12
    found = dequantize(packed(weight, torch.float32), torch.empty(16, 192))
    assert torch.equal(found, dense)


@by_name
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_multiply_agrees_with_a_product_in_double(case: Case, dtype: torch.dtype) -> None:
    if case.is_mxfp4 and dtype == torch.float16:
        pytest.skip("MXFP4 is not supported in fp16")
    tokens = 5
    weight, x = case.weight(dtype), some(tokens, case.num_in).to(dtype)
    bias = some(case.num_out, seed=2).to(dtype)
    wide = torch.full((tokens + 1, case.num_out + 8), float("nan"), dtype=dtype)
    multiply(x, packed(weight, dtype), bias, wide[:tokens, : case.num_out])
    right = x.double() @ weight.dense(dtype).double().t() + bias.double()
    off = (wide[:tokens, : case.num_out].double() - right).abs().max() / right.abs().max()
    assert float(off) < TOLERANCE[dtype]
    assert int(wide.isnan().sum()) == wide.numel() - tokens * case.num_out


def test_a_split_sum_agrees_with_a_whole_one() -> None:
    case = Case("long", 24, 1536, 128)
    weight, x = case.weight(torch.float32), some(18, case.num_in)
    nibbles = packed(weight, torch.float32)
    assert num_splits(case.num_out, nibbles.num_blocks, SPLIT) == 3
    right = x.double() @ weight.dense(torch.float32).double().t()
    for _ in range(2):  # counters are reset to zero
        found = multiply(x, nibbles, None, torch.empty(18, 24), SPLIT)
        assert float((found - right).abs().max() / right.abs().max()) < 1e-6


def test_a_row_does_not_depend_on_other_rows() -> None:
    case = Case("long", 40, 1024, 128)
    nibbles, x = packed(case.weight(torch.float32), torch.float32), some(70, case.num_in)
    tile = deterministic_tile(torch.float32, CPU)
    together = multiply(x, nibbles, None, torch.empty(70, 40), tile)
    for first, end in ((0, 1), (69, 70), (11, 66)):
        part = x[first:end]
        alone = multiply(part, nibbles, None, torch.empty(len(part), 40), tile)
        assert torch.equal(alone, together[first:end])


def test_many_tokens_with_split_sums_take_several_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_columns, "MOST_TILES", 1)
    nibbles = packed(Case("split", 16, 1024, 128).weight(torch.float32), torch.float32)
    x = some(20, 1024)
    assert num_splits(16, nibbles.num_blocks, SPLIT) > 1
    assert split_columns.most_split_tokens(16, SPLIT) == 16
    together = multiply(x, nibbles, None, torch.empty(20, 16), SPLIT)
    for part in (slice(0, 16), slice(16, 20)):
        alone = multiply(x[part], nibbles, None, torch.empty(len(x[part]), 16), SPLIT)
        assert torch.equal(together[part], alone)
    assert not nibbles.arrived.any()


def test_a_tile_holds_the_tokens_and_wastes_little() -> None:
    for tokens in (1, 8, 9, 64, 65, 256):
        assert 2 * tokens + 8 > tile_for(tokens, torch.bfloat16, CPU).tokens >= tokens
    assert tile_for(5000, torch.bfloat16, CPU) == tile_for(256, torch.bfloat16, CPU)


def test_packed_weights_take_four_bits_and_their_scales() -> None:
    weight = Case("large", 256, 1024, 128).weight(torch.bfloat16)
    nibbles = packed(weight, torch.bfloat16)
    assert nibbles.words.nbytes == weight.values.nbytes
    assert nibbles.nbytes <= 1.03 * weight.nbytes


def test_weights_that_kernels_do_not_support_are_not_packed() -> None:
    assert (
        pack_nibbles(Case("groups of 16", 8, 64, 16).weight(torch.float32), torch.float32) is None
    )
    mxfp4 = Case("mxfp4", 8, 64, 32, is_mxfp4=True).weight(torch.float32)
    assert pack_nibbles(mxfp4, torch.float16) is None
    mxfp4.scales[3, 1] = 129
    assert pack_nibbles(mxfp4, torch.float32) is None
    with pytest.raises(LayoutError, match=r"scales of at most 2, got .*2\^2"):
        Nibbles.mxfp4(mxfp4.values, mxfp4.scales, torch.float32)
    with pytest.raises(LayoutError, match="groups of 32, 64"):
        Nibbles.int4(mxfp4.values, torch.ones(8, 4), None, 16)


def test_the_error_names_a_refused_argument() -> None:
    nibbles = packed(CASES[0].weight(torch.float32), torch.float32)
    x, out = some(2, 256), torch.empty(2, 48)
    with pytest.raises(LayoutError, match=r"x must be \[tokens, 256\]"):
        multiply(x[:, :128], nibbles, None, out)
    with pytest.raises(LayoutError, match="float16"):
        multiply(x.half(), nibbles, None, out)
    with pytest.raises(LayoutError, match=r"out must be \[2, 48\]"):
        multiply(x, nibbles, None, out[:1])
    with pytest.raises(LayoutError, match="bias"):
        multiply(x, nibbles, torch.ones(8), out)
    with pytest.raises(LayoutError, match="contiguous"):
        dequantize(nibbles, torch.empty(256, 48))
    with pytest.raises(LayoutError, match="float32"):
        dequantize(nibbles, torch.empty(48, 256, dtype=torch.float16))
    assert multiply(x[:0], nibbles, None, out[:0]).shape == (0, 48)
