"""Recurrent layers: short convolutions, the gated delta rule, Mamba-2 scans, gated norms."""
