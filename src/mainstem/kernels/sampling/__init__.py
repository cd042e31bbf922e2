"""Kernels that choose token ids from logits."""
