"""Copies pages between a GPU and a pinned slab, on separate streams.

    compute  | step n            | step n+1: layer 0 | layer 1 | ...
                                   ^ waits for event 0   ^ event 1
    loads    | session a | session b: layers 0-7 | 8-15 | ...
    saves    | pages of step n-1 |

A load moves a few layers of many slots at a time, which are rows in the slab. The copy engines move
these rows into one of two staging buffers; a short kernel copies them to the pages while the next
rows arrive. A save copies all layers of a page at once, since no step waits for it; these are rows
on the device, which the engines read in place. Host-to-device and device-to-host copies do not slow
each other down, and only the short kernel uses multiprocessors. A save starts when its step has
ended, so it needs no event of the compute stream.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s
from mainstem.kernels.memory.transfer import PageSpread
from mainstem.kernels.memory.upload import move_words
from mainstem.kv.transfer import LoadId
from mainstem.models.block import Gate
from mainstem.runner.copy_engine import MAX_PITCH, PitchedRows
from mainstem.runner.gates import LAYERS_AT_ONCE
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.gpu_rounded import RoundedGpuPages
from mainstem.runner.slab import WHOLE, HostSlab, SlabPart
from mainstem.runner.states import DeviceStates, SplitCopy, StatePieces

STAGING_BYTES = 128 << 20  # size of each of the two buffers: 4,000 tokens of 8 layers of Llama 8B


class GpuTransfer:
    """A copy on streams; events show its progress."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.kept: list[Tensor] = []  # pinned memory, kept alive while a kernel reads it
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
    """Makes the compute stream wait, layer by layer; the host does not wait."""

    def __init__(self, transfers: list[GpuTransfer]) -> None:
        self._transfers = transfers

    def before(self, layer: int) -> None:
        if layer % LAYERS_AT_ONCE == 0:
            stream = torch.cuda.current_stream()
            for transfer in self._transfers:
                stream.wait_event(transfer.events[layer // LAYERS_AT_ONCE])


class _Staging:
    """Two buffers on the device: one is filled while the other is emptied."""

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        """`page_bytes` is the number of bytes of a page that are moved at once."""
        self.pages = max(1, STAGING_BYTES // page_bytes)
        self._buffers = [
            torch.empty(self.pages * page_bytes // 4, dtype=torch.int32, device=device)
            for _ in range(2)
        ]
        self._is_full, self._is_empty = [_event(), _event()], [_event(), _event()]
        self._next = 0
        self.rows_stream = _stream(device, priority=-1)  # stream of the copy engine
        self.pages_stream = _stream(device, priority=-1)  # stream of the kernel

    def take(self) -> Tensor:
        """Return a buffer to fill on `rows_stream`; then call `filled` and `emptied`."""
        self._next = 1 - self._next
        self.rows_stream.wait_event(self._is_empty[self._next])
        return self._buffers[self._next]

    def filled(self) -> None:
        """The rows of the buffer are queued: what is queued on `pages_stream` from now on reads
        it."""
        self._is_full[self._next].record(self.rows_stream)
        self.pages_stream.wait_event(self._is_full[self._next])

    def emptied(self) -> None:
        """All that reads the buffer is queued."""
        self._is_empty[self._next].record(self.pages_stream)

    def synchronize(self) -> None:
        self.rows_stream.synchronize()
        self.pages_stream.synchronize()


class GpuCopier:
    """PageCopier over the page tensors of a GPU."""

    def __init__(
        self,
        pages: GpuPages | RoundedGpuPages,
        host_bytes: int,
        part: SlabPart = WHOLE,
        states: DeviceStates | None = None,
    ) -> None:
        shapes = [(len(each), 2, *each.shape[3:]) for each in pages.tensors]
        self._device, dtype = pages.tensors[0].device, pages.tensors[0].dtype
        self.num_layers = pages.num_layers
        self._has_parts = pages.num_parts > 0
        self._pieces = StatePieces(pages.num_pages, states)
        self._slab = slab = HostSlab(host_bytes, shapes, dtype, is_pinned=True, part=part)
        self.num_slots, self.page_bytes, self.slot = slab.num_slots, slab.page_bytes, slab.slot
        self._parts = [
            _CopiedPart(tensor, found.layers, found.is_windowed, start, tensor[0, 0, 0].nbytes)
            for tensor, found, start in zip(
                pages.tensors, pages.parts, self._slab.part_starts, strict=True
            )
        ]
        self._groups = [
            [
                self._layers_of(part, part.between(first, first + LAYERS_AT_ONCE))
                for part in self._parts
                if part.has_any(first, first + LAYERS_AT_ONCE)
            ]
            for first in range(0, self.num_layers, LAYERS_AT_ONCE)
        ]
        most = max(layers.width for group in self._groups for layers in group)
        self._staging = _Staging(most, self._device)
        self._saves_stream = _stream(self._device, priority=0)
        self._loads: dict[LoadId, GpuTransfer] = {}
        self._compile()

    def _compile(self) -> None:
        """Compile the kernel before the first load needs it."""
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        buffer = self._staging.take()
        for layers in (layers for group in self._groups for layers in group):
            layers.spread.run(buffer, nothing)
        torch.cuda.synchronize(buffer.device)

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> GpuTransfer:
        assert parts is not None or not self._has_parts, "a copy says nothing of windowed parts"
        transfer, stream = GpuTransfer(self.num_layers), self._saves_stream
        transfer.begin.record(stream)
        copy = self._pieces.split(pages, slots, parts)
        for device, host, count in self._piece_runs(copy):
            self._piece_rows().to_host(device, host, count, stream.cuda_stream)
        for part in self._parts:
            places = copy.pages
            if part.is_windowed and copy.parts is not None:
                places = copy.parts
            self._save_part(part, places, copy.slots)
        transfer.events = [_recorded(stream)] * self._num_groups()
        return transfer

    def _save_part(self, part: "_CopiedPart", places: Int32s, slots: Int32s) -> None:
        half_bytes, num_halves = part.half_bytes, 2 * len(part.layers)
        distance = part.tensor[0, 0].nbytes  # from K to V, from V to the next layer's K
        at_once, pitch = num_halves, distance
        if distance > MAX_PITCH:  # too far apart: rows are copied one by one
            at_once, pitch = 1, half_bytes
        rows = PitchedRows(half_bytes, host_pitch=half_bytes, device_pitch=pitch)
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            source = part.tensor.data_ptr() + place * half_bytes
            target = self._address(slot, part, 0)
            for half in range(0, num_halves, at_once):
                rows.to_host(
                    source + half * distance, target + half * half_bytes,
                    at_once, self._saves_stream.cuda_stream,
                )  # fmt: skip

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> GpuTransfer:
        assert parts is not None or not self._has_parts, "a copy says nothing of windowed parts"
        staging = self._staging
        copy = self._pieces.split(pages, slots, parts)
        order = np.argsort(copy.slots)  # one call can copy a run of neighbouring slots
        slots, pages = copy.slots[order], copy.pages[order]
        transfer = GpuTransfer(self.num_layers)
        with torch.cuda.stream(staging.pages_stream):
            transfer.begin.record()
            for device, host, count in self._piece_runs(copy):
                self._piece_rows().to_device(host, device, count, staging.pages_stream.cuda_stream)
            page_ids = windowed_ids = self._upload(pages, transfer)
            if copy.parts is not None:
                windowed_ids = self._upload(copy.parts[order], transfer)
            portions = [
                (list(_runs(slots[some])), page_ids[some], windowed_ids[some])
                for some in _parts(len(slots), staging.pages)
            ]
            for group in self._groups:
                for layers in group:
                    for runs, full, windowed in portions:
                        self._load_layers(layers, runs, windowed if layers.is_windowed else full)
                transfer.events.append(_recorded(staging.pages_stream))
        self._loads[load_id] = transfer
        return transfer

    def _load_layers(
        self, layers: "_CopiedLayers", runs: list[tuple[int, int, int]], places: Tensor
    ) -> None:
        """Copy layers from runs of slots to these places."""
        staging, stream = self._staging, self._staging.rows_stream.cuda_stream
        buffer = staging.take()
        target = buffer.data_ptr()
        for row, slot, length in runs:
            source = layers.address + slot * self._slab.slot_bytes
            layers.rows.to_device(source, target + row * layers.width, length, stream)
        staging.filled()
        layers.spread.run(buffer, places)
        staging.emptied()

    def _layers_of(self, part: "_CopiedPart", layers: slice) -> "_CopiedLayers":
        tensor = part.tensor[layers]
        width = len(tensor) * part.layer_bytes
        return _CopiedLayers(
            width,
            self._address(0, part, layers.start),
            PitchedRows(width, host_pitch=self._slab.slot_bytes, device_pitch=width),
            PageSpread(tensor),
            part.is_windowed,
        )

    def forget(self, load_id: LoadId) -> None:
        self._loads.pop(load_id, None)

    def gate(self, load_ids: Int32s) -> Gate:
        """Return a gate for these loads. Loads that were forgotten have ended."""
        known = (self._loads.get(LoadId(load_id)) for load_id in load_ids.tolist())
        return GpuGate([transfer for transfer in known if transfer is not None])

    def drain(self) -> None:
        self._staging.synchronize()
        self._saves_stream.synchronize()

    def close(self) -> None:
        self.drain()
        self._slab.close()

    def _upload(self, pages: Int32s, transfer: GpuTransfer) -> Tensor:
        """Page ids on the device."""
        pinned = torch.empty(len(pages), dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = pages
        transfer.kept.append(pinned)
        on_device = torch.empty(len(pages), dtype=torch.int32, device=self._device)
        move_words(on_device[None], pinned[None])
        return on_device

    def _piece_rows(self) -> PitchedRows:
        """Copies pieces of states, which lie side by side on the device."""
        width = self._slab.page_bytes
        return PitchedRows(width, host_pitch=self._slab.slot_bytes, device_pitch=width)

    def _piece_runs(self, copy: SplitCopy) -> Iterator[tuple[int, int, int]]:
        """Runs of neighbouring pieces in neighbouring slots: addresses and length."""
        pieces, slots = copy.pieces, copy.piece_slots
        if not len(pieces):
            return
        first, width = self._pieces.rows.data_ptr(), self._slab.page_bytes
        ends = np.flatnonzero((np.diff(pieces) != 1) | (np.diff(slots) != 1)) + 1
        begins = [0, *ends.tolist()]
        for begin, end in zip(begins, [*begins[1:], len(pieces)], strict=True):
            device = first + int(pieces[begin]) * width
            host = self._slab.address + int(slots[begin]) * self._slab.slot_bytes
            yield device, host, end - begin

    def _num_groups(self) -> int:
        return -(-self.num_layers // LAYERS_AT_ONCE)

    def _address(self, slot: int, part: "_CopiedPart", layer: int) -> int:
        """Where layer number `layer` of a part begins in a slot."""
        first = self._slab.address + slot * self._slab.slot_bytes
        return first + part.start + layer * part.layer_bytes


@dataclass(frozen=True, slots=True)
class _CopiedPart:
    """A part of all pages."""

    tensor: Tensor  # [layers, 2, places, kv_heads, page_size, head_dim]
    layers: tuple[int, ...]  # their places in a page
    is_windowed: bool
    start: int  # in a slot, in bytes
    half_bytes: int  # of K or V of a page in a layer

    @property
    def layer_bytes(self) -> int:
        return 2 * self.half_bytes

    def between(self, first: int, end: int) -> slice:
        """The layers whose places in a page are from `first` up to `end`."""
        return slice(bisect_left(self.layers, first), bisect_left(self.layers, end))

    def has_any(self, first: int, end: int) -> bool:
        """Whether there is such a layer."""
        found = self.between(first, end)
        return bool(found.start < found.stop)


@dataclass(frozen=True, slots=True)
class _CopiedLayers:
    """Layers of a part that are loaded together."""

    width: int  # bytes of a page in them
    address: int  # where they begin in slot 0
    rows: PitchedRows
    spread: PageSpread
    is_windowed: bool


def _parts(count: int, at_once: int) -> Iterator[slice]:
    for begin in range(0, count, at_once):
        yield slice(begin, min(begin + at_once, count))


def _runs(slots: Int32s) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring slots, from ascending `slots`: (index, first slot, length)."""
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
