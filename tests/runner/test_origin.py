"""What a rank is given of a model's origin."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from mainstem.models.packed import PackedWeight
from mainstem.models.weights import take_weight
from mainstem.runner.origin import folder_origin, for_rank
from tests.models.checkpoints import SMALL
from tests.models.quantized.cases import CASES
from tests.models.quantized.checkpoints import write_quantized

pytestmark = pytest.mark.torch


def test_a_rank_reads_quantized_weights(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "gptq")
    write_quantized(LlamaConfig(**SMALL), tmp_path, case)
    origin = folder_origin(tmp_path)
    origin.digest()  # nothing reads the folder any more
    source = for_rank(origin).open(torch.float32, torch.device("cpu"))
    spec, name = origin.spec, "model.layers.0.self_attn.q_proj"
    shape = (spec.num_heads * spec.head_dim, spec.hidden_size)
    assert isinstance(take_weight(source, name, *shape), PackedWeight)
