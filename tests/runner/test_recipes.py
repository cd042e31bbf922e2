"""The random models with which other tests compare devices do not amplify rounding."""

import numpy as np
import pytest

from mainstem.core.config import DType
from tests.gpu.test_recipes_gpu import LIMITS, logprobs_of_cpu
from tests.runner.recipes import RECIPES, RecipeOrigin, deeper


@pytest.mark.parametrize("name", [name for name in RECIPES if not RECIPES[name].recurrences])
def test_bf16_on_a_cpu_is_as_close_as_a_card_must_be(name: str) -> None:
    origin = RecipeOrigin(deeper(RECIPES[name]))
    apart = np.abs(logprobs_of_cpu(origin, DType.BF16) - logprobs_of_cpu(origin, DType.FP32))
    mean, worst = LIMITS[DType.BF16]
    assert 0 < apart.mean() < mean, apart.mean()
    assert apart.max() < worst, apart.max()
