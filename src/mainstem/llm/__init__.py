"""The Python API for scripts (docs/python.md).

llm.py     LLM: generate, chat, score, stream
loaded.py  a loaded model, which AsyncLLM has too
steps.py   the engine's steps, which a call and open streams share
"""

from mainstem.llm.llm import LLM

__all__ = ["LLM"]
