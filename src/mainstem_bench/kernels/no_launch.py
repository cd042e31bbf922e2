"""A driver that launches nothing, so that the host's part of a launch runs without a card.

Everything before the launch is Triton's own: arguments are bound and kernels compiled for Hopper.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget


class Launch(NamedTuple):
    """A launch as a card's driver would get it."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]  # constants included; a tensor is its address


class _Utils:
    """Answers what Triton asks a device; a function is represented by a number."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def load_binary(self, name: str, *_: object) -> tuple[int, ...]:
        """module, function, registers, spills, most threads."""
        self.names.append(name)
        return 1, len(self.names) - 1, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}


class NoLaunch:
    """Active from `triton.runtime.driver.set_active(NoLaunch())` on; keeps what is launched."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launched: list[Launch] = []

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of one compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: object) -> None:
            arguments = tuple(
                each.data_ptr() if isinstance(each, torch.Tensor) else each
                for each in rest[4:]  # after two kinds of metadata and two hooks
            )
            self.launched.append(Launch(self.utils.names[function], (x, y, z), arguments))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
