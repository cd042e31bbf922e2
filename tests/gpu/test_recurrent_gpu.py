"""The kernels of recurrent layers on a card agree with the token-by-token reference."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from mainstem.kernels.recurrent.rows import LayerRows
from tests.kernels.recurrent import (
    CASES,
    ROW_STEPS,
    STEPS,
    TRITON_TOLERANCE,
    Part,
    Shape,
    a_delta_rule,
    a_mamba_scan,
    a_row_decode,
    a_serial_step,
    a_step,
    assert_as_reference,
    assert_rows_as_reference,
    assert_same,
    cut_otherwise,
    graph_step,
    with_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class OnCard:
    """Runs an operation with its tensors on the card, and copies what it wrote back."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        from mainstem.kernels.recurrent import gpu  # noqa: PLC0415  # needs a card

        def run(**args: object) -> None:
            there = {key: _on_card(value) for key, value in args.items()}
            getattr(gpu, name)(**there)
            for key in ("out", "conv", "matrix"):
                here, moved = args.get(key), there.get(key)
                if isinstance(here, Tensor) and isinstance(moved, Tensor):
                    here.copy_(moved)
            rows, moved_rows = args.get("rows"), there.get("rows")
            if isinstance(rows, LayerRows) and isinstance(moved_rows, LayerRows):
                for part, moved_part in zip(rows, moved_rows, strict=True):
                    part.copy_(moved_part)

        return run


def _on_card(value: object) -> object:
    if isinstance(value, Tensor):
        return value.to("cuda")
    if isinstance(value, LayerRows):
        return LayerRows(*(part.to("cuda") for part in value))
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _on_card(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **parts)
    return value


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(STEPS))
def test_every_step_in_every_dtype(name: str, operation: str, dtype: torch.dtype) -> None:
    parts, num_decodes = STEPS[name]
    case = CASES[operation](a_step(*parts, num_decodes=num_decodes), dtype)
    assert_as_reference(case, OnCard(), TRITON_TOLERANCE)


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (128, 64), (64, 128), (256, 64), (64, 256)])
def test_heads_as_large_as_those_of_models(dims: tuple[int, int], dtype: torch.dtype) -> None:
    parts, num_decodes = STEPS["mixed"]
    for make in (a_delta_rule, a_mamba_scan):
        case = make(a_step(*parts, num_decodes=num_decodes), dtype, Shape(1, 2, *dims))
        assert_as_reference(case, OnCard(), TRITON_TOLERANCE)


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("operation", list(CASES))
def test_serial_steps_agree_and_have_the_same_bits_however_they_are_cut(
    operation: str, dtype: torch.dtype
) -> None:
    for parts, _ in STEPS.values():
        case = CASES[operation](a_serial_step(*parts), dtype)
        assert_as_reference(case, OnCard(), TRITON_TOLERANCE)
    cut_otherwise(CASES[operation], OnCard(), dtype)


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 64)])
def test_serial_steps_of_heads_as_large_as_those_of_models(
    dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for make in (a_delta_rule, a_mamba_scan):
        cut_otherwise(
            lambda step, dtype, make=make: make(step, dtype, Shape(1, 2, *dims)), OnCard(), dtype
        )


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(ROW_STEPS))
def test_every_step_with_rows_in_every_dtype(name: str, operation: str, dtype: torch.dtype) -> None:
    parts, num_decodes = ROW_STEPS[name]
    for step in (a_step(*parts, num_decodes=num_decodes), graph_step(*parts[:num_decodes])):
        case = with_rows(CASES[operation](step, dtype), Shape(), 16, dtype)
        assert_rows_as_reference(case, OnCard(), TRITON_TOLERANCE)


@pytest.mark.parametrize("dtype", list(TRITON_TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(1, 3, *dims) for dims in ((128, 128), (64, 64), (128, 64), (256, 64), (64, 256))),
        Shape(2, 2, 24, 40),
        Shape(1, 8, 16, 16),
        Shape(1, 2, 40, 32),
    ],
    ids=str,
)
def test_rows_of_heads_of_all_kinds(shape: Shape, dtype: torch.dtype) -> None:
    """A slot has room for 144 rows: more than are multiplied at a time, and a prompt of two
    tiles."""
    long = [Part((70,), 3, (-1,), 8), Part((70,), 3, (10,))]
    parts = [a_row_decode(n % 3, n, (0, 1, 15, 16, 63, 64, 65, 143)[n], (-1, 8)[n == 4])
             for n in range(8)]  # fmt: skip
    for make in (a_delta_rule, a_mamba_scan):
        case = with_rows(
            make(a_step(*parts, *long, num_decodes=8), dtype, shape), shape, 144, dtype
        )
        assert_rows_as_reference(case, OnCard(), TRITON_TOLERANCE)


def test_a_prompt_has_the_same_bits_alone_and_among_short_ones() -> None:
    """Which loads are ahead depends on how long the sequences of a step are on average."""
    long, shorts = Part((600,), -1, (8,)), [Part((3,), -1, (slot,)) for slot in range(9, 24)]
    among = a_delta_rule(a_step(long, *shorts), torch.bfloat16, Shape(1, 2, 128, 128))
    inputs = {name: among.args[name] for name in ("q", "k", "v", "a", "b")}
    own = {name: part[:600] for name, part in inputs.items() if isinstance(part, Tensor)}
    alone = replace(
        among, args={**among.args, **own, "segments": a_step(long)}, out_shape=(600, 2, 128)
    )
    out, states = among.run(OnCard())
    own_out, own_states = alone.run(OnCard())
    assert_same(out[:600], own_out)
    assert_same(states[8], own_states[8])
