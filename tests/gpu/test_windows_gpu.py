"""Windowed parts of pages on a card: copies, and conversations over few parts and tiers."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import EngineConfig  # noqa: E402
from mainstem.core.step import Runner  # noqa: E402
from mainstem.kv.transfer import LoadId  # noqa: E402
from mainstem.runner.facts import RunnerFacts  # noqa: E402
from mainstem.runner.gpu_load import load_gpu_runner  # noqa: E402
from mainstem.runner.gpu_pages import GpuPages  # noqa: E402
from mainstem.runner.gpu_transfer import GpuCopier  # noqa: E402
from mainstem.runner.origin import Origin  # noqa: E402
from tests.runner.recipes import RECIPES  # noqa: E402
from tests.runner.test_windows_engine import check_conversations  # noqa: E402

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma 4 with inputs of layers"])
def test_each_part_of_a_page_is_copied_from_its_own_place(name: str) -> None:
    pages = GpuPages(RECIPES[name], 40, 16, torch.bfloat16, DEVICE, num_parts=12)
    for tensor in pages.tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in pages.tensors]
    copier = GpuCopier(pages, host_bytes=16 * pages.page_bytes + (1 << 20))
    ids = np.array([4, 30, 7], np.int32)
    parts = np.array([2, 11, 0], np.int32)
    slots = np.array([1, 0, 3], np.int32)
    new_ids, new_parts = np.array([39, 1, 20], np.int32), np.array([5, 6, 9], np.int32)
    torch.cuda.synchronize()
    copier.save(ids, slots, parts).wait()
    copier.load(LoadId(0), slots, new_ids, new_parts).wait()
    for part, tensor, old in zip(pages.parts, pages.tensors, before, strict=True):
        source, target = (parts, new_parts) if part.is_windowed else (ids, new_ids)
        assert torch.equal(tensor[:, :, target], old[:, :, source])
        others = np.setdiff1d(np.arange(tensor.shape[2]), target)
        assert torch.equal(tensor[:, :, others], old[:, :, others]), "another place was written"
    copier.close()


def on_the_card(origin: Origin, config: EngineConfig, num_parts: int) -> tuple[Runner, RunnerFacts]:
    return load_gpu_runner(origin, config, DEVICE, num_parts=num_parts)


@pytest.mark.parametrize(
    "name",
    [
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma 4 with experts",
        "Gemma 4 with inputs of layers",
    ],
)
def test_conversations_with_few_parts_and_tiers(name: str, tmp_path: Path) -> None:
    """CUDA graphs and overlapping steps included."""
    check_conversations(name, tmp_path, on_the_card)
