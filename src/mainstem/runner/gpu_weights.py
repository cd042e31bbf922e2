"""How the weights of a GpuRunner change, and how it gives its memory back.

update   a layer at a time: made anew, then copied over the old one; CUDA graphs stay valid
sleep    the memory of weights and pages is freed, and the graphs are dropped
wake     memory at other addresses; the graphs are captured again, as at the start
"""

from collections.abc import Iterable
from weakref import proxy

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel, WeightsLost
from mainstem.core.weights import Tag
from mainstem.models.gpu.decoder import DecoderChange
from mainstem.models.spec import ModelSpec
from mainstem.models.weights import Checkpoint
from mainstem.runner.gpu import GpuRunner
from mainstem.runner.gpu_rounded import RoundedGpuPages


class GpuParts:
    """See Parts in runner/weights.py."""

    keeps_values = False  # they would take as much host memory as the weights

    def __init__(self, runner: GpuRunner, spec: ModelSpec) -> None:
        """`spec` describes the whole model."""
        self._runner: GpuRunner = proxy(runner)  # which holds this
        self._spec = spec
        self._weights: list[Freed] = []  # while they sleep
        self._pages: list[Freed] = []

    def change(self, source: Checkpoint, names: frozenset[str] | None) -> None:
        scale = self._spec.names.layer_scale
        if self._spec.has_layer_scale and (names is None or any(scale in name for name in names)):
            raise UnsupportedModel(f"{scale} is a number in CUDA graphs and cannot change")
        change = self._change
        with torch.inference_mode():
            plan = change.plan(source, self._spec, names)
            self._restore_weights()
            try:
                change.run(plan)
                self._synchronize()
                self._capture()
            except Exception as error:
                raise WeightsLost(
                    f"an update stopped in the middle ({error}): update all weights again"
                ) from error

    def sleep(self, level: int) -> None:
        runner = self._runner
        runner.drop_graphs()
        try:
            for each in storages(self._change.tensors()):
                self._weights.append(Freed(each, level == 1))
        except Exception:  # too little host memory
            self._restore_weights()
            self._capture()
            raise
        pages = runner.pages
        tensors = list(pages.tensors)
        if isinstance(pages, RoundedGpuPages):
            tensors += pages.opened.tensors
        if runner.states is not None:
            tensors.append(runner.states.pieces)
        self._pages = [Freed(each, False) for each in storages(tensors)]
        if torch.cuda.is_available():
            self._synchronize()
            torch.cuda.empty_cache()

    def wake(self, tags: frozenset[Tag], source: Checkpoint | None) -> None:
        if Tag.KV_CACHE in tags:
            _restore(self._pages)
        if Tag.WEIGHTS in tags:
            self._restore_weights()
            if source is not None:
                self.change(source, None)
        self._capture()

    @property
    def _change(self) -> DecoderChange:
        change = self._runner.decoder.change
        assert change is not None, "a decoder that was not loaded"
        return change

    def _restore_weights(self) -> None:
        _restore(self._weights)

    def _capture(self) -> None:
        """Capture the graphs that `sleep` dropped, if all memory is there."""
        if not self._weights and not self._pages and not self._runner.has_graphs:
            self._runner.capture_again()

    def _synchronize(self) -> None:
        if self._runner.can_overlap:
            torch.cuda.synchronize()


class Freed:
    """Memory that was given back. The tensors over it stay as they are, without contents."""

    def __init__(self, storage: torch.UntypedStorage, keeps_contents: bool) -> None:
        """`keeps_contents`: in pinned host memory, if there is a GPU."""
        self._storage = storage
        self._num_bytes = storage.nbytes()
        self._contents: Tensor | None = None
        if keeps_contents:
            is_cuda = storage.device.type == "cuda"
            self._contents = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            self._contents.copy_(self._bytes(), non_blocking=is_cuda)
            if is_cuda:
                torch.cuda.synchronize()
        if storage.resizable():  # all memory of a GPU is; views of files are not
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again, with what was kept, or zeros."""
        if not self._storage.resizable():
            return
        self._storage.resize_(self._num_bytes)
        if self._contents is None:
            self._bytes().zero_()
        else:
            self._bytes().copy_(self._contents)
            self._contents = None

    def _bytes(self) -> Tensor:
        device = self._storage.device
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self._storage)


def _restore(freed: list[Freed]) -> None:
    """Empties the list. After an error, which may be too little memory, it holds the others, so
    that a later call goes on."""
    while freed:
        freed[-1].restore()
        freed.pop()


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The memory under these tensors, each once."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return [*{each.data_ptr(): each for each in found if each.nbytes()}.values()]
