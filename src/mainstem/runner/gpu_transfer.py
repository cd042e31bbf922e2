"""Copies of pages between a GPU and a pinned slab, on streams of their own.

    compute  | step n            | step n+1: layer 0 | layer 1 | ...
                                   ^ waits for event 0   ^ event 1
    loads    | session a | session b: layers 0-7 | 8-15 | ...
    saves    | pages of step n-1 |

The copy engines move a few layers of many slots as rows into one of two staging buffers, from which
a short kernel spreads them over the pages while the next rows come in. A save goes the other way,
all layers at once: nobody waits for one of them.
Host to device and device to host do not slow each other down, and neither takes a multiprocessor
for longer than the spreading. A save starts when its step is known to have ended, so it needs no
event of the compute stream.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s
from mainstem.kernels.transfer import PageMover
from mainstem.kernels.upload import move_words
from mainstem.kv.transfer import LoadId
from mainstem.models.decoder import Gate
from mainstem.runner.copy_engine import Rows
from mainstem.runner.gates import LAYERS_AT_ONCE
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.slab import HostSlab, slot_bytes

STAGING_BYTES = 64 << 20  # of one buffer; each direction has two


class GpuTransfer:
    """A copy on streams; events tell how far it is."""

    def __init__(self, num_layers: int, kept: Tensor) -> None:
        self._num_layers = num_layers
        self._kept = kept  # pinned, and read by a kernel
        self.begin = _event()
        self.events: list[torch.cuda.Event] = []
        self._num_groups_done = 0

    def num_layers_done(self) -> int:
        events = self.events
        while self._num_groups_done < len(events) and _is_over(events[self._num_groups_done]):
            self._num_groups_done += 1
        return min(self._num_groups_done * LAYERS_AT_ONCE, self._num_layers)

    def wait(self) -> None:
        self.events[-1].synchronize()

    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.events[-1])) * 1e-3


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


class _Staging:
    """Two buffers on the device, for one direction: one is filled while the other is emptied."""

    def __init__(self, page_bytes: int, device: torch.device, priority: int) -> None:
        """`page_bytes` of what is moved of a page at once."""
        self.pages = max(1, STAGING_BYTES // page_bytes)
        self._buffers = [
            torch.empty(self.pages * page_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._is_empty = [_event(), _event()]
        self._next = 0
        self.rows_stream = _stream(device, priority)  # of the copy engine
        self.pages_stream = _stream(device, priority)  # of the kernel

    def take(self, filling: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer that `filling` may fill, and the event to record when it is empty again."""
        self._next = 1 - self._next
        filling.wait_event(self._is_empty[self._next])
        return self._buffers[self._next], self._is_empty[self._next]

    def synchronize(self) -> None:
        self.rows_stream.synchronize()
        self.pages_stream.synchronize()


class GpuCopier:
    """PageCopier over the page tensors of a GPU."""

    def __init__(self, pages: GpuPages, host_bytes: int) -> None:
        layers = [pages.joint(layer) for layer in range(pages.num_layers)]
        _, _, kv_heads, page_size, dim = layers[0].shape
        shape = (len(layers), 2, kv_heads, page_size, dim)
        self._layer_bytes = layers[0][:, 0].nbytes
        page_bytes = self._layer_bytes * len(layers)
        num_slots = max(2, host_bytes // slot_bytes(page_bytes))
        self._device = layers[0].device
        self._num_layers = len(layers)
        self._slab = HostSlab(num_slots, shape, layers[0].dtype, is_pinned=True)
        self._mover = PageMover(layers)
        part_bytes = self._layer_bytes * min(LAYERS_AT_ONCE, len(layers))
        self._incoming = _Staging(part_bytes, self._device, priority=-1)
        self._outgoing = _Staging(page_bytes, self._device, priority=0)
        self._loads: dict[LoadId, GpuTransfer] = {}
        self._compile()

    def _compile(self) -> None:
        """A page there and back, before anybody waits for one."""
        first = torch.zeros(1, dtype=torch.int32, device=self._device)
        buffer, _ = self._outgoing.take(torch.cuda.current_stream())
        self._mover.collect(buffer, first, 0, self._num_layers)
        self._mover.spread(buffer, first, 0, self._num_layers)
        torch.cuda.synchronize(self._device)

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
        staging = self._outgoing
        slots, pages = _by_slot(slots, pages)
        rows = Rows(self._slab.slot_bytes, self._slab.page_bytes)
        with torch.cuda.stream(staging.pages_stream):
            transfer, on_device = self._begin(pages)
            for part in _parts(len(slots), staging.pages):
                buffer, is_empty = staging.take(staging.pages_stream)
                self._mover.collect(buffer, on_device[part], 0, self._num_layers)
                staging.rows_stream.wait_stream(staging.pages_stream)
                for row, slot, length in _runs(slots[part]):
                    rows.to_host(
                        buffer.data_ptr() + row * self._slab.page_bytes,
                        self._address(slot, 0), length, staging.rows_stream.cuda_stream,
                    )  # fmt: skip
                is_empty.record(staging.rows_stream)
            transfer.events = [_recorded(staging.rows_stream)] * self._num_groups()
        return transfer

    def load(self, load_id: LoadId, slots: Int32s, pages: Int32s) -> GpuTransfer:
        staging = self._incoming
        slots, pages = _by_slot(slots, pages)
        with torch.cuda.stream(staging.pages_stream):
            transfer, on_device = self._begin(pages)
            for first, count in self._groups():
                rows = Rows(self._slab.slot_bytes, count * self._layer_bytes)
                for part in _parts(len(slots), staging.pages):
                    buffer, is_empty = staging.take(staging.rows_stream)
                    for row, slot, length in _runs(slots[part]):
                        rows.to_device(
                            self._address(slot, first),
                            buffer.data_ptr() + row * count * self._layer_bytes,
                            length, staging.rows_stream.cuda_stream,
                        )  # fmt: skip
                    staging.pages_stream.wait_stream(staging.rows_stream)
                    self._mover.spread(buffer, on_device[part], first, count)
                    is_empty.record(staging.pages_stream)
                transfer.events.append(_recorded(staging.pages_stream))
        self._loads[load_id] = transfer
        return transfer

    def forget(self, load_id: LoadId) -> None:
        self._loads.pop(load_id, None)

    def gate(self, load_ids: Int32s) -> Gate:
        """Of loads that are not forgotten; those that are have come to their end."""
        known = (self._loads.get(LoadId(load_id)) for load_id in load_ids.tolist())
        return GpuGate([transfer for transfer in known if transfer is not None])

    def drain(self) -> None:
        self._incoming.synchronize()
        self._outgoing.synchronize()

    def close(self) -> None:
        self.drain()
        self._slab.close()

    def _begin(self, pages: Int32s) -> tuple[GpuTransfer, Tensor]:
        """A transfer that begins on the current stream, and its page ids on the device."""
        pinned = torch.empty(len(pages), dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = pages
        transfer = GpuTransfer(self._num_layers, pinned)
        transfer.begin.record()
        on_device = torch.empty(len(pages), dtype=torch.int32, device=self._device)
        move_words(on_device[None], pinned[None])
        return transfer, on_device

    def _num_groups(self) -> int:
        return -(-self._num_layers // LAYERS_AT_ONCE)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """First layer and number of layers."""
        for first in range(0, self._num_layers, LAYERS_AT_ONCE):
            yield first, min(LAYERS_AT_ONCE, self._num_layers - first)

    def _address(self, slot: int, layer: int) -> int:
        return self._slab.address + slot * self._slab.slot_bytes + layer * self._layer_bytes


def _by_slot(slots: Int32s, pages: Int32s) -> tuple[Int32s, Int32s]:
    """Neighbouring slots are copied in one go."""
    order = np.argsort(slots)
    return slots[order], pages[order]


def _parts(count: int, at_once: int) -> Iterator[slice]:
    for begin in range(0, count, at_once):
        yield slice(begin, min(begin + at_once, count))


def _runs(slots: Int32s) -> Iterator[tuple[int, int, int]]:
    """(place, slot, length) of neighbouring slots, ascending."""
    ends = np.flatnonzero(np.diff(slots) != 1) + 1
    begins = [0, *ends.tolist()]
    for begin, end in zip(begins, [*begins[1:], len(slots)], strict=True):
        yield begin, int(slots[begin]), end - begin


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = _event()
    event.record(stream)
    return event


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
