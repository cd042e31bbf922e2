"""States of recurrent layers go from a GPU to pinned memory and back, bit by bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GraniteMoeHybridConfig, Lfm2Config, PreTrainedConfig, Qwen3NextConfig

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import (  # noqa: E402
    CacheConfig,
    EngineConfig,
    Fetch,
    StoreConfig,
)
from mainstem.engine.build import build_engine  # noqa: E402
from mainstem.kv.transfer import LoadId  # noqa: E402
from mainstem.models.families import read_spec  # noqa: E402
from mainstem.runner.gpu_pages import GpuPages  # noqa: E402
from mainstem.runner.gpu_transfer import GpuCopier  # noqa: E402
from mainstem.runner.states import DeviceStates  # noqa: E402
from tests.models.checkpoints import write_checkpoint  # noqa: E402
from tests.runner.test_stored_states import ANSWER, answer  # noqa: E402

PAGE = 16
DEVICE = torch.device("cuda")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "delta rule": Qwen3NextConfig(
        **SIZES,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "mamba 2": GraniteMoeHybridConfig(
        **SIZES,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=2,
        num_local_experts=0,
        shared_intermediate_size=128,
        layer_types=["mamba", "attention", "mamba", "mamba"],
    ),
    "convolution": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv", "conv"]),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_checkpoint(CONFIGS[request.param], folder, dtype=torch.bfloat16)
    return folder


@pytest.mark.parametrize("order", [1, -1], ids=["in runs", "one by one"])
def test_states_are_copied_bit_by_bit(folder: Path, order: int) -> None:
    spec, dtype = read_spec(folder), torch.bfloat16
    pages = GpuPages(spec, 8, PAGE, dtype, DEVICE)
    states = DeviceStates(spec, 3, dtype, DEVICE, pages.page_bytes)
    count = states.pages_per_state
    states.pieces.copy_(torch.randint(0, 256, states.pieces.shape, dtype=torch.uint8))
    pages.tensors[0].normal_()
    before, page = states.pieces.clone(), pages.tensors[0][:, :, 3].clone()
    copier = GpuCopier(pages, (count + 4) * 1 << 20, states=states)
    first = pages.num_pages
    slots = np.arange(count + 1, dtype=np.int32)[::order].copy()
    # a page and the pieces of slot 1 in one copy; they come back as a page and slot 2
    out = np.append(np.arange(first + count, first + 2 * count), 3).astype(np.int32)
    back = np.append(np.arange(first + 2 * count, first + 3 * count), 5).astype(np.int32)
    torch.cuda.synchronize()
    copier.save(out, slots).wait()
    copier.load(LoadId(0), slots, back).wait()
    after = states.pieces
    assert torch.equal(after[2 * count : 3 * count], before[count : 2 * count])
    assert torch.equal(after[: 2 * count], before[: 2 * count])
    assert torch.equal(after[3 * count :], before[3 * count :])
    assert torch.equal(pages.tensors[0][:, :, 5], page)
    copier.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_turns_are_continued_from_tiers(folder: Path, tmp_path: Path, *, restarts: bool) -> None:
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE, kv_tokens=4096, states=12),
        store=StoreConfig(host_gb=0.2, disk_dir=str(tmp_path), disk_gb=0.2, fetch=Fetch.ALWAYS),
    )
    rng = np.random.default_rng(0)
    engine, said, end = build_engine(folder, config), rng.integers(3, 500, 90).tolist(), 0
    for _ in range(6):
        found, start = answer(engine, said)
        assert end - PAGE < start <= end
        assert len(found) == ANSWER
        said += found
        end = len(said) - 1
        said += rng.integers(3, 500, int(rng.integers(2, 9))).tolist()
        engine.flush()
        if restarts:
            engine.close()
            engine = build_engine(folder, config)
        else:
            engine.clear_device()
    engine.close()
