"""Copies pages between a CPU's page tensors and a slab, on separate threads.

Loads and saves have separate threads, so a save never delays a load. `gpu_transfer.py` has the same
interface for a GPU, with streams instead of threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from time import perf_counter

import torch
from torch import Tensor

from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s, Runner
from mainstem.kernels.memory.cpu import take_pages
from mainstem.kv.transfer import LoadId, PageCopier
from mainstem.models.block import Gate
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.gpu_rounded import RoundedGpuPages
from mainstem.runner.machine import available_bytes
from mainstem.runner.pages import DevicePages
from mainstem.runner.ranks.copier import RankedCopier
from mainstem.runner.ranks.runner import RankedRunner
from mainstem.runner.rounded_pages import RoundedPages
from mainstem.runner.slab import WHOLE, HostSlab, SlabPart
from mainstem.runner.states import DeviceStates, StatePieces


class CpuTransfer:
    """A copy made by a thread, layer by layer."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._num_done = 0
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._changed = Condition()

    def run(self, copy_layer: Callable[[int], None]) -> None:
        """Do the copy. Runs on the thread for copies."""
        began_s = perf_counter()
        try:
            for layer in range(self._num_layers):
                copy_layer(layer)
                with self._changed:
                    self._num_done += 1
                    self._seconds = perf_counter() - began_s
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def num_layers_done(self) -> int:
        """Layers that are done; raises if the copy failed, which only a bug can cause."""
        if self._error is not None:
            raise self._error
        return self._num_done

    def wait_for(self, num_layers: int) -> None:
        """Return when the first `num_layers` layers are copied."""
        if self.num_layers_done() < num_layers:
            with self._changed:
                self._changed.wait_for(lambda: self.num_layers_done() >= num_layers)

    def wait(self) -> None:
        self.wait_for(self._num_layers)

    def seconds(self) -> float:
        return self._seconds


class CpuGate:
    """Delays each layer of a step until its loads have loaded that layer."""

    def __init__(self, transfers: list[CpuTransfer]) -> None:
        self._transfers = transfers

    def before(self, layer: int) -> None:
        for transfer in self._transfers:
            transfer.wait_for(layer + 1)


class CpuCopier:
    """PageCopier over the page tensors of a CPU."""

    def __init__(
        self,
        pages: DevicePages | RoundedPages,
        host_bytes: int,
        part: SlabPart = WHOLE,
        states: DeviceStates | None = None,
    ) -> None:
        """Allocates a slab of `host_bytes`, but at least two slots."""
        self._pieces = StatePieces(pages.num_pages, states)
        self._layers = [pages.joint(layer) for layer in range(pages.num_layers)]
        self._slab = slab = HostSlab(
            host_bytes, pages.slot_shapes, pages.slot_dtype, is_pinned=False, part=part
        )
        self.num_layers = len(self._layers)
        self.num_slots, self.page_bytes, self.slot = slab.num_slots, slab.page_bytes, slab.slot
        self._has_parts = pages.num_parts > 0
        # for each layer of a page: where it is in slots, and whether it is in the windowed part
        self._in_slots = [
            self._slab.parts[number][:, pages.parts[number].layers.index(place)]
            for place, number in sorted(pages.part_of.items())
        ]
        self._is_windowed = [
            pages.parts[number].is_windowed for _, number in sorted(pages.part_of.items())
        ]
        self._loads: dict[LoadId, CpuTransfer] = {}
        self._load_thread = ThreadPoolExecutor(1, thread_name_prefix="kv-load")
        self._save_thread = ThreadPoolExecutor(1, thread_name_prefix="kv-save")

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> CpuTransfer:
        copy = self._pieces.split(pages, slots, parts)
        targets, (full, windowed) = _index(copy.slots), self._places(copy.pages, copy.parts)

        def copy_layer(layer: int) -> None:
            if layer == 0 and len(copy.pieces):
                rows = self._pieces.rows.index_select(0, _index(copy.pieces))
                self._slab.rows.index_copy_(0, _index(copy.piece_slots), rows)
            sources = windowed if self._is_windowed[layer] else full
            taken = take_pages(self._layers[layer], sources).transpose(0, 1)
            self._in_slots[layer].index_copy_(0, targets, taken)

        return self._start(self._save_thread, copy_layer)

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> CpuTransfer:
        copy = self._pieces.split(pages, slots, parts)
        sources, (full, windowed) = _index(copy.slots), self._places(copy.pages, copy.parts)

        def copy_layer(layer: int) -> None:
            if layer == 0 and len(copy.pieces):
                rows = self._slab.rows.index_select(0, _index(copy.piece_slots))
                self._pieces.rows.index_copy_(0, _index(copy.pieces), rows)
            targets = windowed if self._is_windowed[layer] else full
            taken = self._in_slots[layer].index_select(0, sources).transpose(0, 1)
            self._layers[layer].index_copy_(1, targets, taken)

        transfer = self._loads[load_id] = self._start(self._load_thread, copy_layer)
        return transfer

    def forget(self, load_id: LoadId) -> None:
        self._loads.pop(load_id, None)

    def gate(self, load_ids: Int32s) -> Gate:
        """Return a gate for these loads. Loads that were forgotten have ended."""
        known = (self._loads.get(LoadId(load_id)) for load_id in load_ids.tolist())
        return CpuGate([transfer for transfer in known if transfer is not None])

    def drain(self) -> None:
        for thread in (self._load_thread, self._save_thread):
            thread.submit(lambda: None).result()  # each thread copies in order

    def close(self) -> None:
        self._load_thread.shutdown()
        self._save_thread.shutdown()

    def _places(self, pages: Int32s, parts: Int32s | None) -> tuple[Tensor, Tensor]:
        """Where the full and the windowed parts of pages are."""
        assert parts is not None or not self._has_parts, "a copy says nothing of windowed parts"
        full = _index(pages)
        return full, full if parts is None else _index(parts)

    def _start(self, thread: ThreadPoolExecutor, copy: Callable[[int], None]) -> CpuTransfer:
        transfer = CpuTransfer(self.num_layers)
        thread.submit(transfer.run, copy)
        return transfer


def connect(runner: Runner, host_bytes: int) -> PageCopier:
    """Make a copier between the runner's pages and a slab of `host_bytes`; raises ConfigError if
    there is too little memory."""
    if host_bytes > (available := available_bytes()):
        raise ConfigError(
            f"host_gb={host_bytes / 1e9:g} is more than the {available / 1e9:.1f} GB of memory left"
        )
    if isinstance(runner, RankedRunner):
        return RankedCopier(runner, host_bytes)
    return attach_copier(runner, host_bytes)


def pages_of(runner: Runner) -> DevicePages | RoundedPages | GpuPages | RoundedGpuPages:
    """The pages that a runner has in this process."""
    if isinstance(runner, CpuRunner):
        return runner.pages
    from mainstem.runner.gpu import GpuRunner  # noqa: PLC0415  # brings Triton

    assert isinstance(runner, GpuRunner)
    return runner.pages


def attach_copier(runner: Runner, host_bytes: int, part: SlabPart = WHOLE) -> PageCopier:
    """Make a copier between the pages that a runner has in this process and its part of a slab."""
    if isinstance(runner, CpuRunner):
        copier = CpuCopier(runner.pages, host_bytes, part, runner.states)
        runner.attach(copier)
        return copier
    from mainstem.runner.gpu import GpuRunner  # noqa: PLC0415  # brings Triton
    from mainstem.runner.gpu_transfer import GpuCopier  # noqa: PLC0415

    assert isinstance(runner, GpuRunner)
    gpu_copier = GpuCopier(runner.pages, host_bytes, part, runner.states)
    runner.attach(gpu_copier)
    return gpu_copier


def _index(numbers: Int32s) -> Tensor:
    return torch.from_numpy(numbers).long()
