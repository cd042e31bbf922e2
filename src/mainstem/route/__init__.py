"""Which of many replicas answers a request: no I/O, no clock (docs/scale.md)."""
