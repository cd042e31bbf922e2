"""The device a benchmark runs on: its name, its rates, its memory."""

import resource
from dataclasses import dataclass

import psutil
import torch

from mainstem.core.config import Device, EngineConfig
from mainstem.plan.cost import Card, measured_card


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that an engine with a given config runs on."""

    has_gpu: bool

    @classmethod
    def of(cls, config: EngineConfig) -> "Machine":
        return cls(config.model.device is not Device.CPU and torch.cuda.is_available())

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.has_gpu else "cpu"

    @property
    def card(self) -> Card | None:
        """Its rates; None for a GPU that was not calibrated (`mainstem calibrate`)."""
        return measured_card(self.name)

    def peak_bytes(self) -> int:
        """Peak memory: of tensors on the GPU or, without a GPU, of this process."""
        if self.has_gpu:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def held_bytes(self) -> int:
        """Memory that tensors hold on the GPU; 0 without a GPU."""
        return torch.cuda.memory_allocated() if self.has_gpu else 0


def process_bytes() -> int:
    """Memory that this process holds at the moment."""
    return psutil.Process().memory_info().rss
