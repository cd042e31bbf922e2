"""A scheduler without a device, for benches: steps take the time of the cost model of an H200."""

from functools import partial

import numpy as np

from mainstem.core.config import SchedConfig
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.request import Output, Request
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


class VirtualEngine:
    """A scheduler whose steps take the time of the cost model. One is in flight while the next is
    made."""

    def __init__(
        self, model: ModelCost, vocab_size: int, kv_tokens: int, config: SchedConfig
    ) -> None:
        self.bus = bus = EventBus()
        self.counters = Counters().attach(bus)
        self.now_s = 0.0
        self._model = model
        self.scheduler = virtual_scheduler(config, model, vocab_size, kv_tokens, bus)
        self._in_flight: tuple[Step, float, float] | None = None  # its seconds, and its end
        self._free_s = 0.0  # when the device has done all steps

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)

    def wait_until(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def step(self) -> list[Output]:
        """Begin a step, and end the one before it."""
        done, self._in_flight = self._in_flight, None
        if (step := self.scheduler.next_step()) is not None:
            device_s = virtual_s(self._model, step)
            self._free_s = max(self._free_s, self.now_s) + device_s
            self._in_flight = step, device_s, self._free_s
        assert done is not None or step is not None, "nothing can run, with nothing in flight"
        if done is not None:
            self._take_in(*done)
        return self.scheduler.take_outputs()

    def _take_in(self, step: Step, device_s: float, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)
        self.scheduler.commit(step, some_result(step), device_s)
