"""How benchmarks on random weights are set up, and how that is written into their results."""

import argparse
from dataclasses import asdict, fields, replace
from enum import Enum
from pathlib import Path

from mainstem.apps.flags import engine_config
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError


def random_config(args: argparse.Namespace, model_shape: str, kv_tokens: int) -> EngineConfig:
    """The engine flags, with a shape's name for a model, and KV memory unless they say it."""
    if args.model is not None:
        raise ConfigError("--model: weights are random here; choose a --model-shape")
    config = engine_config(args)
    return replace(
        config,
        model=replace(config.model, model=model_shape),
        cache=replace(config.cache, kv_tokens=config.cache.kv_tokens or kv_tokens),
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
