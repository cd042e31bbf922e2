"""Buffers for a step's activations on a GPU, allocated once for the largest step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.gpu.experts import ExpertSpace
from mainstem.models.spec import ExpertsSpec, MlpSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Workspace:
    """The buffers of a step, each [tokens, width]."""

    residual: Tensor
    normed: Tensor
    qkv: Tensor  # output of the product before attention or recurrence
    mixed: Tensor
    answer: Tensor  # output of attention, to be added to the residual
    mlp_answer: Tensor
    first: Tensor  # output of the MLP's first product: gate and up, or up
    act: Tensor
    experts: ExpertSpace | None

    def qkv_rows(self, tokens: int, width: int) -> Tensor:
        """[tokens, width] of `qkv`, without gaps."""
        if width == self.qkv.shape[1]:
            return self.qkv[:tokens]
        return self.qkv.view(-1)[: tokens * width].view(tokens, width)

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
            qkv=rows(max(spec.first_width(layer) for layer in spec.layers)),
            mixed=rows(heads),
            answer=rows(spec.hidden_size),
            mlp_answer=rows(spec.hidden_size),
            first=rows(max(((2 if mlp.is_gated else 1) * mlp.size for mlp in mlps), default=0)),
            act=rows(max((mlp.size for mlp in mlps), default=0)),
            experts=_expert_space(spec, max_tokens, dtype, device),
        )


def _expert_space(
    spec: ModelSpec, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> ExpertSpace | None:
    """Make the buffers for experts, which all layers share."""
    kinds = {layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)}
    if len(kinds) > 1:
        raise UnsupportedModel("layers with different numbers or sizes of experts are unsupported")
    for kind in kinds:
        return ExpertSpace.make(kind, spec.hidden_size, max_tokens, dtype, device)
    return None
