"""RelayAttention's Fig. 8: latency against the rate of arrivals, for the three systems."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from mainstem.core.config import Share
from mainstem.core.metrics import Counters
from mainstem_bench.arrivals import Arrival, answer_arrivals, arrival_times
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Outcome, Settings, Verdict
from mainstem_bench.paper.jobs import SYSTEMS, Job, engine_of
from mainstem_bench.paper.lengths import sharegpt_requests
from mainstem_bench.paper.relay_jobs import LLAMA_7B, LOOKS, MOST_ANSWER, NAMES
from mainstem_bench.paper.results import only
from mainstem_bench.report import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEM = 2048
LONG_S = (
    0.015  # limit per token: three times an idle engine's; the paper's limit is 0.5 s on an A40
)
RATES = {Share.READS: (32, 64, 96, 128), Share.STORAGE: (8, 16, 32, 48), Share.NONE: (2, 4, 8, 12)}
SEND_S = 5.0  # how long requests arrive; longer at rates below 8 a second, for 40 requests


def run_rates(settings: Settings) -> Iterator[Line]:
    """Measure each rate for a few seconds; stop after a rate that is far too high to sustain."""
    size = settings.sized(LLAMA_7B)
    for share, rates in RATES.items():
        for rate in (20,) if settings.is_quick else rates:
            count = 10 if settings.is_quick else max(40, round(SEND_S * rate))
            drawn = sharegpt_requests(count, 8 if settings.is_quick else MOST_ANSWER)
            users = np.minimum(drawn.users, 64) if settings.is_quick else drawn.users
            system = 64 if settings.is_quick else SYSTEM
            job = Job.after_prefixes([system], users.tolist(), drawn.answers, [0] * count)
            arrivals = [
                Arrival(due_s, job.prompts[at], int(drawn.answers[at]))
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
            }
            if np.mean(per_token) > 4 * LONG_S:
                break


def sustained(lines: Sequence[Line], share: str, most_ms: float) -> float:
    """Return the rate at which a token takes `most_ms` on average, interpolated between measured
    rates. If tokens were faster at all rates, return the highest measured rate."""
    found = sorted(only(lines, share=share), key=lambda line: line["rate"])
    x, y = [line["rate"] for line in found], [line["norm_ms_mean"] for line in found]
    return float(np.interp(most_ms, np.maximum.accumulate(y), x))


def plot_rates(lines: Sequence[Line], figure: "Figure") -> None:
    axes = figure.subplots()
    for share, look in LOOKS.items():
        found = only(lines, share=share.value)
        x, y = [line["rate"] for line in found], [line["norm_ms_mean"] for line in found]
        axes.plot(x, y, label=NAMES[share], **look)
    axes.axhline(1e3 * LONG_S, label=f"{1e3 * LONG_S:g} ms a token", **style.LIMIT)
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    rates = sorted({line["rate"] for line in lines})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    title = f"ShareGPT lengths after a system prompt of {lines[0]['system']:,}, Llama2-7B, H200"
    style.finish(axes, title, "requests a second arrive", "ms a token, mean")


def judge_rates(lines: Sequence[Line]) -> Verdict:
    rates = {share: sustained(lines, share, 1e3 * LONG_S) for share in ("none", "storage", "reads")}
    most = {share: max(line["rate"] for line in only(lines, share=share)) for share in rates}
    over = rates["reads"] / rates["storage"]
    at_least = " or more" if rates["reads"] >= most["reads"] else ""
    return Verdict(
        Outcome.EXCEEDED if over > 2.2 else Outcome.REPRODUCED if over > 1.3 else Outcome.NOT,
        f"with at most {1e3 * LONG_S:g} ms per token, over at least {SEND_S:g} s, "
        f"reading once sustains {rates['reads']:.0f}{at_least} requests/s, storing once "
        f"{rates['storage']:.0f}, and sharing nothing {rates['none']:.0f}: reading once sustains "
        f"{over:.1f} times as many as storing once",
    )
