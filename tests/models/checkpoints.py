"""Tiny random checkpoints, written by transformers."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 199
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
SMALL: dict[str, Any] = {  # fields that most configs of transformers have
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# these store gain - 1
GAINS_FROM_ZERO = {"gemma", "gemma2", "gemma3_text", "nemotron"}
# Falcon has other names for some of them
SMALL_FALCON = {
    name: value
    for name, value in SMALL.items()
    if name not in {"intermediate_size", "num_key_value_heads"}
}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "llama mha": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "yarn rope": (LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "yarn rope, other bounds": (
        LlamaConfig,
        {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
    ),
    "llama biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "smollm2 (tied)": (LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral window": (MistralConfig, {"sliding_window": 24, "head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, some windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
}


def make_checkpoint(
    name: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard: str = "1GB",
    **sizes: int,
) -> PreTrainedModel:
    """Write the named model to `folder`; returns the transformers model it was written from.

    `sizes` override fields of its config.
    """
    config_class, changes = CONFIGS[name]
    config = config_class(**{**SMALL, **changes, **sizes})
    return write_checkpoint(config, folder, seed=len(name), dtype=dtype, max_shard=max_shard)


def write_checkpoint(
    config: PreTrainedConfig,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard: str = "1GB",
) -> PreTrainedModel:
    """Write a random model of this config to `folder`; returns the model it was written from."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # the default weights are so small that a wrong layer would hardly show, and default
            # gains and biases do nothing
            parameter.normal_(std=0.3)
            is_gain = any(part in parameter_name for part in ("norm", "ln_"))
            if is_gain and config.model_type not in GAINS_FROM_ZERO:
                parameter.add_(1.0)
        saved = model.state_dict().keys()
        for buffer_name, buffer in model.named_buffers():
            if buffer_name in saved and buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard)
    return model


def change_in_place(folder: Path, name: str) -> None:
    """Change one number in the middle of a tensor; the file stays as long as it was."""
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(header_bytes))[name]["data_offsets"]
        file.seek(8 + header_bytes + (begin + end) // 8 * 4)
        file.write(struct.pack("<f", 3.25))
