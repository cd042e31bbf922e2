"""Plans of attention on their way to a device."""

from typing import Protocol

import torch
from torch import Tensor

from mainstem.core.step import Int32s
from mainstem.kernels.memory.upload import move_words


class Ints(Protocol):
    """A plan, or a part of one."""

    @property
    def num_ints(self) -> int: ...

    def write(self, ints: Int32s) -> None:
        """Write all ints."""


class PlanStaging:
    """Host memory of a plan on its way to the device; grows to what plans need."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type != "cpu"
        self._make(0)
        self._copied = torch.cuda.Event() if self._is_pinned else None  # type: ignore[no-untyped-call]

    def send(self, plan: Ints, target: Tensor) -> None:
        """Copy to a row on the device, on the current stream; waits only for the last copy from
        this host memory."""
        if self._copied is not None:
            self._copied.synchronize()
        count = plan.num_ints
        if count > len(self._host):
            self._make(min(2 * count, target.shape[1]))
        plan.write(self._host[:count])
        move_words(target[:, :count], self._ints[:, :count])
        if self._copied is not None:
            self._copied.record()

    def _make(self, count: int) -> None:
        is_pinned = self._is_pinned and count > 0
        self._ints = torch.empty((1, count), dtype=torch.int32, pin_memory=is_pinned)
        self._host = self._ints.numpy()[0]  # the same memory as a numpy array
