"""Attention kernels for Hopper only, in Gluon, the lower level of Triton."""
