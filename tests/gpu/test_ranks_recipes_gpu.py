"""Every kind of block on a card, split over two ranks that are threads; also NCCL in a graph."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mainstem.core.config import DType
from mainstem.core.events import EventBus
from mainstem.engine.build import join
from mainstem.models.collectives import ProcessGroup
from mainstem.runner.cpu_load import load_cpu_runner
from tests.gpu.test_recipes_gpu import LIMITS, logprobs
from tests.models.ranks import Thread, run_ranks
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config, can_split, deeper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", [name for name in RECIPES if can_split(RECIPES[name], 2)])
def test_two_ranks_have_the_logprobs_of_one_cpu(name: str) -> None:
    from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # needs a card

    origin, config = RecipeOrigin(deeper(RECIPES[name])), a_config(DType.FP32)

    def run(ranks: Thread) -> np.ndarray:
        runner, facts = load_gpu_runner(origin, config, torch.device("cuda"), ranks)
        return logprobs(join(runner, facts, config, EventBus()))

    first, second = run_ranks(2, run)
    np.testing.assert_array_equal(first, second)
    cpu_runner, facts = load_cpu_runner(origin, config)
    apart = np.abs(first - logprobs(join(cpu_runner, facts, config, EventBus())))
    mean, worst = LIMITS[DType.FP32]
    assert apart.mean() < mean, apart.mean()
    assert apart.max() < worst, apart.max()


def test_calls_of_nccl_can_be_captured_in_a_graph(tmp_path: Path) -> None:
    """With one rank, since there is one card. Around each call torch does the same as for more."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        group = ProcessGroup()
        assert group.is_capturable
        x = torch.zeros(4, 8, device="cuda")
        gathered = group.gather(group.sum_(x))  # the first call opens connections
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            gathered = group.gather(group.sum_(x.add_(1.0)))
        for count in (1.0, 2.0):
            graph.replay()
            assert torch.equal(gathered, torch.full_like(x, count))
    finally:
        dist.destroy_process_group()
