"""Pages on a CPU whose full pages are kept in fp8.

    rounded   for each part of a page   [layer][K or V][kv_heads, places, record]         uint8
    open      for each part of a page   [layer][K or V][kv_heads, sequences, page_size, dim]

A record is a page's K or V of one head (kernels/memory/records.py). The page that a running
sequence is filling is open: it is kept in the compute dtype, at the sequence's slot, and rounded in
the step that fills it. Only rounded pages are shared, saved and loaded. In both, K is less by the
layer's key shift (models/key_shifts.py).
"""

import torch
from torch import Tensor

from mainstem.kernels.memory.record_size import record_bytes
from mainstem.kernels.memory.records import expand_pages
from mainstem.models.key_shifts import KeyShifts
from mainstem.models.quantized.kv_scales import KvScales
from mainstem.models.rope import adjacent_pairs
from mainstem.models.spec import ModelSpec
from mainstem.runner.page_parts import PagePart, page_parts

# parts of the model's identity
ROUNDED_LAYOUT = b":e4m3"
SCALES_LAYOUT = b":e4m3 with the scales of the checkpoint"


class RoundedPages:
    """Owns the tensors; the control plane decides which sequence uses which page."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        num_parts: int = 0,
        *,
        num_open: int,
        scales: KvScales | None = None,
        shifts: KeyShifts | None = None,
    ) -> None:
        """`num_parts`: RunnerFacts.num_parts; `num_open`: sequences that run at once; `scales` are
        those of a checkpoint that has them, None: from each page's largest number."""
        self.num_pages = num_pages
        self.num_parts = num_parts
        self.page_size = page_size
        self.num_open = num_open
        self.dtype = dtype
        self.scales = scales
        self.parts = page_parts(spec)
        self.part_of = {place: n for n, part in enumerate(self.parts) for place in part.layers}
        self.tensors: list[Tensor] = []
        rounded: dict[int, Tensor] = {}
        opened: dict[int, Tensor] = {}
        for part in self.parts:
            places, heads = part.num_places(num_pages, num_parts), part.shape.heads
            shape = (len(part.layers), 2, heads, places, self.record_bytes(part))
            self.tensors.append(torch.zeros(shape, dtype=torch.uint8))
            rounded.update(zip(part.layers, self.tensors[-1].unbind(), strict=True))
            of_open = (len(part.layers), 2 * heads, num_open, page_size * part.shape.dim)
            opened.update(zip(part.layers, torch.zeros(of_open, dtype=dtype).unbind(), strict=True))
        self._rounded = [rounded[place] for place in range(len(rounded))]
        self._open = [opened[place] for place in range(len(opened))]
        # of K as it is kept, [kv_heads, dim] fp32, by a layer's place in a page
        self.shifts: dict[int, Tensor] = {}
        for place, shift in () if shifts is None else shifts.of_place.items():
            pairs = adjacent_pairs(shift.shape[1], spec.rotary_dim(spec.kept[place]))
            self.shifts[place] = shift[:, pairs]

    def record_bytes(self, part: PagePart) -> int:
        return record_bytes(self.page_size * part.shape.dim)

    @property
    def num_layers(self) -> int:
        return len(self._rounded)

    @property
    def page_bytes(self) -> int:
        """Bytes of a rounded page with all its parts."""
        return sum(tensor.nbytes // tensor.shape[3] for tensor in self.tensors)

    @property
    def slot_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part of a page in a slot of host memory."""
        return [
            (len(part.layers), 2, part.shape.heads, 1, self.record_bytes(part))
            for part in self.parts
        ]

    @property
    def slot_dtype(self) -> torch.dtype:
        return torch.uint8

    def rounded(self, layer: int) -> Tensor:
        """[2, kv_heads, places, record], K first."""
        return self._rounded[layer]

    def joint(self, layer: int) -> Tensor:
        """The same memory as a view place by place: [2, places, kv_heads, 1, record]."""
        return self._rounded[layer].transpose(1, 2)[:, :, :, None]

    def expanded_keys(self, layer: int, places: Tensor) -> Tensor:
        """K of some places, [places, kv_heads, page_size, head_dim] fp32."""
        part = self.parts[self.part_of[layer]]
        heads, dim = part.shape.heads, part.shape.dim
        keys = torch.empty((heads, len(places), self.page_size * dim))
        expand_pages(self._rounded[layer][0].index_select(1, places), keys)
        return keys.view(heads, len(places), self.page_size, dim).transpose(0, 1)

    def open_keys(self, layer: int, slots: Tensor) -> Tensor:
        """K of the open pages at these slots, [slots, kv_heads, page_size, head_dim]."""
        part = self.parts[self.part_of[layer]]
        keys = self._open[layer][: part.shape.heads].index_select(1, slots)
        return keys.view(part.shape.heads, -1, self.page_size, part.shape.dim).transpose(0, 1)

    def opened(self, layer: int) -> Tensor:
        """[2 * kv_heads, sequences, page_size * dim], heads of K first."""
        return self._open[layer]
