"""Tokens per step over a job, planner off and on: the valleys of BatchLLM's Fig. 2 and 9.

The real scheduler and store run a workload against the clock of a cost model (an 8B model on an
H200) instead of a device. Off: prompts in the order they come, pages kept by LRU. On: planned.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mainstem.apps.bench.report import line
from mainstem.apps.jobs.ordering import shared_with_next
from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.plan import Prompts
from mainstem.core.request import Delivery, Request, SamplingParams
from mainstem.core.step import Int32s, StepResult
from mainstem.kv.store import KVStore
from mainstem.plan.cost import H200, LLAMA_8B, step_s
from mainstem.plan.planner import plan_prompts
from mainstem.sched.scheduler import Scheduler

VOCAB = 30_000
PAGE_SIZE = 16


@dataclass(slots=True)
class Trace:
    """One job, step by step."""

    name: str
    ends_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_decodes: list[int] = field(default_factory=list)
    saving_ratio: float = 0.0
    preemptions: int = 0

    def summary(self, num_requests: int) -> dict[str, object]:
        seconds = self.ends_s[-1]
        spent = np.diff(self.ends_s, prepend=0.0)
        small = np.array(self.num_tokens) < max(self.num_tokens) / 4
        return {
            "planner": self.name,
            "requests_per_s": round(num_requests / seconds, 2),
            "seconds": round(seconds, 2),
            "steps": len(self.ends_s),
            "saving_ratio": round(self.saving_ratio, 4),
            "valley_share": round(float(spent[small].sum() / seconds), 3),
            "preemptions": self.preemptions,
        }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "mainstem bench valleys", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--groups", type=int, default=667)
    made.add_argument("--degree", type=int, default=3)
    made.add_argument("--prefix", type=int, default=1570)
    made.add_argument("--distinct", type=int, default=30)
    made.add_argument("--output", type=int, default=100, help="mean tokens out; half to double")
    made.add_argument("--kv-tokens", type=int, default=450_000)
    made.add_argument("--chunk-tokens", type=int, default=4096)
    made.add_argument("--plot", type=Path, metavar="FILE.png")
    made.add_argument("--json", action="store_true", help="the only form there is")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    prompts = Prompts.from_lists(_shuffled_prompts(args))
    rng = random.Random(2)
    outputs = [round(args.output * rng.uniform(0.5, 1.5)) for _ in range(len(prompts))]
    traces = [run(args, prompts, outputs, is_planned) for is_planned in (False, True)]
    for trace in traces:
        print(line("valleys", trace.summary(len(prompts))))
    if args.plot is not None:
        plot(traces, args.plot)
    return 0


def run(
    args: argparse.Namespace, prompts: Prompts, outputs: Sequence[int], is_planned: bool
) -> Trace:
    """The whole job in virtual time."""
    bus = EventBus()
    counters = Counters().attach(bus)
    store = KVStore(args.kv_tokens // PAGE_SIZE, PAGE_SIZE, b"valleys", bus)
    config = SchedConfig(chunk_tokens=args.chunk_tokens)
    scheduler = Scheduler(config, store, VOCAB, args.kv_tokens, bus)
    order: Sequence[int] = range(len(prompts))
    first: int | None = None
    if is_planned:
        plan = plan_prompts(prompts, max_tokens=np.array(outputs))
        order = plan.members.tolist()
        first = scheduler.expect(shared_with_next(plan))
    for place, index in enumerate(order):
        sampling = SamplingParams(temperature=0.0, max_tokens=outputs[index], ignore_eos=True)
        request = Request(
            RequestId(str(index)),
            prompts[index],
            sampling,
            delivery=Delivery.AT_END,
            plan_place=None if first is None else first + place,
        )
        scheduler.submit(request)
    trace = Trace("on" if is_planned else "off")
    now_s = 0.0
    while (step := scheduler.next_step()) is not None:
        read = int(step.spans.key_tokens.sum())
        num_samples = len(step.sample_rows)
        now_s += step_s(H200, LLAMA_8B, step.num_tokens, num_samples, read)
        trace.ends_s.append(now_s)
        trace.num_tokens.append(step.num_tokens)
        trace.num_decodes.append(step.num_decodes)
        tokens: Int32s = np.full(num_samples, 7, np.int32)
        scheduler.commit(step, StepResult(tokens, {}, ()))
    scheduler.check()
    trace.saving_ratio, trace.preemptions = counters.saving_ratio, counters.preemptions
    return trace


def plot(traces: list[Trace], path: Path) -> None:
    """Tokens per step against time, decodes below, one row a trace."""
    try:
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install mainstem[plot]") from error
    figure, rows = pyplot.subplots(len(traces), 1, figsize=(9, 5), sharex=True, sharey=True)
    for axes, trace in zip(rows, traces, strict=True):
        axes.fill_between(trace.ends_s, trace.num_tokens, step="pre", color="#9ecae1", label="all")
        axes.fill_between(
            trace.ends_s, trace.num_decodes, step="pre", color="#08519c", label="decodes"
        )
        axes.set_ylabel("tokens in a step")
        axes.set_title(
            f"planner {trace.name}: {trace.ends_s[-1]:.1f} s, "
            f"{trace.saving_ratio:.0%} of prompt tokens saved",
            loc="left",
            fontsize=10,
        )
    rows[0].legend(loc="lower right", fontsize=8)
    rows[-1].set_xlabel("seconds (cost model of an H200, 8B)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _shuffled_prompts(args: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(0)
    prompts = []
    for _ in range(args.groups):
        head = [rng.randrange(10, VOCAB) for _ in range(args.prefix)]
        for _ in range(args.degree):
            prompts.append(head + [rng.randrange(10, VOCAB) for _ in range(args.distinct)])
    random.Random(1).shuffle(prompts)
    return prompts
