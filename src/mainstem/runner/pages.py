"""Pages on a CPU: K and V of every layer, head by head.

    for each part of a page    [layer][K or V][kv_heads, places, page_size, head_dim]

A place is a page, or a page's windowed part (page_parts.py). Neighbouring places are one run of a
head's slots, which attention reads in place. K and V of a layer lie in one block of memory, so that
one write serves both. Memory is not initialised: a page costs nothing until it is written, and
unwritten slots may hold anything.
"""

import torch
from torch import Tensor

from mainstem.models.spec import ModelSpec
from mainstem.runner.page_parts import page_parts


class DevicePages:
    """Owns the page tensors; the control plane decides which sequence uses which page."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        num_parts: int = 0,
    ) -> None:
        """`num_parts`: RunnerFacts.num_parts."""
        self.num_pages = num_pages
        self.num_parts = num_parts
        self.page_size = page_size
        self.parts = page_parts(spec)
        self.part_of = {place: n for n, part in enumerate(self.parts) for place in part.layers}
        self.tensors: list[Tensor] = []
        layers: dict[int, Tensor] = {}
        for part in self.parts:
            slots = part.num_places(num_pages, num_parts) * page_size
            shape = (len(part.layers), 2, part.shape.heads, slots, part.shape.dim)
            self.tensors.append(torch.empty(shape, dtype=dtype))
            layers.update(zip(part.layers, self.tensors[-1].unbind(), strict=True))
        self._layers = [layers[place] for place in range(len(layers))]
        self._rows = [layer.view(-1, layer.shape[-1]) for layer in self._layers]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page with all its parts."""
        return sum(
            tensor.nbytes * self.page_size // tensor.shape[3]  # of one place
            for tensor in self.tensors
        )

    @property
    def slot_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part of a page in a slot of host memory."""
        return [
            (len(part.layers), 2, part.shape.heads, self.page_size, part.shape.dim)
            for part in self.parts
        ]

    @property
    def slot_dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def all_slots(self) -> Tensor:
        """[layers, 2, kv_heads, pages * page_size, head_dim], of pages that have one part."""
        (tensor,) = self.tensors
        return tensor

    def slots(self, layer: int) -> Tensor:
        """[2, kv_heads, places * page_size, head_dim], K first; the order in memory."""
        return self._layers[layer]

    def joint(self, layer: int) -> Tensor:
        """The same memory as a view place by place: [2, places, kv_heads, page_size, head_dim]."""
        both, kv_heads, num_slots, dim = self._layers[layer].shape
        shape = (both, kv_heads, num_slots // self.page_size, self.page_size, dim)
        return self._layers[layer].view(shape).transpose(1, 2)

    def keys(self, layer: int) -> Tensor:
        return self.joint(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self.joint(layer)[1]

    def write_rows(self, part: int, slots: Tensor) -> Tensor:
        """Return the rows to which `append` writes new K and V of a layer of this part. They are
        the same for all its layers.

        `slots` [tokens] are place * page_size + offset.
        """
        _, both, kv_heads, num_slots, _ = self.tensors[part].shape
        heads = torch.arange(both * kv_heads) * num_slots
        return (slots[:, None] + heads).reshape(-1)

    def copy(self, layer: int, source_rows: Tensor, target_rows: Tensor) -> None:
        """Copy K and V of some slots, given as rows of `write_rows`."""
        flat = self._rows[layer]
        flat.index_copy_(0, target_rows, flat.index_select(0, source_rows))

    def append(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Write kv [tokens, 2 * kv_heads, dim], key heads first."""
        target = self._rows[layer]
        target.index_copy_(0, rows, kv.reshape(-1, target.shape[1]))
