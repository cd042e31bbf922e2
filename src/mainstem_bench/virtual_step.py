"""The time of a step by the cost model of an H200, for benches that run the scheduler alone."""

from mainstem.core.step import Step
from mainstem.plan.cost import H200
from mainstem_bench.floors import span_floor_s
from mainstem_bench.limit import ModelCost


def virtual_s(model: ModelCost, step: Step) -> float:
    """Return the seconds of a step by the cost model: reading the weights, products, elementwise
    work and attention.

    On an H200 a step that decodes takes 2.9 ms plus 0.04 ms for each sequence (Llama2-7B): reading
    the weights does not overlap with the products.
    """
    heads = model.heads
    attention_s = model.num_layers * span_floor_s(
        H200, step.spans, heads=heads.heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim
    )
    size, num_samples = model.size, len(step.sample_rows)
    flops = 2 * (size.num_params * step.num_tokens + size.num_head_params * num_samples)
    moved = (size.num_params + size.num_head_params) * size.bytes_per_param
    moved += step.num_tokens * size.elementwise_bytes_per_token
    return flops / H200.flops_per_s + moved / H200.bytes_per_s + attention_s
