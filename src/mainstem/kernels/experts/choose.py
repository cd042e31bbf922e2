"""Which products a step of experts uses."""

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from mainstem.kernels.experts.products import (
    FEW,
    FULL_PRECISION,
    HOPPER,
    MANY,
    SOME,
    ExpertTiles,
)

log = logging.getLogger("mainstem.kernels")

_MOST_OF_FEW = 8
_MOST_OF_SOME = 48


def choose(num_rows: int, num_experts: int, x: Tensor, is_deterministic: bool) -> ExpertTiles:
    """How a step of `num_rows` = tokens * top_k rows of x is computed."""
    if x.dtype == torch.float32:
        return FULL_PRECISION
    if is_deterministic:
        return SOME
    rows = num_rows / num_experts
    if rows <= _MOST_OF_FEW:
        return FEW
    if rows <= _MOST_OF_SOME:
        return SOME
    is_apart = x.stride(0) % 16 == 0
    return HOPPER if is_apart and hopper_kernels(x.device) is not None else MANY


@cache
def hopper_kernels(device: torch.device) -> ModuleType | None:
    """hopper.py; None on other devices, or if this Triton's Gluon cannot compile it."""
    return _on_hopper("hopper", device)


@cache
def few_kernels(device: torch.device) -> ModuleType | None:
    """few.py; None on other devices, or if this Triton's Gluon cannot compile it."""
    return _on_hopper("few", device)


def _on_hopper(name: str, device: torch.device) -> ModuleType | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        return import_module(f"mainstem.kernels.experts.{name}")
    except (ImportError, AttributeError) as error:
        log.warning("using slower expert kernels: this Triton's Gluon is unsupported (%s)", error)
        return None
