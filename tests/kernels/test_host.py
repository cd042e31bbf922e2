"""What the host does around launches."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mainstem.kernels.dense import rows
from mainstem.kernels.host import cdiv, forget_constants, next_power_of_2
from mainstem_bench.kernels.no_launch import NoLaunch

pytestmark = pytest.mark.torch


def test_cdiv_and_next_power_of_2_equal_those_of_triton() -> None:
    for size in (*range(20), 127, 128, 129, 4095, 4096, 151_936):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        for part in (1, 3, 64, 1000):
            assert cdiv(size, part) == triton.cdiv(size, part)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.skipif(
    not isinstance(rows._quantize_kernel, JITFunction), reason="the interpreter compares nothing"
)
def test_launches_compare_no_constants_that_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new Triton keeps constants elsewhere, this fails: every launch would be slower again."""
    card = NoLaunch()
    monkeypatch.setattr(driver, "_active", card)
    _ = rows.store_row.cache_key  # so that its callers take over its constants (Triton 3.6)
    kernel = rows._quantize_kernel
    x, values, scales = torch.zeros(2, 64), torch.zeros(2, 64), torch.zeros(2, 1)

    def launch() -> None:
        kernel[(2,)](
            x, values, scales, 64, 64, 0, SIZE=64, BLOCK=64, GROUP=64, OVERLAPS=False, num_warps=1
        )

    launch()
    key = kernel.cache_key
    monkeypatch.setattr(rows, "FP8_MAX", tl.constexpr(1.0))  # no real program does this
    with pytest.raises(RuntimeError, match="FP8_MAX has changed"):
        launch()
    forget_constants()
    launch()
    assert len(card.launched) == 2
    assert card.launched[0] == card.launched[1]
    assert kernel.cache_key == key
