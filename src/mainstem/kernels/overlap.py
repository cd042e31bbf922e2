# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Kernels that are launched while the previous kernel still runs (programmatic dependent launch,
from Hopper on). Such a kernel fetches its code and data that never changes, then waits for the
previous kernel to end. Until then it writes nothing, and reads nothing that may still be written.

    a (product) | runs ............ ends
    b (norm)    |      let in: waits ... runs ... ends
    c           |           let in: waits for b only ... runs

Most kernels let the next one in before they wait themselves, so `c` may start while `a` still runs,
and `c` waits only for `b`. When `b` has ended, `a` has ended too: in every such kernel all
programs, or at least one that always runs, wait for the previous kernel.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_ahead(OVERLAPS: tl.constexpr):
    """Let the next kernel be launched, then wait for the previous one."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_alone(OVERLAPS: tl.constexpr):
    """Wait for the previous kernel; `let_in` is called later. For kernels with as many programs as
    fit the device: if let in early, the next kernel would take places that their programs need."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_in(OVERLAPS: tl.constexpr):
    """Let the next kernel be launched. It starts once all programs have called this."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may begin before the previous one has ended (from Hopper on)."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with an OVERLAPS constant."""
    if not can_overlap(device):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
