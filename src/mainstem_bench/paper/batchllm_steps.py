"""BatchLLM's token batching, step by step: Fig. 2 and 9, Table 2.

Off: at most 256 answers are in progress, in the order in which prompts come. If prefixes are
shared, prompts with equal prefixes are still brought together. On: memory is the limit, and groups
with long answers go first.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from mainstem.core.config import Share
from mainstem.plan.planner import PlanConfig
from mainstem_bench.feed import run_job
from mainstem_bench.paper import style
from mainstem_bench.paper.batchllm_plans import industry_rows
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Line, Number, Outcome, Settings, Verdict
from mainstem_bench.paper.jobs import Job, engine_of
from mainstem_bench.paper.lengths import sharegpt_requests
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rules import LEAST_RUNS, gain_of, weighed
from mainstem_bench.paper.style import Figure
from mainstem_bench.step_trace import StepTrace

QWEN_7B = Size("qwen25-7b", 700_000)  # more KV than 256 answers need, as on the paper's card
VLLM_SEQS = 256  # vLLM's default for requests in a step
MOST_ANSWER = 256
POINTS = 300  # points in a plot
SHARES = {"nothing shared": Share.NONE, "prefixes shared": Share.READS}
PAPER = {  # requests/s on an A100: token batching off, on
    "nothing shared": (5.79, 5.94),
    "prefixes shared": (8.16, 8.47),
}


def a_job(settings: Settings) -> Job:
    """Make prompts of the industry mix. Answers are as long as ShareGPT's first answers, up to 256
    tokens."""
    count = 24 if settings.is_quick else 3000
    answers = sharegpt_requests(count, MOST_ANSWER).answers
    if settings.is_quick:
        answers = np.minimum(answers, 12)
    return Job.of(industry_rows(settings, count), answers)


def measure(settings: Settings) -> Iterator[Line]:
    """Measure steps with sharing and token batching off and on."""
    job, size = a_job(settings), settings.sized(QWEN_7B)
    for shared, share in SHARES.items():
        for batching in ("off", "on"):
            max_seqs = None if batching == "on" else 4 if settings.is_quick else VLLM_SEQS
            rates = []
            for _ in range(1 if settings.is_quick else LEAST_RUNS):
                with engine_of(settings, size, share, max_seqs) as engine:
                    found = run_job(
                        engine,
                        job.prompts,
                        job.answers,
                        # without sharing, grouping alone would only change the order
                        is_planned=batching == "on" or share is not Share.NONE,
                        plan=PlanConfig(reorders=batching == "on"),
                    )
                rates.append(round(len(job.prompts) / found.seconds, 3))
            steps = found.steps
            decodes = np.subtract(steps.num_tokens, steps.num_prompt_tokens).tolist()
            trace = StepTrace(steps.ends_s, steps.num_tokens, decodes)
            yield {
                "shared": shared,
                "batching": batching,
                "max_seqs": max_seqs,
                "model_shape": size.shape,
                "requests": len(job.prompts),
                "prompts": job.digest,
                "requests_per_s": float(np.median(rates)),
                "spread": [min(rates), max(rates)],
                "num_runs": len(rates),
                "seconds": round(found.seconds, 3),
                "saving_ratio": round(found.counters.saving_ratio, 4),
                "preemptions": found.counters.preemptions,
                **trace.summary(),
                "trace": trace.thinned(POINTS),
            }


def _measured(settings: Settings) -> list[Line]:
    """Return all four results, which are measured once for all items that show them."""
    return settings.once("batch-steps", lambda: measure(settings))


def run_baseline(settings: Settings) -> Iterator[Line]:
    """Fig. 2."""
    yield from only(_measured(settings), shared="nothing shared", batching="off")


def run_both(settings: Settings) -> Iterator[Line]:
    """Fig. 9."""
    yield from only(_measured(settings), shared="nothing shared")


def run_table(settings: Settings) -> Iterator[Line]:
    """Table 2."""
    for line in _measured(settings):
        del line["trace"]
        yield line


def _draw(lines: Sequence[Line], figure: Figure, batchings: Sequence[str]) -> None:
    panels = figure.subplots(len(batchings), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, batching in zip(panels, batchings, strict=True):
        line = one(lines, shared="nothing shared", batching=batching)
        trace = line["trace"]
        looks = ((trace["tokens"], style.NOTHING, "prompts"), (trace["decodes"], style.OURS, None))
        for values, look, name in looks:
            label = name or "answers"
            axes.fill_between(trace["at_s"], values, step="pre", color=look["color"], label=label)
        title = (
            f"token batching {batching}: {line['requests_per_s']:.1f} requests/s, valleys "
            f"{line['valley_share']:.1%} of the time, tail {line['tail_share']:.1%}"
        )
        style.finish(axes, title, "seconds", "tokens in a step")


def plot_baseline(lines: Sequence[Line], figure: Figure) -> None:
    _draw(lines, figure, ("off",))


def plot_both(lines: Sequence[Line], figure: Figure) -> None:
    _draw(lines, figure, ("off", "on"))


def judge_baseline(lines: Sequence[Line]) -> Verdict:
    off = one(lines, shared="nothing shared", batching="off")
    return Verdict(
        Outcome.PARTLY if off["valley_share"] > 0.02 else Outcome.NOT,
        f"at most {off['max_seqs']} sequences run at once, in input order. "
        f"{off['valley_share']:.1%} of the time goes to valleys: steps with less than a quarter of "
        f"the largest step's tokens, although prompts wait. {off['tail_share']:.1%} goes to the "
        "tail: only answers are left. This is our engine under vLLM's limit, not vLLM",
    )


def judge_both(lines: Sequence[Line]) -> Verdict:
    off, on = (one(lines, shared="nothing shared", batching=each) for each in ("off", "on"))
    is_less = on["valley_share"] < off["valley_share"] and on["extra_steps"] < off["extra_steps"]
    return Verdict(
        Outcome.REPRODUCED if is_less else Outcome.NOT,
        f"with token batching off and on: {off['extra_steps']} and {on['extra_steps']} steps more "
        f"than the fewest possible; {off['tokens_per_step']:.0f} and {on['tokens_per_step']:.0f} "
        f"tokens a step; valleys take {off['valley_share']:.1%} and {on['valley_share']:.1%} of "
        f"the time, the tail {off['tail_share']:.1%} and {on['tail_share']:.1%}",
    )


def plot_table(lines: Sequence[Line], figure: Figure) -> None:
    here, paper = figure.subplots(1, 2)
    looks = {"off": style.NOTHING, "on": style.OURS}
    ours = {
        f"token batching {batching}": (
            [one(lines, shared=shared, batching=batching)["requests_per_s"] for shared in SHARES],
            look,
        )
        for batching, look in looks.items()
    }
    theirs = {
        f"token batching {batching}": ([PAPER[shared][at] for shared in SHARES], look)
        for at, (batching, look) in enumerate(looks.items())
    }
    style.bars(here, list(SHARES), ours, "{:.1f}")
    style.bars(paper, list(SHARES), theirs, "{:.2f}")
    style.finish(here, "here: industry mix, one H200", "", "requests/s")
    style.finish(paper, "paper: A100", "", "requests/s")


def judge_table(lines: Sequence[Line]) -> Verdict:
    gains, numbers, told = [], [], []
    for shared in SHARES:
        off, on = (one(lines, shared=shared, batching=each) for each in ("off", "on"))
        gains.append(gain_of(on, off))
        more = on["requests_per_s"] / off["requests_per_s"] - 1
        paper = PAPER[shared][1] / PAPER[shared][0] - 1
        numbers.append(Number(more, paper, 0.5))
        told.append(
            f"with {shared}, token batching gains {more:.1%} (paper {paper:.1%}): valleys fall "
            f"from {off['valley_share']:.1%} to {on['valley_share']:.1%} of the time, and the tail "
            f"goes from {off['tail_share']:.1%} to {on['tail_share']:.1%}"
        )
    is_gain = min(number.ours for number in numbers) >= 0.02
    if not is_gain:
        told.append("the first gain is below 2 %, which is less than runs differ")
    if min(gain.our_runs.count for gain in gains) < LEAST_RUNS:
        told.append("each number is from one run")
    return Verdict(
        weighed(numbers) if is_gain else Outcome.NOT,
        "; ".join(told),
        tuple(numbers),
        tuple(gains),
    )
