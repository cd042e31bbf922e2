"""The Triton kernels of recurrent layers agree with the token-by-token reference."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.interpreted import require_interpreter

require_interpreter()

from mainstem.kernels.errors import LayoutError  # noqa: E402
from mainstem.kernels.recurrent import reference  # noqa: E402
from mainstem.kernels.recurrent.conv import convolve  # noqa: E402
from mainstem.kernels.recurrent.delta import delta_rule  # noqa: E402
from mainstem.kernels.recurrent.gated_norm import gated_norm  # noqa: E402
from mainstem.kernels.recurrent.scan import mamba_scan  # noqa: E402
from mainstem.kernels.recurrent.segments import Segments  # noqa: E402
from tests.kernels.recurrent import (  # noqa: E402
    CASES,
    STEPS,
    TRITON_TOLERANCE,
    Case,
    Part,
    Shape,
    a_convolution,
    a_delta_rule,
    a_gated_norm,
    a_mamba_scan,
    a_serial_step,
    a_step,
    assert_as_reference,
    assert_near,
    assert_same,
    cut_otherwise,
)

pytestmark = pytest.mark.torch

KERNELS = SimpleNamespace(
    convolve=convolve, delta_rule=delta_rule, mamba_scan=mamba_scan, gated_norm=gated_norm
)
FEW_HEADS = Shape(1, 2, 16, 16)


def check(case: Case) -> None:
    assert_as_reference(case, KERNELS, TRITON_TOLERANCE)


def the_step(name: str) -> Segments:
    parts, num_decodes = STEPS[name]
    return a_step(*parts, num_decodes=num_decodes)


@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(STEPS))
def test_every_step_agrees_with_the_reference(name: str, operation: str) -> None:
    if operation == "convolve":
        check(a_convolution(the_step(name)))
    else:
        check(CASES[operation](the_step(name), shape=FEW_HEADS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", ["decodes", "in place"])
def test_16_bits_agree_with_the_reference(name: str, operation: str, dtype: torch.dtype) -> None:
    check(CASES[operation](the_step(name), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(STEPS))
def test_every_step_in_every_dtype(name: str, operation: str, dtype: torch.dtype) -> None:
    check(CASES[operation](the_step(name), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (256, 64), (64, 256)])
def test_heads_as_large_as_those_of_models(dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape(1, 2, *dims)
    check(a_delta_rule(the_step("mixed"), dtype, shape))
    check(a_mamba_scan(the_step("mixed"), dtype, shape))


def test_dims_that_are_no_powers_of_two() -> None:
    step = a_step(Part((1,), 8, (8,)), Part((9,), 9, (9,)), num_decodes=1)
    check(a_delta_rule(step, shape=Shape(1, 1, 24, 40)))
    check(a_mamba_scan(step, shape=Shape(1, 1, 24, 40)))


@pytest.mark.parametrize("kernel", [2, 3])
def test_convolutions_of_all_kinds(kernel: int) -> None:
    for name in STEPS:
        check(a_convolution(the_step(name), kernel=kernel, has_bias=False, activation=False))


def test_convolutions_of_several_tiles_and_blocks() -> None:
    step = a_step(Part((1,), 8, (8,)), Part((2, 33), 9, (10, 9)), num_decodes=1)
    check(a_convolution(step, channels=520))


@pytest.mark.parametrize("strength", [3.0, 6.0, 12.0])
def test_decays_that_underflow_leave_zeros(strength: float) -> None:
    """Sums of a tile's logarithms reach -64 * 120 here, with an ulp of 2^-11, which is an error of
    5e-4 of a decay."""
    parts = (Part((1,), 8, (8,)), Part((70,), 9, (9,)))
    step = a_step(*parts, num_decodes=1)
    tolerance = {torch.float32: 1e-3}
    assert_as_reference(a_delta_rule(step, shape=FEW_HEADS, strength=strength), KERNELS, tolerance)
    assert_as_reference(a_mamba_scan(step, shape=FEW_HEADS, strength=strength), KERNELS, tolerance)


def test_keys_that_are_all_the_same() -> None:
    """The triangular system is then as badly conditioned as it gets: without decay its matrix is
    all ones below the diagonal, and powers of it would have 18 digits."""
    case = a_delta_rule(a_step(Part((64,), -1, (8,))), shape=FEW_HEADS, strength=-30.0)
    k, b = case.args["k"], case.args["b"]
    assert isinstance(k, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    k[:] = k[:1].clone()
    b[:] = 20.0
    check(case)


def test_the_step_of_a_scan_is_clamped() -> None:
    check(a_mamba_scan(the_step("in place"), shape=FEW_HEADS, limits=(0.05, 0.2)))


def test_a_sequence_has_the_same_bits_beside_other_sequences() -> None:
    own = Part((3, 70), 8, (9, 8))
    others = (Part((1,), 0, (10,)), Part((90,), -1, (11,)))
    step, own_step = a_step(*others, own, num_decodes=1), a_step(own)
    for together in (
        a_convolution(step),
        a_delta_rule(step, shape=FEW_HEADS),
        a_mamba_scan(step, shape=FEW_HEADS),
    ):
        args = {
            name: value[91:] if isinstance(value, torch.Tensor) and len(value) == 164 else value
            for name, value in together.args.items()
        }
        args["segments"] = own_step
        alone = Case(
            together.name, args, together.states, together.dtype, (73, *together.out_shape[1:])
        )
        out, states = together.run(KERNELS)
        right_out, right_states = alone.run(KERNELS)
        assert_same(out[91:], right_out)
        assert_same(states[8:10], right_states[8:10])


@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(STEPS))
def test_every_serial_step_agrees_with_the_reference(name: str, operation: str) -> None:
    parts, _ = STEPS[name]
    step = a_serial_step(*parts)
    check(a_convolution(step) if operation == "convolve" else CASES[operation](step))


@pytest.mark.parametrize("operation", list(CASES))
def test_a_serial_step_has_the_same_bits_however_it_is_cut(operation: str) -> None:
    cut_otherwise(CASES[operation], KERNELS, torch.float32)


def test_padding_of_a_graph_writes_only_its_slot() -> None:
    padding = Part((1,), 16, (16,))
    case = a_delta_rule(a_step(Part((1,), 8, (8,)), padding, padding, num_decodes=3))
    assert case.states is not None
    out, states = case.run(KERNELS)
    right_out, right_states = case.run(reference)
    assert_near(out[:1], right_out[:1], TRITON_TOLERANCE[case.dtype])
    assert_near(states[8], right_states[8], TRITON_TOLERANCE[case.dtype])
    assert_same(states[9:16], case.states[9:16])


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("group", "gains"), [(24, 24), (24, 96), (96, 96)])
def test_gated_norms_agree_with_the_reference(
    group: int, gains: int, gate_first: bool, dtype: torch.dtype
) -> None:
    check(a_gated_norm(dtype, 96, group, gains, gate_first))


def test_norms_with_groups_for_several_programs() -> None:
    check(a_gated_norm(width=2560, group=512, gains=512))


def test_the_error_names_a_refused_argument() -> None:
    step = a_step(Part((1,), 8, (8,)), num_decodes=1)

    def refused(case: Case, match: str, **changed: object) -> None:
        case.args.update(changed)
        with pytest.raises(LayoutError, match=match):
            case.run(KERNELS)

    refused(a_convolution(step, kernel=4), "2, 3 or 4", weight=torch.ones(40, 5))
    refused(a_convolution(step), "x must be", x=torch.ones(1, 39))
    refused(a_convolution(step), "all the same", x=torch.ones(1, 40).double())
    refused(a_delta_rule(step, shape=Shape(1, 1, 264, 16)), "at most 256")
    refused(a_delta_rule(step), "k must be", k=torch.ones(1, 2, 32)[:, :, ::2])
    refused(a_delta_rule(step), "must agree", k=torch.ones(1, 2, 8))
    refused(a_delta_rule(step), "a must be", a=torch.ones(1, 3))
    refused(a_delta_rule(step), "a_log must be", a_log=torch.ones(4).half())
    refused(a_delta_rule(step), "float32", q=torch.ones(1, 2, 16).half())
    refused(a_mamba_scan(step), "must agree", b=torch.ones(1, 1, 16))
    refused(a_mamba_scan(step), "d must be", d=torch.ones(3))
    refused(a_gated_norm(), "groups must divide", group=36)
    refused(a_gated_norm(), "gain must be", gain=torch.ones(12))
    refused(a_gated_norm(), "gate must be", gate=torch.ones(5, 48))
    case = a_mamba_scan(step)
    assert case.states is not None
    case.states = case.states[:, :, :8]
    refused(case, "matrix must be")
