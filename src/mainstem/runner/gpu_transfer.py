"""Copies of pages between a GPU and a pinned slab, on streams of their own.

    compute  | step n            | step n+1: layer 0 | layer 1 | ...
                                   ^ waits for event 0   ^ event 1
    loads    | session a | session b: layers 0-3 | 4-7 | ...
    saves    | pages of step n-1 |

Host to device and device to host do not slow each other down. A save starts when its step is known
to have ended, so it needs no event of the compute stream.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s
from mainstem.kernels.transfer import PageMover
from mainstem.kv.transfer import LoadId
from mainstem.models.decoder import Gate
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.slab import HostSlab, slot_bytes

LAYERS_AT_ONCE = 4  # one launch, one event


class GpuTransfer:
    """A copy on a stream; events tell how far it is."""

    def __init__(self, places: Tensor, num_layers: int) -> None:
        self._places = places  # the kernels read it while they run
        self._num_layers = num_layers
        self._begin = _event()
        self.events: list[torch.cuda.Event] = []
        self._num_groups_done = 0

    def run(self, copy: Callable[[Tensor, int, int], None]) -> None:
        """Queue the copy on the current stream."""
        self._begin.record()
        for first in range(0, self._num_layers, LAYERS_AT_ONCE):
            copy(self._places, first, min(LAYERS_AT_ONCE, self._num_layers - first))
            event = _event()
            event.record()
            self.events.append(event)

    def num_layers_done(self) -> int:
        events = self.events
        while self._num_groups_done < len(events) and _is_over(events[self._num_groups_done]):
            self._num_groups_done += 1
        return min(self._num_groups_done * LAYERS_AT_ONCE, self._num_layers)

    def wait(self) -> None:
        self.events[-1].synchronize()

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self.events[-1])) * 1e-3


class GpuGate:
    """Makes the compute stream wait, layer by layer; the host goes on."""

    def __init__(self, transfers: list[GpuTransfer]) -> None:
        self._transfers = transfers

    def before(self, layer: int) -> None:
        if layer % LAYERS_AT_ONCE == 0:
            stream = torch.cuda.current_stream()
            for transfer in self._transfers:
                stream.wait_event(transfer.events[layer // LAYERS_AT_ONCE])

    def after(self, layer: int) -> None:
        pass


class GpuCopier:
    """PageCopier over the page tensors of a GPU."""

    def __init__(self, pages: GpuPages, host_bytes: int) -> None:
        layers = [pages.joint(layer) for layer in range(pages.num_layers)]
        _, _, kv_heads, page_size, dim = layers[0].shape
        shape = (len(layers), 2, kv_heads, page_size, dim)
        page_bytes = layers[0][:, 0].nbytes * len(layers)
        num_slots = max(2, host_bytes // slot_bytes(page_bytes))
        self._device = layers[0].device
        self._num_layers = len(layers)
        self._slab = HostSlab(num_slots, shape, layers[0].dtype, is_pinned=True)
        self._mover = PageMover(layers, self._slab.address, self._slab.slot_bytes)
        self._load_stream = _stream(self._device, priority=-1)
        self._save_stream = _stream(self._device, priority=0)
        self._loads: dict[LoadId, GpuTransfer] = {}

    @property
    def num_slots(self) -> int:
        return self._slab.num_slots

    @property
    def num_layers(self) -> int:
        return self._num_layers

    @property
    def page_bytes(self) -> int:
        return self._slab.page_bytes

    def slot(self, slot: int) -> memoryview:
        return self._slab.slot(slot)

    def save(self, pages: Int32s, slots: Int32s) -> GpuTransfer:
        return self._start(self._save_stream, self._mover.to_host, slots, pages)

    def load(self, load_id: LoadId, slots: Int32s, pages: Int32s) -> GpuTransfer:
        transfer = self._start(self._load_stream, self._mover.to_device, slots, pages)
        self._loads[load_id] = transfer
        return transfer

    def forget(self, load_id: LoadId) -> None:
        self._loads.pop(load_id, None)

    def gate(self, load_ids: Int32s) -> Gate:
        """Of loads that are not forgotten; those that are have come to their end."""
        known = (self._loads.get(LoadId(load_id)) for load_id in load_ids.tolist())
        return GpuGate([transfer for transfer in known if transfer is not None])

    def close(self) -> None:
        self._load_stream.synchronize()
        self._save_stream.synchronize()
        self._slab.close()

    def _start(
        self,
        stream: torch.cuda.Stream,
        copy: Callable[[Tensor, int, int], None],
        slots: Int32s,
        pages: Int32s,
    ) -> GpuTransfer:
        places = torch.empty((len(slots), 2), dtype=torch.int64, pin_memory=True)
        places.numpy()[:] = np.stack((slots, pages), axis=1)
        transfer = GpuTransfer(places, self._num_layers)
        with torch.cuda.stream(stream):
            transfer.run(copy)
        return transfer


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
