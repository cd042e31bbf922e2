"""A mixture of experts on a CPU.

Tokens are sorted by expert, so that each expert with tokens takes two products; the weights of
experts without tokens are not read. Router and sums are in fp32, whatever the model's dtype.
Quantized experts stay packed in memory and are dequantized whenever they have tokens: slow, but a
mixture of experts in fp32 would not fit most machines.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.models.cpu.activations import gated
from mainstem.models.cpu.layers import Mlp, Norm, multiply
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.packed import Weight
from mainstem.models.spec import ExpertsSpec


class CpuExperts:
    """x [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, tensors: ExpertTensors, spec: ExpertsSpec) -> None:
        self._tensors = tensors
        self._top_k = spec.top_k
        self._is_normalized = spec.is_normalized
        self._activate = gated(spec.activation)
        self._router = tensors.router.float().t().contiguous()
        bias = tensors.router_bias
        self._router_bias = None if bias is None else bias.float()
        self._scales = tensors.scales
        self._shared_gate_up = _dense(tensors.shared_gate_up, tensors.router.dtype)
        self._shared_down = _dense(tensors.shared_down, tensors.router.dtype)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """`routed` is what the router reads; None: x."""
        ids, weights = self._route(x if routed is None else routed)
        if len(x) == 1:
            rows = [
                self._run_expert(expert, x).mul(weight)
                for expert, weight in zip(ids[0].tolist(), weights[0], strict=True)
            ]
            out = torch.stack(rows).sum(dim=0)
        else:
            out = self._run_sorted(x, ids, weights)
        if self._shared_gate_up is not None:
            out += self._run_shared(x)
        return out.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, [tokens, top_k]. On a tie, the expert with
        the lowest number comes first."""
        logits = x.float() @ self._router
        if self._router_bias is not None:
            logits += self._router_bias
        chosen, ids = logits.sort(dim=-1, descending=True, stable=True)
        chosen, ids = chosen[:, : self._top_k], ids[:, : self._top_k]
        if self._is_normalized:
            weights = chosen.softmax(dim=-1)
        else:
            weights = (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp()
        return ids, weights if self._scales is None else weights * self._scales[ids]

    def _run_sorted(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return [tokens, hidden] in fp32."""
        by_expert = ids.reshape(-1).argsort(stable=True)
        tokens = by_expert // self._top_k
        sorted_weights = weights.reshape(-1)[by_expert, None]
        counts = torch.bincount(ids.reshape(-1), minlength=len(self._tensors.router))
        out = torch.zeros(x.shape, dtype=torch.float32)
        first = 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            rows = slice(first, first + count)
            found = self._run_expert(expert, x[tokens[rows]])
            out.index_add_(0, tokens[rows], found.mul(sorted_weights[rows]))
            first += count
        return out

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:
        """Return [rows, hidden] in fp32."""
        tensors = self._tensors
        gate_up_bias = None if tensors.gate_up_bias is None else tensors.gate_up_bias[expert]
        down_bias = None if tensors.down_bias is None else tensors.down_bias[expert]
        act = self._activate(multiply(x, _one(tensors.gate_up, expert, x.dtype), gate_up_bias))
        return multiply(act, _one(tensors.down, expert, x.dtype), down_bias).float()

    def _run_shared(self, x: Tensor) -> Tensor:
        tensors = self._tensors
        assert self._shared_gate_up is not None
        assert self._shared_down is not None
        act = self._activate(multiply(x, self._shared_gate_up))
        out = multiply(act, self._shared_down).float()
        if tensors.shared_gate is None:
            return out
        return torch.sigmoid(x.float() @ tensors.shared_gate.float().t()) * out


@dataclass(frozen=True, slots=True)
class NormedExperts:
    """A shared MLP and experts, with norms of their own: x, not normed, -> what they add."""

    mlp: Mlp
    experts: CpuExperts
    shared_norm: Norm
    expert_norm: Norm
    router_norm: Norm
    after_shared: Norm
    after_experts: Norm

    def __call__(self, x: Tensor) -> Tensor:
        shared = self.after_shared(self.mlp(self.shared_norm(x)))
        found = self.experts(self.expert_norm(x), self.router_norm(x))
        return shared.add_(self.after_experts(found))


def _one(weights: Weight, expert: int, dtype: torch.dtype) -> Tensor:
    if isinstance(weights, Tensor):
        return weights[expert]
    return weights.expert(expert).dense(dtype)


def _dense(weight: Weight | None, dtype: torch.dtype) -> Tensor | None:
    return weight if weight is None or isinstance(weight, Tensor) else weight.dense(dtype)
