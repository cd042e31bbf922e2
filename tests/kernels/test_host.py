"""What the host does around launches."""

import pytest
import triton
from triton.runtime.jit import JITFunction

from mainstem.kernels.host import cdiv, forget_constants, next_power_of_2

pytestmark = pytest.mark.torch


def test_sizes_are_those_of_triton() -> None:
    for size in (*range(20), 127, 128, 129, 4095, 4096, 151_936):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        for part in (1, 3, 64, 1000):
            assert cdiv(size, part) == triton.cdiv(size, part)


def _kernel() -> None:
    pass


def test_constants_that_a_launch_compares_are_forgotten() -> None:
    """If Triton keeps them elsewhere, every launch becomes slower again."""
    kernel = JITFunction(_kernel)
    kernel.used_global_vals[("SIZE", 0)] = (1, {"SIZE": 2})
    forget_constants(kernel)
    assert kernel.used_global_vals == {}
