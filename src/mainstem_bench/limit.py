"""Computes the least time that a card needs for an offline job, if nothing overlaps.

    GEMM         every computed token through the layers, every answer token through the LM head
    attention    prompts by arithmetic; decodes by bytes, or by arithmetic if that takes longer
    elementwise  norms, rope, activations, residuals

A group's prefix is computed once and read once in each step that its members decode in. What
recurrent layers do between their two products is left out.
"""

from dataclasses import dataclass

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

    @property
    def total_s(self) -> float:
        return self.gemm_s + self.prompt_attention_s + self.decode_attention_s + self.elementwise_s


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
        )


def job_floor(card: Card, model: ModelCost, job: OfflineJob, kv_tokens: int) -> Floor:
    """Return the least time of `job` with KV memory for `kv_tokens`."""
    sizes = job.group_sizes()
    num_requests, num_groups = sum(sizes), len(sizes)
    computed = num_groups * job.prefix + num_requests * (job.distinct + job.output)
    flops = 2 * (model.size.num_params - model.num_expert_params) * computed
    flops += 2 * model.size.num_head_params * num_requests * job.output
    flops_per_s = model.gemm_flops_per_s or card.flops_per_s
    expert_s = 2 * model.num_expert_params * computed / (model.expert_flops_per_s or flops_per_s)
    return Floor(
        gemm_s=flops / flops_per_s + expert_s,
        prompt_attention_s=_prompt_pairs(job, num_groups, num_requests) * _pair_s(card, model),
        decode_attention_s=_decode_attention_s(card, model, job, kv_tokens),
        elementwise_s=computed * model.size.elementwise_bytes_per_token / card.bytes_per_s,
    )


def _pair_s(card: Card, model: ModelCost) -> float:
    """Return the seconds of one query token with one key token, in all layers."""
    return model.num_layers * model.heads.pair_flops / card.flops_per_s


def _prompt_pairs(job: OfflineJob, num_groups: int, num_requests: int) -> float:
    own = job.distinct * job.prefix + job.distinct**2 / 2
    return num_groups * job.prefix**2 / 2 + num_requests * own


def _decode_attention_s(card: Card, model: ModelCost, job: OfflineJob, kv_tokens: int) -> float:
    """Return the seconds of attention in decode steps. In a step, a prefix is read once for all its
    members that are in memory at that time."""
    key_s = model.size.kv_bytes_per_token / card.bytes_per_s
    pair_s = _pair_s(card, model)
    own_pairs = job.output * (job.distinct + job.output / 2)
    at_once = max(1.0, (kv_tokens - job.prefix) / max(1, job.distinct + job.output))
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
