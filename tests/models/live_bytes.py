"""Counts the memory of tensors, now and at its peak."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that operations made; views, and parts of a mapped file
    (`set_`), do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        made: object = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view and func._opname != "set_":
            storage = made.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self._count(storage.nbytes())
                weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())
        return made

    def _count(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def _forget(self, pointer: int, num_bytes: int) -> None:
        self._known.discard(pointer)
        self.now -= num_bytes
