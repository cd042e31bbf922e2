"""Decides which of many replicas answers a request. Uses no I/O and no clock (docs/scale.md)."""
