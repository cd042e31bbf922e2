"""Errors of kernels: what they do not take, and what does not fit."""

from mainstem.core.errors import MainstemError


class LayoutError(MainstemError, ValueError):
    """A tensor or a plan that this kernel does not take; the message names what."""


class PlanTooLarge(MainstemError):
    """A step that does not fit the buffers made for it; the message names which limit."""
