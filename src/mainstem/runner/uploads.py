"""Sends arrays to the device."""

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Uploads:
    """Sends arrays to one device and keeps the pinned memory that kernels still read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in_use: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def send(self, array: NDArray[np.generic]) -> Tensor:
        """Send to the device, through pinned memory, without blocking."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        from mainstem.kernels.memory.upload import move_words  # noqa: PLC0415  # brings Triton

        pinned = tensor.pin_memory()
        if pinned.nbytes % 4:  # move_words copies words of 4 bytes
            return pinned.to(self.device, non_blocking=True)
        target = torch.empty_like(tensor, device=self.device)
        move_words(target.view(1, -1), pinned.view(1, -1))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._in_use.append((event, pinned))
        while self._in_use and self._in_use[0][0].query():  # type: ignore[no-untyped-call]
            self._in_use.popleft()
        return target
