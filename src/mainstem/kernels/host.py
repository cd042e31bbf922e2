"""What the host does around launches, cheaply: a step of a large model has 700 of them, and unless
it is a CUDA graph, the host takes as long as the device."""

from triton import JITFunction


def cdiv(total: int, part: int) -> int:
    """How many parts hold `total`. (triton.cdiv does the same in 5 us.)"""
    return -(-total // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`; 0 of 0. (Triton's takes 5 us as well.)"""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def forget_constants(kernel: JITFunction) -> None:
    """After a launch. Before each one Triton compares the global constants of a kernel with those
    that it was compiled with, 1.4 us each; ours never change."""
    kernel.used_global_vals.clear()
