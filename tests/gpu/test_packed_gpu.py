"""Packed weights on a card; needs CUDA, run with `make test-gpu`."""

import pytest
import torch

if not torch.cuda.is_available():
    # Skip before the kernels are imported: other tests need them in Triton's interpreter.
    pytest.skip("no CUDA device", allow_module_level=True)

from mainstem_bench.kernels.packed import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(CHECKS))
def test_packed_weights_pass_all_checks_on_a_card(name: str) -> None:
    with torch.inference_mode():
        CHECKS[name]()
