"""Packed weights: parts, joins and stacks have the same numbers as the whole."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.packed import PackedKind, PackedStack, PackedWeight, as_tensor, joined, on_top
from mainstem.models.quantized.packing import Packing
from mainstem.models.quantized.random import STD, random_packed

pytestmark = pytest.mark.torch
PACKINGS = {
    "int4": Packing(PackedKind.INT4, 32),
    "int4, zeros": Packing(PackedKind.INT4, 16, has_zeros=True),
    "int4, rows": Packing(PackedKind.INT4, None),
    "int8": Packing(PackedKind.INT8, 32, has_zeros=True),
    "fp8 blocks": Packing(PackedKind.FP8, 32, 32),
    "fp8 rows": Packing(PackedKind.FP8, None),
    "mxfp4": Packing(PackedKind.MXFP4, 32),
}
each_kind = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)


def a_weight(packing: Packing, *shape: int, seed: int = 0) -> PackedWeight:
    """A random packed weight whose scales differ."""
    generator = Generator().manual_seed(seed)
    packed = random_packed(packing, shape, torch.float32, generator)
    if packed.scales.dtype == torch.uint8:
        scales = packed.scales.random_(110, 130, generator=generator)
    else:
        scales = packed.scales.uniform_(0.5, 2.0, generator=generator)
    return replace(packed, scales=scales)


def numbers(packed: PackedWeight) -> Tensor:
    return packed.dense(torch.float32)


def in_order(packed: PackedWeight, seed: int = 0) -> PackedWeight:
    order = torch.randperm(packed.shape[-1], generator=Generator().manual_seed(seed))
    return replace(packed, order=order.to(torch.int32))


@each_kind
def test_rows_and_columns_are_those_of_the_whole(packing: Packing) -> None:
    packed = a_weight(packing, 70, 96)
    whole = numbers(packed)
    for rows in (slice(0, 32), slice(32, 70), slice(5, 41)):
        assert torch.equal(numbers(packed.rows(rows)), whole[rows])
    index = torch.tensor([3, 69, 0, 3, 40])
    assert torch.equal(numbers(packed.rows_at(index)), whole[index])
    for columns in (slice(0, 32), slice(32, 96)):
        assert torch.equal(numbers(packed.columns(columns)), whole[:, columns])
    assert torch.equal(numbers(packed.rows(slice(5, 41)).compact()), whole[5:41])


@pytest.mark.parametrize("name", ["int4", "int8", "fp8 blocks"])
def test_a_cut_inside_a_group_makes_groups_smaller(name: str) -> None:
    packed = a_weight(PACKINGS[name], 40, 96)
    found = packed.columns(slice(24, 72))
    assert found.group == 8
    assert torch.equal(numbers(found), numbers(packed)[:, 24:72])


def test_cuts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="whole groups of 32"):
        a_weight(PACKINGS["mxfp4"], 4, 64).columns(slice(0, 16))
    with pytest.raises(UnsupportedModel, match="split a byte"):
        a_weight(PACKINGS["int4, rows"], 4, 64).columns(slice(0, 33))
    with pytest.raises(UnsupportedModel, match="act-order"):
        in_order(a_weight(PACKINGS["int4"], 4, 64)).columns(slice(0, 32))


def test_dequantized_columns_are_back_in_their_original_order() -> None:
    packed = a_weight(PACKINGS["int4"], 70, 96)
    ordered = in_order(packed)
    assert ordered.order is not None
    assert torch.equal(numbers(ordered)[:, ordered.order.long()], numbers(packed))


@each_kind
def test_joined_weights_have_the_rows_of_all(packing: Packing) -> None:
    parts = [a_weight(packing, rows, 96, seed=rows) for rows in (40, 8, 64)]
    whole = joined(parts)
    assert whole is not None
    assert torch.equal(numbers(whole), torch.cat([numbers(part) for part in parts]))


def test_symmetric_and_asymmetric_weights_can_be_joined() -> None:
    one = a_weight(Packing(PackedKind.INT4, 32), 8, 64)
    other = a_weight(Packing(PackedKind.INT4, 32, has_zeros=True), 8, 64)
    whole = joined([one, other])
    assert whole is not None
    assert torch.equal(numbers(whole), torch.cat((numbers(one), numbers(other))))


def test_joined_weights_keep_their_blocks_if_parts_are_whole_blocks() -> None:
    packed = a_weight(PACKINGS["fp8 blocks"], 64, 96)
    whole, uneven = joined([packed, packed]), joined([packed.rows(slice(0, 40)), packed])
    assert whole is not None
    assert uneven is not None
    assert (whole.block_rows, uneven.block_rows) == (32, 1)


def test_weights_that_cannot_be_joined_are_dequantized() -> None:
    packed = a_weight(PACKINGS["int4"], 8, 96)
    others = [
        a_weight(PACKINGS["int4, zeros"], 8, 96),
        a_weight(PACKINGS["int8"], 8, 96),
        in_order(packed),
    ]
    for other in others:
        assert joined([packed, other]) is None
        found = on_top([packed, other], torch.float32)
        assert torch.equal(as_tensor(found), torch.cat((numbers(packed), numbers(other))))
    assert joined([in_order(packed, 1), in_order(packed, 2)]) is None
    assert joined([in_order(packed, 1), in_order(packed, 1)]) is not None
    plain = torch.ones(3, 96)
    found = on_top([packed, plain], torch.float32)
    assert torch.equal(as_tensor(found), torch.cat((numbers(packed), plain)))


@pytest.mark.parametrize("name", ["int4", "int8", "fp8 blocks", "fp8 rows"])
def test_scaling_rows_changes_their_scales(name: str) -> None:
    packed, factors = a_weight(PACKINGS[name], 40, 64), torch.rand(40) + 0.5
    torch.testing.assert_close(
        numbers(packed.scaled_rows(factors)), numbers(packed) * factors[:, None]
    )
    with pytest.raises(UnsupportedModel, match="powers of two"):
        a_weight(PACKINGS["mxfp4"], 40, 64).scaled_rows(factors)


@each_kind
def test_a_stack_has_the_numbers_of_each_part(packing: Packing) -> None:
    stack = PackedStack(3, torch.float32)
    parts = [a_weight(packing, 40, 64, seed=seed) for seed in range(3)]
    for index, part in enumerate(parts):
        stack.put(index, part)
    whole = stack.whole
    assert isinstance(whole, PackedWeight)
    assert whole.shape == (3, 40, 64)
    assert torch.equal(numbers(whole), torch.stack([numbers(part) for part in parts]))
    assert torch.equal(numbers(whole.expert(1)), numbers(parts[1]))
    with pytest.raises(UnsupportedModel, match="packed in different ways"):
        stack.put(0, torch.ones(40, 64))


def test_a_stack_whose_first_part_is_plain_is_plain() -> None:
    stack, packed = PackedStack(2, torch.float32), a_weight(PACKINGS["int4"], 8, 64)
    stack.put(0, torch.ones(8, 64))
    stack.put(1, packed)
    assert torch.equal(as_tensor(stack.whole), torch.stack((torch.ones(8, 64), numbers(packed))))


@each_kind
def test_random_weights_have_the_standard_deviation_of_a_model(packing: Packing) -> None:
    packed = random_packed(packing, (64, 96), torch.float32, Generator().manual_seed(0))
    assert 0.5 * STD < float(numbers(packed).std()) < 2 * STD
