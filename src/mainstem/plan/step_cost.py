"""Seconds of a whole step on a card, from FLOPs and bytes: for simulations and for choosing sizes.

Nothing overlaps in this model: GEMM (or reading the weights, if that takes longer), reading K and
V, and elementwise traffic are added up.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """Sustained rates of a device."""

    flops_per_s: float
    bytes_per_s: float
    elementwise_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a step costs depends on these numbers of a model only."""

    num_params: float  # in the layers
    num_head_params: float  # of the LM head
    kv_bytes_per_token: float
    bytes_per_param: float = 2.0


H200 = Card(flops_per_s=666e12, bytes_per_s=4.3e12, elementwise_bytes_per_token=5.6e6)
LLAMA_8B = ModelSize(num_params=6.98e9, num_head_params=0.525e9, kv_bytes_per_token=131_072)


def step_seconds(
    card: Card, model: ModelSize, num_tokens: int, num_samples: int, key_tokens_read: int
) -> float:
    """One forward pass over `num_tokens`, of which `num_samples` go through the LM head."""
    flops = 2 * (model.num_params * num_tokens + model.num_head_params * num_samples)
    weights = (model.num_params + model.num_head_params) * model.bytes_per_param
    gemm_s = max(flops / card.flops_per_s, weights / card.bytes_per_s)
    traffic = key_tokens_read * model.kv_bytes_per_token
    traffic += num_tokens * card.elementwise_bytes_per_token
    return gemm_s + traffic / card.bytes_per_s
