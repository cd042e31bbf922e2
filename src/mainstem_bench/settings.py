"""Settings of benchmarks on random weights, and how results record them."""

import argparse
from dataclasses import asdict, fields, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from mainstem.cli.flags import engine_config
from mainstem.core.config import DType, EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.runner.machine import available_bytes
from mainstem_bench.machine import Machine
from mainstem_bench.shapes import SHAPES

FP32_BYTES = 4  # CPUs compute in fp32


def random_config(
    args: argparse.Namespace, model_shape: str, kv_tokens: int, *, is_virtual: bool = False
) -> EngineConfig:
    """Make the config from the engine flags. The model is the name of a shape; `kv_tokens` is used
    unless a flag sets it. A virtual engine has no weights and no KV."""
    flag = "--model-shape" if "model_shape" in args else "--workload"
    if args.model is not None:
        raise ConfigError(f"--model: weights are random here; choose a {flag}")
    config = engine_config(args)
    if config.cache.memory_share is not None:
        raise ConfigError("--gpu-memory-utilization: benchmarks fix the KV memory; use --kv-tokens")
    made = replace(
        config,
        model=replace(config.model, model=model_shape),
        cache=replace(config.cache, kv_tokens=config.cache.kv_tokens or kv_tokens),
    )
    if not is_virtual and not Machine.of(made).has_gpu:
        num_tokens = made.cache.kv_tokens or kv_tokens
        check_room(model_shape, num_tokens, available_bytes(), f"{flag} tiny")
    return made


def check_room(name: str, kv_tokens: int, free_bytes: int, smaller: str) -> None:
    """Refuse a shape that does not fit the memory of a machine without a GPU, before the machine
    begins to swap. `smaller` is the advice in the error."""
    shape = SHAPES[name]
    values = shape.num_weights + shape.kv_elements_per_token * kv_tokens
    if FP32_BYTES * values > free_bytes:
        raise ConfigError(
            f"{name} with {kv_tokens:,} tokens of KV takes {FP32_BYTES * values / 1e9:.0f} GB"
            f" without a GPU, and {free_bytes / 1e9:.0f} are free: use {smaller}"
        )


def kv_token_bytes(config: EngineConfig) -> float:
    """Bytes of a token's K and V in the lower tiers, for a model that is the name of a shape."""
    is_wide = config.model.dtype is DType.FP32 or not Machine.of(config).has_gpu
    return SHAPES[config.model.model].kv_elements_per_token * (FP32_BYTES if is_wide else 2)


def empty_folder(disk_dir: str | None) -> TemporaryDirectory[str]:
    """Make an empty folder for pages, which is removed at the end: in `disk_dir` if it is given,
    otherwise among temporary files. A benchmark clears its store, and must not delete pages that a
    user has in `disk_dir`."""
    if disk_dir is None:
        try:
            return TemporaryDirectory(prefix="mainstem-bench-")
        except OSError as error:  # it names the folder
            advice = "set --disk-dir, or TMPDIR, to a folder for the pages"
            raise ConfigError(f"no temporary folder can be made: {error}; {advice}") from None
    parent = Path(disk_dir).expanduser()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix="mainstem-bench-", dir=parent)
    except OSError as error:
        raise ConfigError(f"--disk-dir: no folder can be made in {parent}: {error}") from None


def settings(config: EngineConfig) -> dict[str, object]:
    """Return every setting by section and name, as JSON values."""
    return {
        section.name: {
            name: _plain(value) for name, value in asdict(getattr(config, section.name)).items()
        }
        for section in fields(config)
    }


def measured_on(config: EngineConfig, load_before: float | None) -> dict[str, object]:
    """What lines say about where they were measured."""
    return {
        "device": Machine.of(config).name,
        "settings": settings(config),
        "load_before": load_before,
    }


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
