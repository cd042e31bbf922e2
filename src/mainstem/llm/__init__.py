"""The Python API for scripts (docs/python.md).

llm.py     LLM: generate, chat, score, stream
loaded.py  a loaded model, with which AsyncLLM begins too
steps.py   the engine's steps, which a call and open streams share
"""

from mainstem.llm.llm import LLM
from mainstem.llm.loaded import LoadedModel, ReadyPrompt

__all__ = ["LLM", "LoadedModel", "ReadyPrompt"]
