"""Attention kernels in Triton, for any card."""
