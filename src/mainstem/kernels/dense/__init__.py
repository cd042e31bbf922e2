"""Linears, norms and activations: everything in a layer except attention."""
