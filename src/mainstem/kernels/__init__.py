"""Kernels: tensors in, tensors out. Span attention can be used without an engine:

    from mainstem.kernels import AttentionLimits, SpanAttention

Names are imported when first used, so that the CPU path needs no Triton.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainstem.kernels.attention.ops import AttentionLimits, SpanAttention
    from mainstem.kernels.errors import LayoutError, PlanTooLarge
    from mainstem.kernels.memory.append import rope_append
    from mainstem.kernels.memory.rotate import rerotate

__all__ = [
    "AttentionLimits",
    "LayoutError",
    "PlanTooLarge",
    "SpanAttention",
    "rerotate",
    "rope_append",
]

_HOMES = {
    "LayoutError": "errors",
    "AttentionLimits": "attention.ops",
    "PlanTooLarge": "errors",
    "SpanAttention": "attention.ops",
    "rerotate": "memory.rotate",
    "rope_append": "memory.append",
}


def __getattr__(name: str) -> object:
    from importlib import import_module  # noqa: PLC0415

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
