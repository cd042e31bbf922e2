"""Tiny quantized checkpoints, and plain models with the same (dequantized) weights."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from mainstem.models.config_file import CONFIG_FILE
from mainstem.models.weight_files import SINGLE_FILE
from tests.models.checkpoints import write_checkpoint
from tests.models.quantized.oracles import Case, Tensors, mxfp4


def write_quantized(
    config: PreTrainedConfig, folder: Path, case: Case, plain: tuple[str, ...] = ()
) -> PreTrainedModel:
    """Write a random model of this config with every product of its layers quantized, except those
    whose names end with one of `plain`; returns the plain model with the dequantized weights."""
    model = write_checkpoint(config, folder)
    tensors = load_file(folder / SINGLE_FILE)
    rng = np.random.default_rng(0)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or ".layers." not in f".{name}":
            continue
        if plain and name.endswith(plain):
            continue
        packed, numbers = case.make(rng, *module.weight.shape)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(numbers))
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{ending}": tensor for ending, tensor in packed.items()}
    save_quantized(folder, tensors, case.config | _excluding(case, plain))
    return model


def _excluding(case: Case, plain: tuple[str, ...]) -> dict[str, object]:
    """How tools write that products are not quantized. GPTQModel also names modules that have no
    settings of their own."""
    if not plain:
        return {}
    if case.config["quant_method"] == "gptq":
        return {"dynamic": {"lm_head": {}} | {f"-:.*{name}.*": {} for name in plain}}
    return {"modules_to_not_convert": [f"*{name}" for name in plain]}


def write_quantized_experts(
    config: PreTrainedConfig, folder: Path, case: Case, plain: tuple[str, ...] = ()
) -> PreTrainedModel:
    """Like `write_quantized`, for Qwen's mixtures of experts; only the experts are quantized, and
    the others are `plain` by name or by their tensors.

    Transformers keeps all experts of a layer in two tensors.
    """
    model = write_checkpoint(config, folder)
    tensors = load_file(folder / SINGLE_FILE)
    rng, experts = np.random.default_rng(0), {}
    for name in [name for name in tensors if ".experts." in name]:
        out, width = tensors.pop(name).shape
        packed, numbers = case.make(rng, out, width)
        experts[name.removesuffix(".weight")] = torch.from_numpy(numbers)
        tensors |= {f"{name.removesuffix('.weight')}.{e}": t for e, t in packed.items()}
    with torch.no_grad():
        for name, module in model.named_modules():
            if not name.endswith("mlp.experts"):
                continue
            for index in range(len(module.gate_up_proj)):
                one = {p: experts[f"{name}.{index}.{p}_proj"] for p in ("gate", "up", "down")}
                module.gate_up_proj[index] = torch.cat((one["gate"], one["up"]))
                module.down_proj[index] = one["down"]
    save_quantized(folder, tensors, case.config | _excluding(case, plain))
    return model


def write_gpt_oss(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Like `write_quantized`, for gpt-oss: only the experts are quantized, to MXFP4."""
    model = write_checkpoint(config, folder)
    tensors = load_file(folder / SINGLE_FILE)
    rng = np.random.default_rng(0)
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, width, out = tensors.pop(name).shape
        made = [mxfp4(rng, out, width) for _ in range(experts)]
        for part in ("blocks", "scales"):
            tensors[f"{name}_{part}"] = torch.stack([one[part] for one, _ in made])
        with torch.no_grad():
            numbers = torch.stack([torch.from_numpy(found).t() for _, found in made])
            model.get_parameter(name).copy_(numbers)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    save_quantized(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return model


def save_quantized(folder: Path, tensors: Tensors, quantization: dict[str, object]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    path = folder / CONFIG_FILE
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
