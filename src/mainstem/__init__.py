"""Mainstem: LLM inference for work whose context is shared."""

__version__ = "0.1.0"
