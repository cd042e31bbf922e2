"""The Triton kernels of rows beside states agree with the token-by-token reference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.interpreted import require_interpreter

require_interpreter()

from mainstem.kernels.errors import LayoutError  # noqa: E402
from mainstem.kernels.recurrent.conv import convolve  # noqa: E402
from mainstem.kernels.recurrent.delta import delta_rule  # noqa: E402
from mainstem.kernels.recurrent.rows import LayerRows  # noqa: E402
from mainstem.kernels.recurrent.scan import mamba_scan  # noqa: E402
from mainstem.kernels.recurrent.segments import Segments  # noqa: E402
from tests.kernels.recurrent import (  # noqa: E402
    CASES,
    ROW_STEPS,
    TRITON_TOLERANCE,
    Case,
    Part,
    Shape,
    a_convolution,
    a_delta_rule,
    a_mamba_scan,
    a_row_decode,
    a_step,
    assert_rows_as_reference,
    assert_same,
    graph_step,
    with_rows,
)

pytestmark = pytest.mark.torch

KERNELS = SimpleNamespace(convolve=convolve, delta_rule=delta_rule, mamba_scan=mamba_scan)
FEW_HEADS = Shape(1, 2, 16, 16)
ROOM = 16


def check(case: Case, shape: Shape = FEW_HEADS, room: int = ROOM) -> None:
    some = with_rows(case, shape, room, case.dtype)
    assert_rows_as_reference(some, KERNELS, TRITON_TOLERANCE)


def the_step(name: str) -> Segments:
    parts, num_decodes = ROW_STEPS[name]
    return a_step(*parts, num_decodes=num_decodes)


@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(ROW_STEPS))
def test_every_step_agrees_with_the_reference(name: str, operation: str) -> None:
    if operation == "convolve":
        check(a_convolution(the_step(name)))
    else:
        check(CASES[operation](the_step(name), shape=FEW_HEADS))


@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", ["folds", "mixed"])
def test_16_bits_agree_with_the_reference(name: str, operation: str) -> None:
    if operation == "convolve":
        check(a_convolution(the_step(name), torch.bfloat16))
    else:
        check(CASES[operation](the_step(name), torch.bfloat16, FEW_HEADS))


def test_heads_of_unequal_dims() -> None:
    for shape in (Shape(1, 3, 24, 40), Shape(2, 2, 40, 16)):
        step = a_step(a_row_decode(2, 0, 5), a_row_decode(3, 1, 15, 9), Part((9,), 2, (-1,), 3),
                      num_decodes=2)  # fmt: skip
        check(a_delta_rule(step, shape=shape), shape)
        check(a_mamba_scan(step, shape=shape), shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (256, 64), (64, 256)])
def test_heads_as_large_as_those_of_models(dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape(1, 2, *dims)
    check(a_delta_rule(the_step("folds"), dtype, shape), shape)
    check(a_mamba_scan(the_step("mixed"), dtype, shape), shape)


def test_more_rows_than_are_multiplied_at_a_time() -> None:
    step = a_step(a_row_decode(2, 0, 130, 9), a_row_decode(2, 1, 64), Part((70,), 2, (-1,), 3),
                  num_decodes=2)  # fmt: skip
    for make in (a_delta_rule, a_mamba_scan):
        check(make(step, shape=FEW_HEADS), room=144)


def test_more_siblings_than_a_group_has() -> None:
    """17 read one base, so there are two groups."""
    parts = [a_row_decode(5, slot, slot % 3) for slot in range(12)]
    parts += [a_row_decode(4, slot, 0) for slot in range(12, 29)]
    step = a_step(*parts, num_decodes=29)
    case = with_rows(a_delta_rule(step, shape=FEW_HEADS), FEW_HEADS, ROOM)
    assert case.rows is not None
    more = LayerRows(*(torch.cat((part,) * 3) for part in case.rows))
    assert_rows_as_reference(replace(case, rows=more), KERNELS, TRITON_TOLERANCE)


def test_decays_that_underflow_leave_zeros() -> None:
    for make in (a_delta_rule, a_mamba_scan):
        case = make(the_step("mixed"), shape=FEW_HEADS, strength=12.0)
        case = with_rows(case, FEW_HEADS, ROOM)
        assert_rows_as_reference(case, KERNELS, {torch.float32: 1e-3})


@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", ["folds", "one sequence", "siblings"])
def test_a_graph_gives_what_a_step_gives(name: str, operation: str) -> None:
    """Padding writes the last slot, and is in no group."""
    parts, num_decodes = ROW_STEPS[name]
    parts = (*parts, Part((1,), 12, (12,)))
    right = CASES[operation](a_step(*parts, num_decodes=num_decodes + 1))
    right = with_rows(right, Shape(), ROOM)
    args = dict(right.args)
    for key, value in right.args.items():
        if isinstance(value, torch.Tensor) and len(value) == num_decodes + 1:
            args[key] = torch.cat((value, value[:2]))
    args["segments"] = graph_step(*parts, padding=2)
    padded = replace(right, args=args, out_shape=(num_decodes + 3, *right.out_shape[1:]))
    for found, wanted in zip(padded.run_rows(KERNELS), right.run_rows(KERNELS), strict=True):
        if isinstance(wanted, LayerRows):
            assert isinstance(found, LayerRows)
            for part, whole in zip(found, wanted, strict=True):
                assert_same(part, whole)
        else:
            assert isinstance(found, torch.Tensor)
            assert isinstance(wanted, torch.Tensor)
            assert_same(found[: num_decodes + 1], wanted[: num_decodes + 1])


def test_the_error_names_refused_rows() -> None:
    case = with_rows(a_delta_rule(the_step("siblings")), Shape(), ROOM)
    assert case.rows is not None

    def refused(match: str, **changed: torch.Tensor) -> None:
        assert case.rows is not None
        with pytest.raises(LayoutError, match=match):
            replace(case, rows=case.rows._replace(**changed)).run_rows(KERNELS)

    refused("keys of rows", keys=case.rows.keys[:, :1])
    refused("values of rows", values=case.rows.values.half())
    refused("sums of rows", sums=case.rows.sums.double())
    some = with_rows(a_delta_rule(the_step("no rows yet")), Shape(), 24)
    with pytest.raises(LayoutError, match="multiple of 16"):
        some.run_rows(KERNELS)
    conv = with_rows(a_convolution(the_step("siblings")), Shape(), ROOM)
    assert conv.rows is not None
    half = conv.rows._replace(conv=conv.rows.conv.half())
    with pytest.raises(LayoutError, match="of states and of rows must agree"):
        replace(conv, rows=half).run_rows(KERNELS)
