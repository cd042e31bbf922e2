"""Linears, norms and activations: what a layer does beside attention."""
