"""Who holds which page, on which tier. No tensors outside kv/bytes."""
