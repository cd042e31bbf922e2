"""Shows the tokens per step over a job: the valleys of BatchLLM's Fig. 2 and 9.

The real scheduler and store run a workload; times come from a cost model of an H200, not from a
device. `mainstem bench paper batch-tab2` measures the same on a device.

    capped     prompts in input order, pages kept by LRU, at most --max-seqs at once
    as given   the same, but limited only by memory
    grouped    prompts with equal prefixes together, groups in input order
    planned    groups with much to generate first

With --spread 0 all answers are equally long, and the result is compared with the limit of the card:
the scheduler is the cause of the difference.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.plan import Prompts
from mainstem.plan.cost import H200
from mainstem.plan.planner import PlanConfig
from mainstem_bench.feed import Feed, Order
from mainstem_bench.limit import ModelCost, job_floor
from mainstem_bench.report import line
from mainstem_bench.shapes import SHAPES
from mainstem_bench.step_trace import StepTrace
from mainstem_bench.virtual_engine import ELEMENT_BYTES, some_result, virtual_s, virtual_scheduler
from mainstem_bench.workloads import OFFLINE_JOBS, OfflineJob, shuffled
from mainstem_simulate.plots import new_figure, require_matplotlib, save_figure

WAYS = {  # how prompts are planned; None: not planned
    "capped": None,
    "as given": None,
    "grouped": PlanConfig(reorders=False),
    "planned": PlanConfig(),
}


@dataclass(frozen=True, slots=True)
class JobTrace:
    """One way through the job."""

    way: str
    trace: StepTrace
    saving_ratio: float
    preemptions: int

    def summary(self, num_requests: int) -> dict[str, object]:
        return {
            "way": self.way,
            "requests_per_s": round(num_requests / self.trace.seconds, 2),
            "seconds": round(self.trace.seconds, 2),
            "saving_ratio": round(self.saving_ratio, 4),
            "preemptions": self.preemptions,
            **self.trace.summary(),
        }


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench valleys", description=__doc__)
    made.add_argument("--workload", choices=list(OFFLINE_JOBS), default="industry")
    flag = partial(add_flag, made)
    flag("--groups", positive_count, "documents (the workload's)")
    flag("--output", positive_count, "mean tokens of an answer (the workload's own)")
    flag("--spread", float, "outputs are shorter or longer by up to this share of the mean", 0.5)
    flag("--kv-tokens", positive_count, "of KV (the workload's)")
    made.add_argument("--chunk-tokens", type=int, default=4096)
    flag("--max-seqs", positive_count, "limit of `capped`", 256)
    made.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    made.add_argument("--plot", type=Path, metavar="FILE.png")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.plot is not None:
        require_matplotlib()
    if not 0 <= args.spread < 1:
        raise ConfigError(f"--spread must be at least 0 and below 1, got {args.spread}")
    job = OFFLINE_JOBS[args.workload]
    job = replace(
        job,
        groups=args.groups or job.groups,
        output=args.output or job.output,
        kv_tokens=args.kv_tokens or job.kv_tokens,
    )
    model = ModelCost.of(SHAPES[job.model_shape], ELEMENT_BYTES)
    prompts = Prompts.from_lists(shuffled(job.prompts(SHAPES[job.model_shape].vocab_size)))
    rng = random.Random(2)
    low, high = 1 - args.spread, 1 + args.spread
    outputs = [round(job.output * rng.uniform(low, high)) for _ in range(len(prompts))]
    runs = []
    for way in args.ways:
        max_seqs = args.max_seqs if way == "capped" else None
        config = SchedConfig(chunk_tokens=args.chunk_tokens, max_seqs=max_seqs)
        runs.append(run(job, model, prompts, outputs, config, way))
        result = {"workload": job.name, **runs[-1].summary(len(prompts))}
        if args.spread == 0:
            limit_s = job_floor(H200, model, job, job.kv_tokens).total_s
            result["share_of_limit"] = round(limit_s / runs[-1].trace.seconds, 4)
        print(line("valleys", result), flush=True)
    if args.plot is not None:
        plot(runs, args.plot)
    return 0


def run(
    job: OfflineJob,
    model: ModelCost,
    prompts: Prompts,
    outputs: Sequence[int],
    config: SchedConfig,
    way: str,
) -> JobTrace:
    """Run the whole job in virtual time."""
    bus = EventBus()
    counters = Counters().attach(bus)
    vocab_size = SHAPES[job.model_shape].vocab_size
    scheduler = virtual_scheduler(config, model, vocab_size, job.kv_tokens, bus)
    lengths, plan = np.array(outputs), WAYS[way]
    order = Order.as_given(prompts) if plan is None else Order.planned(prompts, lengths, plan)
    feed = Feed(scheduler, prompts, order, lengths)
    trace = StepTrace()
    now_s = 0.0
    while not feed.is_empty or scheduler.has_work:
        feed.top_up()
        step = scheduler.next_step()
        assert step is not None, "nothing can run, with nothing in flight"
        now_s += virtual_s(model, step)
        trace.add(now_s, step.num_tokens, step.num_decodes)
        scheduler.commit(step, some_result(step))
        scheduler.take_outputs()
    scheduler.check()
    return JobTrace(way, trace, counters.saving_ratio, counters.preemptions)


def plot(runs: Sequence[JobTrace], path: Path) -> None:
    """Plot tokens per step against time, with decodes below, one row for each way."""
    figure = new_figure(9, 1 + 1.7 * len(runs))
    rows = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, each in zip(rows, runs, strict=True):
        trace = each.trace
        for values, color, label in (
            (trace.num_tokens, "#9ecae1", "all"), (trace.num_decodes, "#08519c", "decodes")
        ):  # fmt: skip
            axes.fill_between(trace.ends_s, values, step="pre", color=color, label=label)
        title = f"{each.way}: {trace.seconds:.1f} s, {each.saving_ratio:.0%} of prompt tokens saved"
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylabel("tokens in a step")
    rows[0].legend(loc="lower right", fontsize=8)
    rows[-1].set_xlabel("seconds (cost model of an H200)")
    save_figure(figure, path)
