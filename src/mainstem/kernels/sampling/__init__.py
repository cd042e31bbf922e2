"""Token ids from logits."""
