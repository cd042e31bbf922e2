"""A scheduler without a device, for benches: steps take the time of the cost model of an H200."""

from functools import partial

import numpy as np

from mainstem.core.config import SchedConfig
from mainstem.core.events import EventBus
from mainstem.core.step import Step, StepResult
from mainstem.kv.store import KVStore
from mainstem.plan.cost import H200, worth_sharing
from mainstem.sched.scheduler import Scheduler
from mainstem_bench.floors import span_floor_s
from mainstem_bench.limit import ModelCost

PAGE_SIZE = 16
ELEMENT_BYTES = 2  # bf16


def virtual_scheduler(
    config: SchedConfig, model: ModelCost, vocab_size: int, kv_tokens: int, bus: EventBus
) -> Scheduler:
    """Make a scheduler with pages for `kv_tokens`."""
    store = KVStore(kv_tokens // PAGE_SIZE, PAGE_SIZE, b"virtual", bus)
    share = partial(worth_sharing, H200, model.heads)
    return Scheduler(config, store, vocab_size, kv_tokens, bus, worth_sharing=share)


def some_result(step: Step) -> StepResult:
    """A token for each row of a step that samples one."""
    return StepResult(np.full(len(step.sample_rows), 7, np.int32), {}, ())


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
