"""Mainstem: LLM inference for requests that share context.

from mainstem import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mainstem.core.environment import keep_freed_memory
from mainstem.core.errors import (
    AnswerFailed,
    ConfigError,
    EngineLost,
    InvalidRequest,
    MainstemError,
    ModelNotFound,
    UnsupportedModel,
)
from mainstem.core.version import __version__
from mainstem.vllm_names import SamplingParams

if TYPE_CHECKING:
    from mainstem.async_llm import AsyncLLM
    from mainstem.llm import LLM

    # not in __all__: `from mainstem import *` would hide Python's own `map`
    from mainstem.map_table import map as map
    from mainstem.text.grammar import StructuredOutputsParams
    from mainstem.text.results import AnswerPiece, CompletionOutput, Logprob, RequestOutput
    from mainstem.text.scoring import ChoiceScore, ScoreOutput
    from mainstem.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AnswerFailed",
    "AnswerPiece",
    "AsyncLLM",
    "ChoiceScore",
    "CompletionOutput",
    "ConfigError",
    "EngineLost",
    "InvalidRequest",
    "Logprob",
    "MainstemError",
    "ModelNotFound",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "Tokenizer",
    "UnsupportedModel",
    "__version__",
]

# imported on first use: LLM and AsyncLLM import torch, the others the tokenizer's library
_LAZY = {
    "LLM": "mainstem.llm",
    "AsyncLLM": "mainstem.async_llm",
    "AnswerPiece": "mainstem.text.results",
    "ChoiceScore": "mainstem.text.scoring",
    "CompletionOutput": "mainstem.text.results",
    "Logprob": "mainstem.text.results",
    "RequestOutput": "mainstem.text.results",
    "ScoreOutput": "mainstem.text.scoring",
    "StructuredOutputsParams": "mainstem.text.grammar",
    "Tokenizer": "mainstem.text.tokenizer",
    "map": "mainstem.map_table",
}

keep_freed_memory()


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """All names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
