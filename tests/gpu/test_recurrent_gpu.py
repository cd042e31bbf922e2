"""The kernels of recurrent layers on a card agree with the token-by-token reference."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.recurrent import (
    CASES,
    STEPS,
    TRITON_TOLERANCE,
    Shape,
    a_delta_rule,
    a_mamba_scan,
    a_serial_step,
    a_step,
    assert_as_reference,
    cut_otherwise,
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

        return run


def _on_card(value: object) -> object:
    if isinstance(value, Tensor):
        return value.to("cuda")
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
