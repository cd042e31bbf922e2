"""Router, activations and one expert in plain PyTorch, fp32 inside: the oracle of the kernels.

Nothing here changes its arguments or shares code with a fast kernel.
"""

import math

import torch
from torch import Tensor


def route(
    logits: Tensor,
    top_k: int,
    is_normalized: bool,
    scores: str = "softmax",
    choice_bias: Tensor | None = None,
    floor: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Experts [tokens, top_k], best first and the lowest on a tie, and their weights in fp32."""
    wide = logits.double()
    shares = 1 / (1 + torch.exp(-wide)) if scores == "sigmoid" else wide.softmax(dim=-1)
    ranked = logits if choice_bias is None else shares + choice_bias.double()
    ids = [
        [expert for _, expert in sorted((-value, expert) for expert, value in enumerate(row))]
        for row in ranked.tolist()
    ]
    chosen = torch.tensor(ids).reshape(logits.shape)[:, :top_k]
    weights = shares.gather(1, chosen)
    if is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + floor)
    return chosen, (weights * scale).float()


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, in fp32."""
    gate, up = gate.float(), up.float()
    match activation:
        case "silu":
            return gate / (1 + torch.exp(-gate)) * up
        case "gelu":
            return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            return 0.5 * gate * (1 + torch.tanh(inner)) * up
        case "relu":
            return torch.where(gate > 0, gate, 0.0) * up
        case "relu2":
            return torch.where(gate > 0, gate * gate, 0.0) * up
        case "clamped":
            gate, up = torch.clip(gate, max=7.0), torch.clip(up, min=-7.0, max=7.0)
            return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    raise ValueError(f"no activation {activation!r}")


def gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """One expert: x [tokens, hidden], gate_up [2 * size, hidden], down [hidden, size]; in fp32."""
    both = x.float() @ gate_up.float().t()
    if gate_up_bias is not None:
        both = both + gate_up_bias.float()
    gate, up = both.chunk(2, dim=-1)
    out = gated(gate, up, activation) @ down.float().t()
    return out if down_bias is None else out + down_bias.float()


def plain_mlp(x: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """One expert without a gate: x [tokens, hidden], up [size, hidden], down [hidden, size]."""
    inner = x.float() @ up.float().t()
    return gated(inner, torch.ones_like(inner), activation) @ down.float().t()
