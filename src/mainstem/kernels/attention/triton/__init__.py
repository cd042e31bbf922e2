"""Attention kernels in Triton, for any GPU."""
