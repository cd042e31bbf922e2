"""Which pages are held, and on which tier. No tensors outside kv/bytes."""
