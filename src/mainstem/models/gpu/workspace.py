"""Buffers for a step's activations on a GPU, allocated once for the largest step."""

from dataclasses import dataclass, replace

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
    mixed: Tensor  # output of attention or recurrence
    answer: Tensor  # output of the product after it, to be added to the residual
    mlp_answer: Tensor
    first: Tensor  # output of the MLP's first product: gate and up, or up
    act: Tensor
    experts: ExpertSpace | None
    layer_inputs: Tensor  # of all layers; 0 columns if they have none
    layer_input: Tensor  # of one layer: the output of the first product that reads it

    def qkv_rows(self, tokens: int, width: int) -> Tensor:
        """[tokens, width] of `qkv`, without gaps."""
        return _without_gaps(self.qkv, tokens, width)

    def mixed_rows(self, tokens: int, width: int) -> Tensor:
        """[tokens, width] of `mixed`, without gaps."""
        return _without_gaps(self.mixed, tokens, width)

    @classmethod
    def make(
        cls, spec: ModelSpec, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> "Workspace":
        def rows(width: int) -> Tensor:
            return torch.zeros((max_tokens, width), dtype=dtype, device=device)

        mlps = {layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec)}
        for layer in spec.layers:
            if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.has_own_norms:
                mlps.add(shared_mlp(layer.mlp))
        inputs = 0 if spec.layer_inputs is None else spec.layer_inputs.size
        return cls(
            residual=rows(spec.hidden_size),
            normed=rows(spec.hidden_size),
            qkv=rows(max(spec.first_width(layer) for layer in spec.layers)),
            mixed=rows(max(spec.mixed_width(layer) for layer in spec.layers)),
            answer=rows(spec.hidden_size),
            mlp_answer=rows(spec.hidden_size),
            first=rows(max(((2 if mlp.is_gated else 1) * mlp.size for mlp in mlps), default=0)),
            act=rows(max((mlp.size for mlp in mlps), default=0)),
            experts=_expert_space(spec, max_tokens, dtype, device),
            layer_inputs=rows(spec.num_layers * inputs),
            layer_input=rows(inputs),
        )


def _without_gaps(buffer: Tensor, tokens: int, width: int) -> Tensor:
    if width == buffer.shape[1]:
        return buffer[:tokens]
    return buffer.view(-1)[: tokens * width].view(tokens, width)


def shared_mlp(experts: ExpertsSpec) -> MlpSpec:
    """The shared MLP of experts that have norms of their own."""
    assert experts.shared_size is not None, "only these have a shared MLP of their own"
    return MlpSpec(experts.shared_size, experts.activation)


def only_experts(spec: ExpertsSpec) -> ExpertsSpec:
    """The experts without the shared MLP, if that has norms of its own."""
    return replace(spec, shared_size=None) if spec.has_own_norms else spec


def _expert_space(
    spec: ModelSpec, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> ExpertSpace | None:
    """Make the buffers for experts, which all layers share."""
    mlps = {layer.mlp for layer in spec.layers}
    kinds = {only_experts(mlp) for mlp in mlps if isinstance(mlp, ExpertsSpec)}
    if len(kinds) > 1:
        raise UnsupportedModel("layers with different numbers or sizes of experts are unsupported")
    for kind in kinds:
        return ExpertSpace.make(kind, spec.hidden_size, max_tokens, dtype, device)
    return None
