"""Which pages are kept, and on which tier. Only kv/bytes uses tensors."""
