"""RelayAttention's Fig. 8: latency against the rate of arrivals, for the three systems."""

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from mainstem.core.config import Share
from mainstem.core.metrics import Counters
from mainstem_bench.arrivals import Arrival, TimedAnswer, answer_arrivals, arrival_times
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Number, Outcome, Settings, Sustained, Verdict
from mainstem_bench.paper.jobs import SYSTEMS, engine_of, limit_per_s
from mainstem_bench.paper.lengths import sharegpt_requests
from mainstem_bench.paper.relay_jobs import LLAMA_7B, LOOKS, MOST_ANSWER, NAMES, sharegpt_job
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rules import can_be_sustained, weighed
from mainstem_bench.paper.style import Figure
from mainstem_bench.report import spread

SYSTEM = 2048
LONG_S = (
    0.015  # limit per token: three times an idle engine's; the paper's limit is 0.5 s on an A40
)
RATES = {Share.READS: (32, 64, 80, 96), Share.STORAGE: (8, 16, 24, 32), Share.NONE: (2, 4, 6, 8)}
NUM_RATES = sum(len(rates) for rates in RATES.values())
SEND_S = 36.0  # how long requests arrive, on average
GROWS = 1.2  # the queue grows if this many times as many requests are open in the last third


def run_rates(settings: Settings) -> Iterator[Line]:
    """Measure the latency at each rate."""
    size = settings.sized(LLAMA_7B)
    for share, rates in RATES.items():
        for rate in (20,) if settings.is_quick else rates:
            count = 10 if settings.is_quick else round(SEND_S * rate)
            system = 64 if settings.is_quick else SYSTEM
            job, lengths = sharegpt_job(settings, system, count)
            arrivals = [
                Arrival(due_s, job.prompts[at], int(job.answers[at]))
                for at, due_s in enumerate(arrival_times(count, rate))
            ]
            with engine_of(settings, size, share) as engine:
                counters = Counters().attach(engine.bus)
                began_s = perf_counter()
                answers = answer_arrivals(engine, arrivals)
                seconds = perf_counter() - began_s
            per_token = [
                answer.total_s / arrival.output
                for answer, arrival in zip(answers, arrivals, strict=True)
            ]
            limit = limit_per_s(size, 1, count, lengths)
            yield {
                "system": system,
                "share": share.value,
                "paper_name": SYSTEMS[share],
                "rate": rate,
                "requests": count,
                "requests_per_s": round(count / seconds, 2),
                **spread("norm_ms", per_token),
                **spread("ttft_ms", [answer.first_token_s for answer in answers]),
                "steps": counters.steps,
                "sent_s": round(arrivals[-1].due_s, 1),
                "latency_s": round(float(np.mean([answer.total_s for answer in answers])), 3),
                "is_queue_growing": is_growing(answers),
                "limit_requests_per_s": None if settings.is_quick else round(limit, 1),
            }


def is_growing(answers: Sequence[TimedAnswer]) -> bool:
    """Whether more requests are open in the last third of the arrivals than in the second."""
    last_s = answers[-1].due_s

    def mean_open(from_s: float, to_s: float) -> float:
        times = np.linspace(from_s, to_s, 20)
        due, end = (
            np.array(each)
            for each in zip(*((a.due_s, a.token_s[-1]) for a in answers), strict=True)
        )
        return float(np.mean([((due <= at) & (end > at)).sum() for at in times]))

    return mean_open(2 / 3 * last_s, last_s) > GROWS * mean_open(last_s / 3, 2 / 3 * last_s)


def sustained(lines: Sequence[Line], share: str) -> list[Sustained]:
    """Return the rates at which a token took at most LONG_S on average, lowest first."""
    found = sorted(only(lines, share=share), key=lambda line: line["rate"])
    return [
        Sustained(
            line["rate"],
            line.get("limit_requests_per_s") or _limit_per_s(line),
            line.get("sent_s", line["requests"] / line["rate"]),
            line.get("latency_s"),
            line.get("is_queue_growing"),
        )
        for line in found
        if line["norm_ms_mean"] <= 1e3 * LONG_S
    ]


def _limit_per_s(line: Line) -> float:
    drawn = sharegpt_requests(line["requests"], MOST_ANSWER)
    lengths = (line["system"], float(drawn.users.mean()), float(drawn.answers.mean()))
    return limit_per_s(LLAMA_7B, 1, line["requests"], lengths)


def plot_rates(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    for share, look in LOOKS.items():
        found = only(lines, share=share.value)
        style.curve(axes, found, "rate", "norm_ms_mean", NAMES[share], look)
    axes.axhline(1e3 * LONG_S, label=f"{1e3 * LONG_S:g} ms a token", **style.LIMIT)
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    rates = sorted({line["rate"] for line in lines})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    title = f"ShareGPT lengths after a system prompt of {lines[0]['system']:,}, Llama2-7B, H200"
    style.finish(axes, title, "requests a second arrive", "ms a token, mean")


def judge_rates(lines: Sequence[Line]) -> Verdict:
    best = {}
    for share in ("none", "storage", "reads"):
        rates = [each for each in sustained(lines, share) if can_be_sustained(each)]
        if not rates:
            return Verdict(Outcome.NOT, _bursts(lines))
        best[share] = rates[-1]
    over = best["reads"].per_s / best["storage"].per_s
    numbers = (Number(over, 2.2, 0.2),)
    return Verdict(
        weighed(numbers),
        f"of the rates that were tried, with at most {1e3 * LONG_S:g} ms per token reading once "
        f"sustains {best['reads'].per_s:g} requests/s, storing once {best['storage'].per_s:g}, and "
        f"sharing nothing {best['none'].per_s:g}: reading once sustains {over:.1f} times as many "
        "as storing once (paper, at 0.5 s per token: 2.2)",
        numbers,
        sustained=tuple(best.values()),
    )


def _bursts(lines: Sequence[Line]) -> str:
    """Say why no rate counts as sustained, and what was measured all the same."""
    seconds = [line.get("sent_s", line["requests"] / line["rate"]) for line in lines]
    rates = {
        each: {line["rate"] for line in only(lines, share=each)} for each in ("reads", "storage")
    }
    rate = max(rates["reads"] & rates["storage"])
    reads, stored = (one(lines, share=each, rate=rate) for each in ("reads", "storage"))
    highest = max(lines, key=lambda line: line["rate"])
    return (
        f"no rate was shown to be sustained: requests arrived for only {min(seconds):.0f} to "
        f"{max(seconds):.0f} s at each rate, and it was not measured whether the queue grew. The "
        f"highest rate, {highest['rate']}, is above the card's limit for this load, "
        f"{_limit_per_s(highest):.0f}. In these bursts, at {rate} requests/s, a token took "
        f"{reads['norm_ms_mean']:.1f} ms on average if the system prompt was read once, and "
        f"{stored['norm_ms_mean']:.1f} ms if it was stored once"
    )
