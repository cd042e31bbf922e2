"""How benchmarks on random weights are set up, and how that is written into their results."""

import argparse
from dataclasses import asdict, fields, replace
from enum import Enum
from pathlib import Path

from mainstem.cli.flags import engine_config
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.shapes import SHAPES, ModelShape
from mainstem.runner.machine import available_bytes
from mainstem_bench.machine import Machine

FP32_BYTES = 4  # what a CPU computes in


def random_config(args: argparse.Namespace, model_shape: str, kv_tokens: int) -> EngineConfig:
    """The engine flags, with a shape's name for a model, and KV memory unless they say it."""
    flag = "--model-shape" if "model_shape" in args else "--workload"
    if args.model is not None:
        raise ConfigError(f"--model: weights are random here; choose a {flag}")
    config = engine_config(args)
    made = replace(
        config,
        model=replace(config.model, model=model_shape),
        cache=replace(config.cache, kv_tokens=config.cache.kv_tokens or kv_tokens),
    )
    if not Machine.of(made).has_gpu:
        num_tokens = made.cache.kv_tokens or kv_tokens
        check_room(SHAPES[model_shape], num_tokens, available_bytes(), f"{flag} tiny")
    return made


def check_room(shape: ModelShape, kv_tokens: int, free_bytes: int, smaller: str) -> None:
    """Refuse a shape that a machine without a GPU has no memory for, before it begins to swap;
    `smaller` is what to ask for instead."""
    kv_values = 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_tokens
    values = shape.layer_params + 2 * shape.head_params + kv_values
    if FP32_BYTES * values > free_bytes:
        raise ConfigError(
            f"{shape.name} with {kv_tokens:,} tokens of KV takes {FP32_BYTES * values / 1e9:.0f} GB"
            f" without a GPU, and {free_bytes / 1e9:.0f} are free: {smaller}"
        )


def settings(config: EngineConfig) -> dict[str, object]:
    """Every setting, by section and name, as JSON has them."""
    return {
        section.name: {
            name: _plain(value) for name, value in asdict(getattr(config, section.name)).items()
        }
        for section in fields(config)
    }


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
