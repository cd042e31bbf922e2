"""Mixtures of experts on a card; needs CUDA, run with `make test-gpu`."""

import pytest
import torch

if not torch.cuda.is_available():
    # Skip before the kernels are imported: other tests need them in Triton's interpreter.
    pytest.skip("no CUDA device", allow_module_level=True)

from mainstem_bench.kernels.experts import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@pytest.mark.parametrize("name", list(CHECKS))
def test_experts_pass_all_checks_on_a_card(name: str) -> None:
    with torch.inference_mode():
        CHECKS[name]()
