"""Updates of every kind of weight, whole and in part: those of experts, of quantized products, of
recurrent layers, of layers with a window, and weights that the engine quantizes itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from mainstem.core.config import EngineConfig, Quantize
from mainstem.core.errors import InvalidRequest
from mainstem.core.weights import FolderUpdate, TensorUpdate, UpdateMode
from mainstem.engine.build import build_engine
from mainstem.models.cpu.layers import has_onednn
from tests.engine.test_weights import CONFIG, answers, change, fresh_answers, save, tensors_of
from tests.families.test_qwen_hybrid import HYBRID
from tests.models.checkpoints import CONFIGS, SMALL, write_checkpoint
from tests.models.quantized.cases import CASES
from tests.models.quantized.checkpoints import write_quantized

pytestmark = pytest.mark.torch
TWO = SMALL | {"num_hidden_layers": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[PreTrainedConfig, str]] = {
    "experts": (
        Qwen3MoeConfig(**TWO, **EXPERTS, head_dim=16),
        "model.layers.1.mlp.experts.2.up_proj.weight",
    ),
    "window": (
        CONFIGS["mistral window"][0](**TWO | CONFIGS["mistral window"][1]),
        "model.layers.1.mlp.up_proj.weight",
    ),
}


def check_updates(a: Path, b: Path, name: str, folder: Path, config: EngineConfig) -> None:
    """From a to b, back to a, and then one tensor of b."""
    engine = build_engine(a, config)
    first, second = fresh_answers(a, config), fresh_answers(b, config)
    assert first != second
    assert answers(engine) == first
    change(engine, TensorUpdate(tensors_of(b).items()))
    assert answers(engine) == second
    change(engine, FolderUpdate(a))
    assert answers(engine) == first
    save(folder / "c", a, tensors_of(a) | {name: tensors_of(b)[name]})
    change(engine, TensorUpdate([(name, tensors_of(b)[name])]))
    assert answers(engine) == fresh_answers(folder / "c", config)
    engine.check()
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers(kind: str, tmp_path: Path) -> None:
    config, name = KINDS[kind]
    for seed, folder in enumerate(("a", "b")):
        write_checkpoint(config, tmp_path / folder, seed=seed)
    check_updates(tmp_path / "a", tmp_path / "b", name, tmp_path, CONFIG)


@pytest.mark.parametrize("name", ["gptq act-order", "fp8 blocks"])
def test_quantized_products(name: str, tmp_path: Path) -> None:
    """All tensors of a product come in the form that the files have."""
    (case,) = [case for case in CASES if case.name == name]
    write_quantized(LlamaConfig(**TWO), tmp_path / "a", case)
    before = tensors_of(tmp_path / "a")
    is_scale = [name for name, each in before.items() if name.endswith(("scales", "scale_inv"))]
    other = {name: before[name] * (1 + torch.rand_like(before[name])) for name in is_scale}
    save(tmp_path / "b", tmp_path / "a", before | other)
    check_updates(tmp_path / "a", tmp_path / "b", is_scale[0], tmp_path, CONFIG)
    packed = next(name for name, each in before.items() if not is_plain(each))
    engine = build_engine(tmp_path / "a", CONFIG)
    with pytest.raises(InvalidRequest, match=f"tensor {packed} has dtype F16, expected"):
        change(engine, TensorUpdate([(packed, torch.zeros(before[packed].shape).half())]))
    engine.close()


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def test_recurrent_layers(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(**HYBRID, linear_conv_kernel_dim=4)
    for seed, folder in enumerate(("a", "b")):
        write_checkpoint(config, tmp_path / folder, seed=seed, std=0.2)
    names = tensors_of(tmp_path / "b")
    name = next(name for name in names if name.endswith("linear_attn.A_log"))
    check_updates(tmp_path / "a", tmp_path / "b", name, tmp_path, CONFIG)
    engine = build_engine(tmp_path / "a", CONFIG)
    with pytest.raises(InvalidRequest, match="recurrent or windowed"):
        change(engine, FolderUpdate(tmp_path / "b"), UpdateMode.CONTINUE)
    engine.close()


@pytest.mark.skipif(not has_onednn(), reason="int8 needs oneDNN")
def test_weights_that_the_engine_quantizes(tmp_path: Path) -> None:
    for seed, folder in enumerate(("a", "b")):
        write_checkpoint(LlamaConfig(**TWO), tmp_path / folder, seed=seed)
    config = replace(CONFIG, model=replace(CONFIG.model, quantize=Quantize.INT8))
    name = "model.layers.1.mlp.up_proj.weight"
    check_updates(tmp_path / "a", tmp_path / "b", name, tmp_path, config)
