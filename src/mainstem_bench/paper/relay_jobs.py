"""RelayAttention's batch jobs, Fig. 7 and 10, each for the paper's three systems."""

from collections.abc import Iterator, Sequence

import numpy as np

from mainstem.core.config import Share
from mainstem.core.plan import Int64s
from mainstem_bench.paper import style
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Gain, Line, Number, Settings, Verdict
from mainstem_bench.paper.jobs import SYSTEMS, Job, limit_per_s, run
from mainstem_bench.paper.lengths import sharegpt_requests
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rivals import rival, rival_job
from mainstem_bench.paper.rules import LEAST_RUNS, differing, gain_of, weighed
from mainstem_bench.paper.style import Axes, Figure
from mainstem_bench.workloads import OFFLINE_JOBS

LLAMA_7B = Size("llama2-7b", 160_000)
SYSTEM_TOKENS = (64, 512, 1024, 2048)
MOST_ANSWER = 256  # a run on a fast card would otherwise wait for its longest answer
SYNTHETIC = ((64, 128), (128, 256), (256, 512))  # user tokens, answer tokens
LOOKS = {Share.NONE: style.NOTHING, Share.STORAGE: style.STORED, Share.READS: style.OURS}
SHORT = {Share.NONE: "nothing shared", Share.STORAGE: "stored once", Share.READS: "read once"}
NAMES = {
    Share.NONE: "nothing shared (vLLM)",
    Share.STORAGE: "stored once (vLLM-PS)",
    Share.READS: "read once (vLLM-RA)",
}


def _after_system(system: int, users: Int64s, answers: Int64s) -> Job:
    """Make requests that all begin with one system prompt."""
    return Job.after_prefixes([system], users.tolist(), answers, [0] * len(users))


def sharegpt_job(
    settings: Settings, system: int, count: int
) -> tuple[Job, tuple[float, float, float]]:
    """Requests of ShareGPT's lengths after a system prompt; mean tokens of its parts."""
    drawn = sharegpt_requests(count, 8 if settings.is_quick else MOST_ANSWER)
    users = np.minimum(drawn.users, 64) if settings.is_quick else drawn.users
    lengths = (system, float(users.mean()), float(drawn.answers.mean()))
    return _after_system(system, users, drawn.answers), lengths


def sharegpt_line(settings: Settings, size: Size, system: int, share: Share, count: int) -> Line:
    """Measure one point: `count` requests of ShareGPT's lengths after a system prompt."""
    count = 8 if settings.is_quick else count
    job, lengths = sharegpt_job(settings, system, count)
    found = run(settings, settings.sized(size), job, share, repeats=LEAST_RUNS)
    return {
        "system": system,
        "paper_name": SYSTEMS[share],
        **found,
        "mean_user": round(lengths[1], 1),
        "mean_answer": round(lengths[2], 1),
        "limit_requests_per_s": None
        if settings.is_quick
        else round(limit_per_s(size, 1, count, lengths), 1),
    }


def run_sharegpt(settings: Settings) -> Iterator[Line]:
    """Fig. 7."""
    for share in (Share.READS, Share.STORAGE, Share.NONE):
        for system in (16, 64) if settings.is_quick else SYSTEM_TOKENS:
            yield sharegpt_line(settings, LLAMA_7B, system, share, 400)


def plot_sharegpt(lines: Sequence[Line], figure: Figure) -> None:
    axes, ratios = figure.subplots(1, 2)
    systems = sorted({line["system"] for line in lines})
    for share, look in LOOKS.items():
        found = sorted(only(lines, share=share.value), key=lambda line: line["system"])
        style.curve(axes, found, "system", "tokens_per_s", NAMES[share], look, 1e-3)
        if share is not Share.NONE:
            x = [line["system"] for line in found]
            base = [one(lines, share="none", system=s)["requests_per_s"] for s in x]
            ratio = [line["requests_per_s"] / b for line, b in zip(found, base, strict=True)]
            ratios.plot(x, ratio, label=NAMES[share], **look)
    ratios.plot([64, 2048], [1.06, 4.36], label="vLLM-RA (paper, least and most)", **style.PAPER)
    ratios.axhline(1, **style.LIMIT)
    for each, title, y in (
        (axes, "ShareGPT lengths, Llama2-7B, one H200", "thousand tokens a second"),
        (ratios, "over sharing nothing", "times as many requests a second"),
    ):
        style.log2_ticks(each, systems)
        style.finish(each, title, "system prompt, tokens", y)


def judge_sharegpt(lines: Sequence[Line]) -> Verdict:
    def gain(share: str, system: int) -> Gain:
        ours, none = (one(lines, share=each, system=system) for each in (share, "none"))
        return gain_of(ours, none)

    gains = {
        (share, system): gain(share, system)
        for share, system in (("reads", 64), ("reads", 2048), ("storage", 2048))
    }
    ratio = {
        key: each.ours["requests_per_s"] / each.baseline["requests_per_s"]
        for key, each in gains.items()
    }
    numbers = tuple(
        Number(ratio[key], paper) for key, paper in zip(ratio, (1.06, 4.36, 2.08), strict=True)
    )
    over_stored = ratio["reads", 2048] / ratio["storage", 2048]
    return Verdict(
        weighed(numbers),
        f"reading once is {ratio['reads', 64]:.2f} times as fast as sharing nothing with a system "
        f"prompt of 64 tokens (paper 1.06), and {ratio['reads', 2048]:.2f} times with 2,048 (paper "
        f"4.36). Storing once is {ratio['storage', 2048]:.2f} times as fast with 2,048 (paper, at "
        f"most 2.08), so reading once is {over_stored:.2f} times as fast as storing once",
        numbers,
        tuple(gains.values()),
    )


def run_synthetic(settings: Settings) -> Iterator[Line]:
    """Fig. 10: all requests of one length."""
    size = settings.sized(LLAMA_7B)
    for user, answer in ((8, 4),) if settings.is_quick else SYNTHETIC:
        is_first = (user, answer) == SYNTHETIC[0]
        for share in (Share.READS, Share.STORAGE, *([Share.NONE] if is_first else [])):
            lengths = SYSTEM_TOKENS if is_first else (64, 2048)
            for system in (16, 64) if settings.is_quick else lengths:
                if is_first and not settings.is_quick:
                    job = Job.of_rivals(OFFLINE_JOBS[f"relay-{system}"])
                else:
                    count = 8 if settings.is_quick else 150
                    job = _after_system(system, np.full(count, user), np.full(count, answer))
                repeats = 1 if share is Share.NONE else LEAST_RUNS
                found = run(settings, size, job, share, repeats=repeats)
                limit = limit_per_s(LLAMA_7B, 1, len(job.answers), (system, user, answer))
                yield {
                    "system": system, "user": user, "answer": answer,
                    "paper_name": SYSTEMS[share], **found,
                    "limit_requests_per_s": None if settings.is_quick else round(limit, 1),
                }  # fmt: skip


def plot_synthetic(lines: Sequence[Line], figure: Figure) -> None:
    axes, ratios = figure.subplots(1, 2)
    _plot_lengths(axes, only(lines, user=64))
    names, times = [], []
    for user, answer in SYNTHETIC:
        for system in (64, 2048):
            reads = one(lines, user=user, system=system, share="reads")
            stored = one(lines, user=user, system=system, share="storage")
            names.append(f"{user}+{answer}\ns={system}")
            times.append(reads["requests_per_s"] / stored["requests_per_s"])
    style.bars(ratios, names, {"here": (times, style.OURS)}, "{:.2f}")
    ratios.axhline(1, **style.LIMIT)
    ratios.axhline(2.2, label="paper's 256+512, s=2048", color=style.PAPER["color"], linestyle="-.")
    title = "read once over stored once"
    style.finish(ratios, title, "user + answer tokens, system prompt", "times as fast")


def _plot_lengths(axes: Axes, lines: Sequence[Line]) -> None:
    systems = sorted({line["system"] for line in lines})
    for share, look in LOOKS.items():
        found = sorted(only(lines, share=share.value), key=lambda line: line["system"])
        style.curve(axes, found, "system", "requests_per_s", NAMES[share], look)
    reads = sorted(only(lines, share="reads"), key=lambda line: line["system"])
    style.curve(axes, reads, "system", "limit_requests_per_s", "limit of the card", style.LIMIT)
    for name, marker in (("default", "x"), ("cascade", "+")):
        points = [rival("offline", f"relay-{system}", name) for system in systems]
        look = {**style.RIVAL, "marker": marker}
        axes.plot(systems, points, label=f"vLLM 0.24, {name}, 1,000 requests", **look)
    axes.set_ylim(bottom=0)
    style.log2_ticks(axes, systems)
    title = "user 64, answer 128, Llama2-7B, one H200"
    style.finish(axes, title, "system prompt, tokens", "requests a second")


def judge_synthetic(lines: Sequence[Line]) -> Verdict:
    def at(share: str, user: int) -> Line:
        return one(lines, share=share, user=user, system=2048)

    def ratio(user: int) -> float:
        return float(at("reads", user)["requests_per_s"] / at("storage", user)["requests_per_s"])

    reads, stored = at("reads", 256), at("storage", 256)
    numbers = (Number(ratio(256), 2.2, 0.2),)
    ours, job = at("reads", 64), rival_job("relay-2048")
    other = differing(ours, job)
    if other:
        rivals = f"vLLM ran another job on 64+128, so it is not compared ({', '.join(other)})"
    else:
        best = rival("offline", "relay-2048", "cascade")
        rivals = (
            f"On 64+128 we answer {ours['requests_per_s']:.1f} requests/s, and vLLM 0.24 with "
            f"cascade attention {best:g}"
        )
    return Verdict(
        weighed(numbers),
        f"reading once is {ratio(256):.2f} times as fast as storing once for 256 user and 512 "
        f"answer tokens (paper 2.2), {ratio(128):.2f} times for 128+256 and {ratio(64):.2f} times "
        f"for 64+128. {rivals}",
        numbers,
        (gain_of(reads, stored),),
    )
