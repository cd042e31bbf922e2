# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""A kernel that is launched while the one ahead of it still runs (programmatic dependent launch,
from Hopper on). It fetches its code and what does not change, and waits; nothing is read or written
that the kernel ahead may write or read before it has ended.

    a (product) | runs ............ ends
    b (norm)    |      let in: waits ... runs ... ends
    c           |           let in: waits for b only ... runs

A kernel lets the next one in before it waits itself, so `c` may be there while `a` still runs, and
what it waits for is the end of `b` alone. That `a` has ended by then is due to `b`: of every kernel
launched so, all programs wait, or at least one that always runs, so none ends before the one ahead.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_ahead(OVERLAPS: tl.constexpr):
    """Let the kernel behind be launched, then wait for the one ahead."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_alone(OVERLAPS: tl.constexpr):
    """Wait for the kernel ahead; `let_in` is called later. For kernels whose programs are counted
    to fill the device once: those of the kernel behind would take places among them."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_in(OVERLAPS: tl.constexpr):
    """Let the kernel behind be launched, once all programs have come here."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may begin before the one ahead of it has ended (from Hopper on)."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """What a kernel with an OVERLAPS constant is launched with."""
    if not can_overlap(device):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
