"""Errors of kernels: unsupported input, and steps that do not fit."""

from mainstem.core.errors import MainstemError


class LayoutError(MainstemError, ValueError):
    """A tensor or plan that this kernel does not support; the message says what is wrong."""


class PlanTooLarge(MainstemError):
    """A step that does not fit the buffers made for it; the message names the limit."""
