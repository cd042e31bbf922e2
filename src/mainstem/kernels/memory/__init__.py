"""Kernels that write, copy, rotate and upload K, V and inputs."""
