"""Device pages on a GPU, for each part of a page (page_parts.py):

    [layer][K or V][places, kv_heads, page_size, head_dim]

A place is a page, or a page's windowed part. One allocation for each part: the layers of a place
are at equal distances, so a copy engine can copy them as rows.
"""

import torch
from torch import Tensor

from mainstem.models.spec import ModelSpec
from mainstem.runner.page_parts import page_parts


class GpuPages:
    """Owns the page tensors; the control plane decides which sequence uses which page."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_parts: int = 0,
    ) -> None:
        """`num_parts`: RunnerFacts.num_parts."""
        self.num_pages = num_pages
        self.num_parts = num_parts
        self.page_size = page_size
        self.parts = page_parts(spec)
        self.tensors = [
            torch.zeros(
                (
                    len(part.layers),
                    2,
                    part.num_places(num_pages, num_parts),
                    part.shape.heads,
                    page_size,
                    part.shape.dim,
                ),
                dtype=dtype,
                device=device,
            )
            for part in self.parts
        ]
        layers: dict[int, Tensor] = {}
        for part, tensor in zip(self.parts, self.tensors, strict=True):
            layers.update(zip(part.layers, tensor.unbind(), strict=True))
        self._layers = [layers[place] for place in range(len(layers))]
        self._halves = [layer.unbind() for layer in self._layers]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page with all its parts."""
        return sum(tensor.nbytes // tensor.shape[2] for tensor in self.tensors)

    def joint(self, layer: int) -> Tensor:
        """[2, places, kv_heads, page_size, head_dim], K first."""
        return self._layers[layer]

    def keys(self, layer: int) -> Tensor:
        return self._halves[layer][0]

    def values(self, layer: int) -> Tensor:
        return self._halves[layer][1]
