"""Mainstem: LLM inference for work whose context is shared.

from mainstem import LLM, SamplingParams
"""

from typing import TYPE_CHECKING

from mainstem.core.config import keep_freed_memory
from mainstem.core.errors import InvalidRequest, MainstemError
from mainstem.core.request import SamplingParams

if TYPE_CHECKING:
    from mainstem.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "InvalidRequest", "MainstemError", "SamplingParams", "__version__"]

keep_freed_memory()


def __getattr__(name: str) -> object:
    """LLM pulls in torch, so it is imported when first asked for."""
    if name == "LLM":
        from mainstem.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
