"""Activations of a step on a GPU, made once: what a forward pass needs is known before it runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.models.spec import MlpSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Workspace:
    """[tokens, width] each."""

    residual: Tensor
    normed: Tensor
    qkv: Tensor
    mixed: Tensor
    delta: Tensor
    first: Tensor  # of the MLP: gate and up, or up
    act: Tensor

    @classmethod
    def make(
        cls, spec: ModelSpec, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> "Workspace":
        def rows(width: int) -> Tensor:
            return torch.zeros((max_tokens, width), dtype=dtype, device=device)

        heads = spec.num_heads * spec.head_dim
        mlps = {layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec)}
        return cls(
            residual=rows(spec.hidden_size),
            normed=rows(spec.hidden_size),
            qkv=rows(heads + 2 * spec.num_kv_heads * spec.head_dim),
            mixed=rows(heads),
            delta=rows(spec.hidden_size),
            first=rows(max(((2 if mlp.is_gated else 1) * mlp.size for mlp in mlps), default=0)),
            act=rows(max((mlp.size for mlp in mlps), default=0)),
        )
