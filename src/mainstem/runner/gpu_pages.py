"""Device pages on a GPU: [layer][K or V][pages, kv_heads, page_size, head_dim].

One allocation: the parts of a page are at equal distances, so a copy engine can copy them as rows.
"""

import torch
from torch import Tensor

from mainstem.models.spec import ModelSpec


class GpuPages:
    """Owns the page tensors; the control plane decides which sequence uses which page."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (len(spec.attentions), 2, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        self.all = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = list(self.all.unbind())
        self._halves = [layer.unbind() for layer in self._layers]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        return self.all.nbytes // self.num_pages

    def joint(self, layer: int) -> Tensor:
        """[2, pages, kv_heads, page_size, head_dim], K first."""
        return self._layers[layer]

    def keys(self, layer: int) -> Tensor:
        return self._halves[layer][0]

    def values(self, layer: int) -> Tensor:
        return self._halves[layer][1]
