"""BatchLLM's throughput: Fig. 5 and 6 (documents and questions), Table 1 (the industry mix)."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from mainstem.core.config import Share
from mainstem_bench.paper import style
from mainstem_bench.paper.batchllm_plans import industry_rows
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Line, Number, Settings, Verdict
from mainstem_bench.paper.jobs import Job, limit_per_s, run
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rivals import rival, rival_job
from mainstem_bench.paper.rules import LEAST_RUNS, differing, gain_of, weighed
from mainstem_bench.paper.style import Figure

LLAMA_8B = Size("llama31-8b", 450_000)
QWEN_14B = Size("qwen25-14b", 300_000)
LLAMA_70B = Size("llama31-70b", 250_000, weights="gptq")
QWEN_7B = Size("qwen25-7b", 135_000)  # `bench offline` has 450,000 for 2,000 requests, this for 600
ANSWER = 100
# (prefix, own tokens, degree) -> number of requests; as many as rivals had where they ran the mix
MIXES = {
    (2000, 200, 4): 480,
    (2000, 200, 16): 1600,
    (2000, 1000, 4): 1000,
    (2000, 1000, 16): 384,
    (1000, 1000, 4): 320,
    (1000, 1000, 16): 384,
}
MIXES_14B = dict(zip(MIXES, (120, 320, 80, 96, 80, 96), strict=True))
MIXES_70B = {(2000, 200, 4): 64, (2000, 200, 16): 128}
MODELS = {LLAMA_8B: MIXES, QWEN_14B: MIXES_14B, LLAMA_70B: MIXES_70B}
GRID = {  # prefix, degree -> requests
    (2000, 2): 120, (2000, 4): 240, (2000, 8): 320, (2000, 16): 1600,
    (8000, 2): 32, (8000, 4): 64, (8000, 8): 96, (8000, 16): 160,
    (16000, 2): 16, (16000, 4): 240, (16000, 8): 64, (16000, 16): 96,
}  # fmt: skip
WAYS = {  # what is compared: (sharing, whether it is planned, the engine that works in this way)
    "planned": (Share.READS, True, "BatchLLM"),
    "LRU, as given": (Share.STORAGE, False, "vLLM + p + c"),
    "nothing shared": (Share.NONE, False, "vLLM + c"),
}
LOOKS = {"planned": style.OURS, "LRU, as given": style.STORED, "nothing shared": style.NOTHING}
PAPER_INDUSTRY = {"planned": 8.67, "LRU, as given": 6.71, "nothing shared": 5.48}  # A100
VLLM_NAMES = {(2000, 200, 16): "b2000-sd16", (2000, 1000, 4): "b2000-1000-sd4"}


def documents(num_requests: int, degree: int, prefix: int, own: int, answer: int) -> Job:
    """Make shuffled questions about documents, `degree` questions for each."""
    groups = [at // degree for at in range(num_requests)]
    Random(1).shuffle(groups)
    answers = np.full(num_requests, answer)
    return Job.after_prefixes([prefix] * (max(groups) + 1), [own] * num_requests, answers, groups)


def _line(
    settings: Settings, size: Size, way: str, mix: tuple[int, int, int], count: int, repeats: int
) -> Line:
    """Measure one mix in one way."""
    prefix, own, degree = mix
    share, is_planned, like = WAYS[way]
    if settings.is_quick:
        job = documents(8, degree, 48, 16, 4)
    else:
        job = documents(count, degree, prefix, own, ANSWER)
    found = run(settings, settings.sized(size), job, share, is_planned=is_planned, repeats=repeats)
    limit = limit_per_s(size, max(1, count // degree), degree, (prefix, own, ANSWER))
    return {
        "model": size.shape, "prefix": prefix, "own": own, "degree": degree, "way": way,
        "like": like, **found,
        "limit_requests_per_s": None if settings.is_quick else round(limit, 2),
    }  # fmt: skip


def run_mixes(settings: Settings) -> Iterator[Line]:
    """Fig. 5: all mixes on 8B and 14B, and two on 70B in 4 bits; on 14B only mixes of 2,000 and 200
    tokens are also run without a plan."""
    for size, mixes in MODELS.items():
        for mix, count in mixes.items():
            for way in ("planned", "LRU, as given"):
                if way == "planned" or size is LLAMA_8B or mix[:2] == (2000, 200):
                    repeats = LEAST_RUNS if size is LLAMA_8B else 1
                    yield _line(settings, size, way, mix, count, repeats)


def plot_mixes(lines: Sequence[Line], figure: Figure) -> None:
    figure.set_size_inches(8, 7)
    rows = figure.subplot_mosaic([["llama31-8b"] * 3, ["qwen25-14b", "qwen25-14b", "llama31-70b"]])
    for size, mixes in MODELS.items():
        axes = rows[size.shape]
        found = only(lines, model=size.shape)
        names = [
            f"{p:,}, {o:,}, {d}" if size is LLAMA_8B else f"{p:,}\n{o:,}\n{d}" for p, o, d in mixes
        ]
        series = {
            way: ([_rate(found, way, mix) for mix in mixes], LOOKS[way])
            for way in ("planned", "LRU, as given")
        }
        if size is LLAMA_8B:
            theirs = [
                rival("offline", VLLM_NAMES[mix], "sorted") if mix in VLLM_NAMES else None
                for mix in mixes
            ]
            series["vLLM 0.24, sorted, 1,600 and 1,000 requests"] = (theirs, style.RIVAL)
        style.bars(axes, names, series, "{:.1f}" if size is LLAMA_70B else "{:.0f}")
        limits = [
            one(found, prefix=p, own=o, degree=d)["limit_requests_per_s"] for p, o, d in mixes
        ]
        style.caps(axes, limits, "limit of the card")
        axes.tick_params(axis="x", labelsize=7)
        about = "prefix, own tokens, degree"
        style.finish(axes, size.shape, about, "requests/s", legend=size is LLAMA_8B)


def _rate(lines: Sequence[Line], way: str, mix: tuple[int, int, int]) -> float | None:
    prefix, own, degree = mix
    found = only(lines, way=way, prefix=prefix, own=own, degree=degree)
    return float(found[-1]["requests_per_s"]) if found else None


def judge_mixes(lines: Sequence[Line]) -> Verdict:
    ours = only(lines, model=LLAMA_8B.shape)
    gains = []
    for prefix, own, degree in MIXES:
        planned, lru = (
            one(ours, way=way, prefix=prefix, own=own, degree=degree)
            for way in ("planned", "LRU, as given")
        )
        gains.append(gain_of(planned, lru))
    ratios = [gain.ours["requests_per_s"] / gain.baseline["requests_per_s"] for gain in gains]
    shares = [
        line["requests_per_s"] / line["limit_requests_per_s"] for line in only(lines, way="planned")
    ]
    numbers = (Number(min(ratios), 1.4), Number(max(ratios), 3.0))
    has_misses = any(gain.baseline["saving_ratio"] < gain.ours["saving_ratio"] for gain in gains)
    return Verdict(
        weighed(numbers),
        f"planned jobs of 8B are {min(ratios):.2f} to {max(ratios):.2f} times as fast as the same "
        "engine with an LRU cache and no plan (paper, over vLLM: 1.4 to 3)"
        + ("" if has_misses else "; the jobs are so small that the LRU cache never misses")
        + f". {_beside_rivals(one(ours, way='planned', prefix=2000, own=200, degree=16))}. All "
        f"models reach {min(shares):.0%} to {max(shares):.0%} of the card's limit",
        numbers,
        tuple(gains),
    )


def _beside_rivals(line: Line) -> str:
    """Compare with vLLM and SGLang, if they ran the same job."""
    if other := differing(line, rival_job("b2000-sd16")):
        return (
            "vLLM and SGLang ran a larger job with 16 prompts per prefix of 2,000 tokens "
            f"({', '.join(other)}), so they are not compared here, but in the table of results"
        )
    vllm = line["requests_per_s"] / rival("offline", "b2000-sd16", "default")
    sglang = line["requests_per_s"] / rival("sglang_offline", "b2000-sd16", "shuffled")
    return (
        f"With 16 prompts per prefix of 2,000 tokens, the one mix that all ran, they are "
        f"{vllm:.2f} times as fast as vLLM 0.24 and {sglang:.2f} times as fast as SGLang 0.5.17 on "
        "shuffled prompts"
    )


def run_grid(settings: Settings) -> Iterator[Line]:
    """Fig. 6."""
    for (prefix, degree), count in GRID.items():
        for way in ("planned", "LRU, as given"):
            repeats = LEAST_RUNS if prefix == 2000 else 1
            yield _line(settings, LLAMA_8B, way, (prefix, 200, degree), count, repeats)


def plot_grid(lines: Sequence[Line], figure: Figure) -> None:
    panels = figure.subplots(1, 3)
    for axes, prefix in zip(panels, (2000, 8000, 16000), strict=True):
        found = only(lines, prefix=prefix, way="planned")
        degrees = [line["degree"] for line in found]
        style.curve(axes, found, "degree", "requests_per_s", "planned", style.OURS)
        style.curve(axes, found, "degree", "limit_requests_per_s", "limit", style.LIMIT)
        if lru := only(lines, prefix=prefix, way="LRU, as given"):
            style.curve(axes, lru, "degree", "requests_per_s", "LRU, as given", style.STORED)
        for name, degree in (("b2000-sd16", 16), ("b16000-sd4", 4)):
            if name.startswith(f"b{prefix}-"):
                theirs = [rival("offline", name, order) for order in ("default", "sorted")]
                look = {**style.RIVAL, "linestyle": ""}
                axes.plot(
                    [degree] * 2,
                    theirs,
                    label=f"vLLM 0.24, {rival_job(name)['requests']:,} requests",
                    **look,
                )
        axes.set_ylim(bottom=0)
        style.log2_ticks(axes, degrees)
        style.finish(axes, f"prefix of {prefix:,}", "requests to a prefix", "requests/s")


def judge_grid(lines: Sequence[Line]) -> Verdict:
    planned = only(lines, way="planned")
    shares = [line["requests_per_s"] / line["limit_requests_per_s"] for line in planned]
    pairs = {
        (line["prefix"], line["degree"]): (line, lru[-1])
        for line in planned
        if (lru := only(lines, way="LRU, as given", prefix=line["prefix"], degree=line["degree"]))
    }
    ratio = {
        point: ours["requests_per_s"] / lru["requests_per_s"]
        for point, (ours, lru) in pairs.items()
    }
    at_16000 = ratio.get((16000, 16))
    numbers = (Number(ratio[2000, 2], 1.7), Number(at_16000 or 0.0, 10.8))
    long = one(planned, prefix=16000, degree=4)
    other = differing(long, rival_job("b16000-sd4"))
    if other:
        rivals = f"at 16,000 and degree 4 vLLM ran another job ({', '.join(other)})"
    else:
        times = long["requests_per_s"] / rival("offline", "b16000-sd4", "default")
        rivals = f"at 16,000 and degree 4 it is {times:.1f} times vLLM 0.24's on shuffled prompts"
    told = ", ".join(
        f"{each:.2f} ({prefix:,} tokens, degree {degree})"
        for (prefix, degree), each in ratio.items()
    )
    has_misses = any(lru["saving_ratio"] < ours["saving_ratio"] for ours, lru in pairs.values())
    return Verdict(
        weighed(numbers),
        f"planned / the same engine with an LRU cache: {told} (paper, over vLLM: 1.7 at 2,000 and "
        "degree 2, 10.8 at 16,000 and degree 16)"
        + ("" if at_16000 else "; no baseline was run at 8,000 and 16,000")
        + f"; {rivals}. The planned jobs reach {min(shares):.0%} to {max(shares):.0%} of the "
        "card's limit"
        + ("" if has_misses else ". With so few requests the LRU cache never misses"),
        numbers,
        tuple(gain_of(ours, lru) for ours, lru in pairs.values()),
    )


def run_industry(settings: Settings) -> Iterator[Line]:
    """Table 1."""
    rows = industry_rows(settings, 12 if settings.is_quick else 600)
    answers = np.full(len(rows), 4 if settings.is_quick else ANSWER)
    job = Job.of(rows, answers)
    for way, (share, is_planned, like) in WAYS.items():
        found = run(
            settings,
            settings.sized(QWEN_7B),
            job,
            share,
            is_planned=is_planned,
            repeats=LEAST_RUNS,
        )
        yield {"way": way, "like": like, **found}


def plot_industry(lines: Sequence[Line], figure: Figure) -> None:
    rates, saved = figure.subplots(1, 2)
    base = one(lines, way="nothing shared")["requests_per_s"]
    ours = [one(lines, way=way)["requests_per_s"] / base for way in WAYS]
    paper = [PAPER_INDUSTRY[way] / PAPER_INDUSTRY["nothing shared"] for way in WAYS]
    series = {"here": (ours, style.OURS), "paper (A100)": (paper, style.PAPER)}
    style.bars(rates, list(WAYS), series, "{:.2f}")
    rates.axhline(1, **style.LIMIT)
    style.finish(rates, "industry mix, Qwen2.5-7B", "", "requests/s over nothing shared")
    shares = [100 * one(lines, way=way)["saving_ratio"] for way in WAYS]
    theirs = [58.1, 35.8, 0.0]
    series = {"here": (shares, style.OURS), "paper (A100)": (theirs, style.PAPER)}
    style.bars(saved, list(WAYS), series, "{:.0f}")
    style.finish(saved, "prompt tokens saved", "", "%")


def judge_industry(lines: Sequence[Line]) -> Verdict:
    line = {way: one(lines, way=way) for way in WAYS}
    rate = {way: each["requests_per_s"] for way, each in line.items()}
    saved = {way: each["saving_ratio"] for way, each in line.items()}
    over_lru = rate["planned"] / rate["LRU, as given"]
    numbers = (Number(over_lru, 1.30),)
    planned, lru = line["planned"], line["LRU, as given"]
    return Verdict(
        weighed(numbers),
        f"the plan reaches {rate['planned']:.1f} requests/s: {over_lru:.2f} times as many as our "
        f"own engine with an LRU cache ({rate['LRU, as given']:.1f}; paper, over vLLM: 1.30), and "
        f"{rate['planned'] / rate['nothing shared']:.2f} times as many as without sharing (paper "
        f"1.58). It saves {saved['planned']:.1%} of prompt tokens (paper 58.1 %), the LRU cache "
        f"{saved['LRU, as given']:.1%} (paper 35.8 %)",
        numbers,
        (gain_of(planned, lru),),
    )
