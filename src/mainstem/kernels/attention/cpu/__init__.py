"""Span attention for CPUs."""

from mainstem.kernels.attention.cpu.attention import SpanPlan, plan
from mainstem.kernels.attention.cpu.keys import PageShape

__all__ = ["PageShape", "SpanPlan", "plan"]
