"""Small mixtures of experts that use every option, and the outputs they must give."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mainstem.kernels.experts import reference
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.packed import as_tensor
from mainstem.models.spec import Activation, ExpertsSpec, RouterScores


@dataclass(frozen=True)
class Case:
    """A named recipe of a layer, with its hidden size."""

    name: str
    spec: ExpertsSpec
    hidden: int = 32


def a_spec(
    num_experts: int = 6,
    top_k: int = 2,
    size: int = 24,
    activation: Activation = Activation.SILU,
) -> ExpertsSpec:
    return ExpertsSpec(num_experts, top_k, size, activation)


CASES = [
    *(Case(f"{act.value}", a_spec(activation=act)) for act in Activation),
    *(Case(f"top {k}", a_spec(num_experts=8, top_k=k)) for k in (1, 3, 8)),
    Case("biases", replace(a_spec(activation=Activation.CLAMPED_SILU), has_bias=True)),
    Case(
        "everything",
        ExpertsSpec(5, 3, 24, Activation.CLAMPED_SILU, False, True, 40, has_shared_gate=True),
    ),
    Case("not normalized", replace(a_spec(), is_normalized=False)),
    Case("shared", replace(a_spec(), shared_size=40)),
    Case("gated shared", replace(a_spec(), shared_size=40, has_shared_gate=True)),
    Case("many experts", a_spec(num_experts=37, top_k=4)),
    Case(
        "sigmoid scores and a bias",
        replace(
            a_spec(num_experts=9, top_k=3),
            scores=RouterScores.SIGMOID,
            has_choice_bias=True,
            weight_floor=0.25,
            weight_scale=2.5,
        ),
    ),
    Case(
        "softmax and a bias, not normalized",
        replace(a_spec(num_experts=9, top_k=3), has_choice_bias=True, is_normalized=False),
    ),
    Case(
        "without gates",
        replace(a_spec(activation=Activation.RELU_SQUARED), is_gated=False, shared_size=40),
    ),
    Case("wide", a_spec(num_experts=3, size=136), hidden=144),
]


def some_tensors(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> ExpertTensors:
    """Random weights that keep activations of order one, and biases of the same order."""
    spec, hidden = case.spec, case.hidden
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int, scale: float | None = None) -> Tensor:
        spread = shape[-1] ** -0.5 if scale is None else scale
        return (torch.randn(shape, generator=generator) * spread).to(dtype)

    experts, size, shared = spec.num_experts, spec.size, spec.shared_size
    firsts = 2 if spec.is_gated else 1
    return ExpertTensors(
        router=some(experts, hidden, scale=2 * hidden**-0.5),
        router_bias=some(experts, scale=1.0) if spec.has_bias else None,
        gate_up=some(experts, firsts * size, hidden, scale=3 * hidden**-0.5),
        gate_up_bias=some(experts, 2 * size, scale=2.0) if spec.has_bias else None,
        down=some(experts, hidden, size),
        down_bias=some(experts, hidden, scale=1.0) if spec.has_bias else None,
        shared_gate_up=None if shared is None else some(firsts * shared, hidden),
        shared_down=None if shared is None else some(hidden, shared),
        shared_gate=some(1, hidden) if spec.has_shared_gate else None,
        choice_bias=some(experts, scale=1.0).float() if spec.has_choice_bias else None,
    )


def some_rows(tokens: int, hidden: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn((tokens, hidden), generator=generator).to(dtype)


def right_answer(x: Tensor, tensors: ExpertTensors, spec: ExpertsSpec) -> Tensor:
    """The exact output, computed token by token and expert by expert in fp32."""
    logits = x.float() @ tensors.router.float().t()
    if tensors.router_bias is not None:
        logits = logits + tensors.router_bias.float()
    ids, weights = reference.route(
        logits,
        spec.top_k,
        spec.is_normalized,
        spec.scores.value,
        tensors.choice_bias,
        spec.weight_floor,
        spec.weight_scale,
    )
    out = torch.zeros(x.shape)
    for token, (row, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(row, shares, strict=True):
            out[token] += share * _one_expert(x[token : token + 1], expert, tensors, spec)[0]
    if tensors.shared_gate_up is not None and tensors.shared_down is not None:
        mlp = reference.gated_mlp if spec.is_gated else reference.plain_mlp
        shared = mlp(
            x,
            as_tensor(tensors.shared_gate_up),
            as_tensor(tensors.shared_down),
            spec.activation.value,
        )
        if tensors.shared_gate is not None:
            shared = shared / (1 + torch.exp(-(x.float() @ tensors.shared_gate.float().t())))
        out += shared
    return out


def _one_expert(x: Tensor, expert: int, tensors: ExpertTensors, spec: ExpertsSpec) -> Tensor:
    if not spec.is_gated:
        up, down = as_tensor(tensors.gate_up)[expert], as_tensor(tensors.down)[expert]
        return reference.plain_mlp(x, up, down, spec.activation.value)
    return reference.gated_mlp(
        x,
        as_tensor(tensors.gate_up)[expert],
        as_tensor(tensors.down)[expert],
        spec.activation.value,
        None if tensors.gate_up_bias is None else tensors.gate_up_bias[expert],
        None if tensors.down_bias is None else tensors.down_bias[expert],
    )
