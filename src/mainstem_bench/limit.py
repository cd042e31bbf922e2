"""Computes the least time that a card needs for an offline job, if nothing overlaps.

    GEMM         every computed token through the layers, every answer token through the LM head;
                 if the sizes of the job's steps are known: the sum over the steps of this, or of
                 reading the weights if that takes longer
    attention    prompts by arithmetic; decodes by bytes, or by arithmetic if that takes longer
    recurrent    the bytes of the layers that keep a state
    elementwise  norms, rope, activations, residuals

A group's prefix is computed once and read once in each step that its members decode in.

For a recurrent layer, with H heads of a state of k x v, K key heads, and 2-byte elements:

    bytes of a step = states of bases x H k v 4 + own rows x ((K k + H v) 2 + H 4)
                    + states written x H k v 4 + tokens x (2 K k + 2 H v) 2

The members of a group read the state at its prefix's end once in each of their steps. Each reads
its own rows, the tokens since that state, or reads and writes a state of its own if that is less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mainstem.models.recurrence import DeltaSpec, MambaSpec, RecurrentSpec
from mainstem.models.spec import ModelSpec
from mainstem.plan.cost import LLAMA_8B, Card, Heads, ModelSize
from mainstem_bench.workloads import OfflineJob

# numbers that norms, rope, activations and residuals move per layer and hidden unit of a token
ELEMENTWISE_MOVES = LLAMA_8B.elementwise_bytes_per_token / (32 * 4096 * 2)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of a whole job, by kind of work."""

    gemm_s: float
    prompt_attention_s: float
    decode_attention_s: float
    elementwise_s: float
    recurrent_s: float = 0.0

    @property
    def total_s(self) -> float:
        attention_s = self.prompt_attention_s + self.decode_attention_s
        return self.gemm_s + attention_s + self.elementwise_s + self.recurrent_s


@dataclass(frozen=True, slots=True)
class RecurrentCost:
    """Bytes that the recurrent layers of a model move, all together."""

    state: float  # the matrices of a state
    row: float  # what a sequence keeps of one of its tokens
    token: float  # queries, keys, values and outputs

    @classmethod
    def of(cls, layers: Sequence[RecurrentSpec], element_bytes: int) -> "RecurrentCost":
        """The sums over these layers; those without a matrix count nothing."""
        state = row = token = 0
        for layer in layers:
            heads, key_dim, value_dim = layer.matrix_shape
            key_heads = 0
            if isinstance(layer, DeltaSpec):
                key_heads = layer.key_heads
            elif isinstance(layer, MambaSpec):
                key_heads = layer.groups
            state += 4 * heads * key_dim * value_dim
            row += (key_heads * key_dim + heads * value_dim) * element_bytes + 4 * heads
            token += 2 * (key_heads * key_dim + heads * value_dim) * element_bytes
        return cls(state, row, token)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The numbers of a model that the floor needs."""

    size: ModelSize
    heads: Heads  # heads of one layer
    num_layers: int  # with attention
    gemm_flops_per_s: float | None = None  # None: the card's rate; fp8 weights have a higher one
    num_expert_params: int = 0  # weights of the experts that a token uses; part of size.num_params
    # rate of grouped products; None: the same as for other products
    expert_flops_per_s: float | None = None
    recurrent: RecurrentCost | None = None  # None: no layer keeps a state

    @classmethod
    def of(
        cls,
        shape: ModelSpec,
        element_bytes: int,
        gemm_flops_per_s: float | None = None,
        expert_flops_per_s: float | None = None,
    ) -> "ModelCost":
        """The cost of a shape with elements of `element_bytes`."""
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, element_bytes)
        size = ModelSize(
            num_params=shape.num_layer_params,
            num_head_params=shape.num_head_params,
            kv_bytes_per_token=shape.kv_elements_per_token * element_bytes,
            bytes_per_param=shape.bytes_per_param(element_bytes),
            num_idle_params=shape.num_idle_params,
            elementwise_bytes_per_token=ELEMENTWISE_MOVES
            * shape.num_layers
            * shape.hidden_size
            * element_bytes,
        )
        return cls(
            size,
            heads,
            len(shape.attentions),
            gemm_flops_per_s,
            shape.num_expert_params,
            expert_flops_per_s,
            RecurrentCost.of(shape.recurrences, element_bytes) if shape.recurrences else None,
        )


def job_floor(
    card: Card,
    model: ModelCost,
    job: OfflineJob,
    kv_tokens: int,
    step_tokens: Sequence[int] = (),
) -> Floor:
    """Return the least time of `job` with KV memory for `kv_tokens`. `step_tokens`: the sizes of
    the steps that it took; nothing is known of them if there are none."""
    sizes = job.group_sizes()
    num_requests, num_groups = sum(sizes), len(sizes)
    computed = num_groups * job.prefix + num_requests * (job.own_tokens + job.output)
    flops = 2 * (model.size.num_params - model.num_expert_params) * computed
    flops += 2 * model.size.num_head_params * num_requests * job.output
    flops_per_s = model.gemm_flops_per_s or card.flops_per_s
    expert_s = 2 * model.num_expert_params * computed / (model.expert_flops_per_s or flops_per_s)
    return Floor(
        gemm_s=_gemm_s(card, model, flops / flops_per_s + expert_s, step_tokens),
        prompt_attention_s=_prompt_pairs(job, num_groups, num_requests) * _pair_s(card, model),
        decode_attention_s=_decode_attention_s(card, model, job, kv_tokens),
        elementwise_s=computed * model.size.elementwise_bytes_per_token / card.bytes_per_s,
        recurrent_s=_recurrent_s(card, model, job, kv_tokens),
    )


def _gemm_s(card: Card, model: ModelCost, whole_s: float, step_tokens: Sequence[int]) -> float:
    """Return the seconds of all products: those of a step take as long as its share of the tokens,
    or as reading the weights. Of experts it reads those that its tokens use, if they choose
    evenly."""
    if not step_tokens:
        return whole_s
    tokens, size = np.array(step_tokens, np.float64), model.size
    num_idle, num_used = size.num_idle_params, model.num_expert_params
    missed = num_idle / max(num_idle + num_used, 1)  # the share of experts that a token leaves out
    experts = (num_idle + num_used) * (1 - missed**tokens)
    weights = size.num_params - num_used + size.num_head_params + experts
    read_s = weights * size.bytes_per_param / card.bytes_per_s
    return float(np.maximum(whole_s * tokens / tokens.sum(), read_s).sum())


def _recurrent_s(card: Card, model: ModelCost, job: OfflineJob, kv_tokens: int) -> float:
    """Return the seconds of the recurrent layers, between their products."""
    if (cost := model.recurrent) is None:
        return 0.0
    own, at_once = job.own_tokens, _at_once(job, kv_tokens)
    rows = own + np.arange(job.output)
    decode = np.minimum(rows * cost.row, 2 * cost.state).sum()
    num_bytes = 0.0
    for members in job.group_sizes():
        num_tokens = job.prefix + members * (own + job.output)
        kept = members * (decode + min(own * cost.row, cost.state))  # what a prompt leaves
        reads = (1 + job.output) * max(1.0, members / at_once) if members > 1 else 0.0
        num_bytes += kept + (reads + 1) * cost.state + num_tokens * cost.token
    return float(num_bytes) / card.bytes_per_s


def _at_once(job: OfflineJob, kv_tokens: int) -> float:
    """Return how many members of a group have room in memory."""
    return max(1.0, (kv_tokens - job.prefix) / max(1.0, job.own_tokens + job.output))


def _pair_s(card: Card, model: ModelCost) -> float:
    """Return the seconds of one query token with one key token, in all layers."""
    return model.num_layers * model.heads.pair_flops / card.flops_per_s


def _prompt_pairs(job: OfflineJob, num_groups: int, num_requests: int) -> float:
    own = job.own_tokens * job.prefix + job.own_tokens**2 / 2
    return num_groups * job.prefix**2 / 2 + num_requests * own


def _decode_attention_s(card: Card, model: ModelCost, job: OfflineJob, kv_tokens: int) -> float:
    """Return the seconds of attention in decode steps. In a step, a prefix is read once for all its
    members that are in memory at that time."""
    key_s = model.size.kv_bytes_per_token / card.bytes_per_s
    pair_s = _pair_s(card, model)
    own_pairs = job.output * (job.own_tokens + job.output / 2)
    at_once = _at_once(job, kv_tokens)
    total_s = 0.0
    for members in job.group_sizes():
        if members > 1:
            reads = job.output * max(1.0, members / at_once)
            pairs = members * job.output * job.prefix
            total_s += max(reads * job.prefix * key_s, pairs * pair_s)
            total_s += members * own_pairs * max(key_s, pair_s)
        else:
            total_s += (own_pairs + job.output * job.prefix) * max(key_s, pair_s)
    return total_s
