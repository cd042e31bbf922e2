"""Attention kernels in Gluon, Triton's lower level, for Hopper alone."""
