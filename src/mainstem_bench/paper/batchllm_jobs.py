"""BatchLLM's throughput: Fig. 5 and 6 (documents and questions), Table 1 (the industry mix)."""

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

import numpy as np

from mainstem.core.config import Share
from mainstem_bench.paper import style
from mainstem_bench.paper.batchllm_plans import industry_rows
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Gain, Line, Number, Runs, Settings, Verdict
from mainstem_bench.paper.jobs import Job, limit_per_s, run
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rivals import rival, rival_job, rivals
from mainstem_bench.paper.rules import LEAST_RUNS, gain_of, runs_of, weighed
from mainstem_bench.paper.style import Axes, Figure
from mainstem_bench.workloads import OFFLINE_JOBS

LLAMA_8B = Size("llama31-8b", 450_000)
QWEN_14B = Size("qwen25-14b", 300_000)
LLAMA_70B = Size("llama31-70b", 250_000, weights="gptq")
QWEN_7B = Size("qwen25-7b", 135_000)  # `bench offline` has 450,000 for 2,000 requests, this for 600
ANSWER = 100
# 8 % of the paper's job, 6,400 requests, and of the memory that an 80 GB card has beside 8B: so the
# memory holds as small a part of the prefixes as in the paper.
SCALED_8B = Size("llama31-8b", 36_000)
SCALED_REQUESTS = 512
Mix = tuple[int, int, int]  # prefix, own tokens, degree
Series = dict[str, tuple[Sequence[float | None], style.Look]]
RIVAL_MIXES: dict[Mix, str] = {(2000, 200, 16): "b2000-sd16", (2000, 1000, 4): "b2000-1000-sd4"}
SCALED_MIXES: tuple[Mix, ...] = ((2000, 200, 16),)
RIVAL_GRID: dict[Mix, str] = {(2000, 200, 16): "b2000-sd16", (16000, 200, 4): "b16000-sd4"}
SCALED_GRID: tuple[Mix, ...] = ((2000, 200, 16), (2000, 200, 2))
# mix -> number of requests
MIXES_14B: dict[Mix, int] = {
    (2000, 200, 4): 120,
    (2000, 200, 16): 320,
    (2000, 1000, 4): 80,
    (2000, 1000, 16): 96,
    (1000, 1000, 4): 80,
    (1000, 1000, 16): 96,
}
MIXES_70B: dict[Mix, int] = {(2000, 200, 4): 64, (2000, 200, 16): 128}
LARGE = {QWEN_14B: MIXES_14B, LLAMA_70B: MIXES_70B}
WAYS = {  # what is compared: (sharing, whether it is planned, the engine that works in this way)
    "planned": (Share.READS, True, "BatchLLM"),
    "LRU, as given": (Share.STORAGE, False, "vLLM + p + c"),
    "nothing shared": (Share.NONE, False, "vLLM + c"),
}
ABOUT_MIX = "prefix, own tokens, degree"
BOTH_WAYS = ("planned", "LRU, as given")
LOOKS = {"planned": style.OURS, "LRU, as given": style.STORED, "nothing shared": style.NOTHING}
PAPER_INDUSTRY = {"planned": 8.67, "LRU, as given": 6.71, "nothing shared": 5.48}  # A100


def documents(num_requests: int, degree: int, prefix: int, own: int, answer: int) -> Job:
    """Make shuffled questions about documents, `degree` questions for each."""
    groups = [at // degree for at in range(num_requests)]
    Random(1).shuffle(groups)
    answers = np.full(num_requests, answer)
    return Job.after_prefixes([prefix] * (max(groups) + 1), [own] * num_requests, answers, groups)


def _line(settings: Settings, size: Size, way: str, mix: Mix, job: Job) -> Line:
    """Measure one job in one way."""
    (prefix, own, degree), (share, is_planned, like) = mix, WAYS[way]
    found = run(settings, settings.sized(size), job, share, is_planned=is_planned)
    groups = max(1, len(job.answers) // degree)
    limit = limit_per_s(size, groups, degree, (prefix, own, ANSWER))
    return {
        "model": size.shape, "prefix": prefix, "own": own, "degree": degree, "way": way,
        "like": like, **found,
        "limit_requests_per_s": None if settings.is_quick else round(limit, 2),
    }  # fmt: skip


def _documents_line(settings: Settings, size: Size, way: str, mix: Mix, count: int) -> Line:
    prefix, own, degree = mix
    if settings.is_quick:
        job = documents(8, degree, 48, 16, 4)
    else:
        job = documents(count, degree, prefix, own, ANSWER)
    return _line(settings, size, way, mix, job)


def _rival_lines(settings: Settings, mix: Mix, name: str) -> Iterator[Line]:
    """Measure our planned engine on a job that rivals ran, with their prompts and memory."""
    if settings.is_quick:
        found = _documents_line(settings, LLAMA_8B, "planned", mix, 0)
    else:
        found = _line(settings, LLAMA_8B, "planned", mix, Job.of_rivals(OFFLINE_JOBS[name]))
    yield {"part": "rival", "job": name, **found}


def _lines_of(
    settings: Settings, rival_mixes: dict[Mix, str], scaled: tuple[Mix, ...]
) -> Iterator[Line]:
    """Measure the jobs of rivals, and scaled ones with our own baseline; each once for both
    figures."""
    for mix, name in rival_mixes.items():
        yield from settings.once(name, partial(_rival_lines, settings, mix, name))
    for mix in scaled:
        for way in BOTH_WAYS:
            yield from settings.once(f"scaled {mix} {way}", partial(_scaled, settings, mix, way))


def _scaled(settings: Settings, mix: Mix, way: str) -> Iterator[Line]:
    found = _documents_line(settings, SCALED_8B, way, mix, SCALED_REQUESTS)
    yield {"part": "scaled", **found}


def run_mixes(settings: Settings) -> Iterator[Line]:
    """Fig. 5 on 8B."""
    yield from _lines_of(settings, RIVAL_MIXES, SCALED_MIXES)


def run_large(settings: Settings) -> Iterator[Line]:
    """Fig. 5: all mixes on 14B, and two on 70B in 4 bits; only mixes of 2,000 and 200 tokens are
    also run without a plan."""
    for size, mixes in LARGE.items():
        for mix, count in mixes.items():
            for way in BOTH_WAYS:
                if way == "planned" or mix[:2] == (2000, 200):
                    yield _documents_line(settings, size, way, mix, count)


def plot_mixes(lines: Sequence[Line], figure: Figure) -> None:
    found = only(lines, part="rival")
    sglang = {"SGLang 0.5.17, shuffled": ([_sglang(line) for line in found], style.PAPER)}
    _plot_both(lines, figure, {**_beside_vllm(found), **sglang})


def _beside_vllm(lines: Sequence[Line]) -> Series:
    series: Series = {"planned": ([line["requests_per_s"] for line in lines], style.OURS)}
    for order, shown, look in (
        ("default", "shuffled", style.STORED),
        ("sorted", "sorted", style.RIVAL),
    ):
        rates = [rival("offline", line["job"], order) for line in lines]
        series[f"vLLM 0.24, {shown}"] = (rates, look)
    return series


def _plot_both(lines: Sequence[Line], figure: Figure, series: Series) -> None:
    """Draw the jobs of rivals and, if they were run, the scaled ones."""
    scaled = only(lines, part="scaled")
    panels = figure.subplots(1, 2 if scaled else 1, squeeze=False)[0]
    _plot_rivals(panels[0], only(lines, part="rival"), series)
    if scaled:
        _plot_ways(panels[1], scaled, "8 % of the paper's job")


def _plot_rivals(axes: Axes, lines: Sequence[Line], series: Series) -> None:
    style.bars(axes, [_named(line) for line in lines], series, "{:.1f}")
    style.caps(axes, [line["limit_requests_per_s"] for line in lines], "limit of the card")
    style.finish(axes, "jobs of rivals, 450,000 tokens of KV", ABOUT_MIX, "requests/s")


def _plot_ways(axes: Axes, lines: Sequence[Line], title: str, *, legend: bool = True) -> None:
    """Draw jobs that ran planned and, some of them, in the order given."""
    planned = only(lines, way="planned")
    rates: dict[str, list[float | None]] = {way: [] for way in BOTH_WAYS}
    for line in planned:
        job = {name: line[name] for name in ("prefix", "own", "degree")}
        for way, values in rates.items():
            in_this_way = only(lines, way=way, **job)
            values.append(in_this_way[-1]["requests_per_s"] if in_this_way else None)
    series = {way: (values, LOOKS[way]) for way, values in rates.items()}
    style.bars(axes, [_named(line) for line in planned], series, "{:.1f}")
    style.caps(axes, [line["limit_requests_per_s"] for line in planned], "limit of the card")
    axes.tick_params(axis="x", labelsize=7)
    style.finish(axes, title, ABOUT_MIX, "requests/s", legend=legend)


def _named(line: Line) -> str:
    return f"{line['prefix']:,}\n{line['own']:,}\n{line['degree']}"


def _sglang(line: Line) -> float | None:
    ran = line["job"] in rivals()["sglang_offline"]
    return rival("sglang_offline", line["job"], "shuffled") if ran else None


def judge_mixes(lines: Sequence[Line]) -> Verdict:
    gains = {line["job"]: _over_vllm(line) for line in only(lines, part="rival")}
    ratios = {job: gain.ratio for job, gain in gains.items()}
    numbers = (Number(min(ratios.values()), 1.4), Number(max(ratios.values()), 3.0))
    found = {line["job"]: line for line in only(lines, part="rival")}
    few, many = "b2000-1000-sd4", "b2000-sd16"
    sglang = found[many]["requests_per_s"] / rival("sglang_offline", many, "shuffled")
    over_sorted = [
        line["requests_per_s"] / rival("offline", job, "sorted") for job, line in found.items()
    ]
    shares = [line["requests_per_s"] / line["limit_requests_per_s"] for line in found.values()]
    return Verdict(
        weighed(numbers),
        f"with as many requests, the same shuffled prompts and the same KV memory, we are "
        f"{ratios[many]:.2f} times as fast as vLLM 0.24 with 16 prompts to a prefix of 2,000 and "
        f"{ratios[few]:.2f} times with 4 and 1,000 own tokens (paper: 1.4 to 3), and at degree 16 "
        f"{sglang:.2f} times as fast as SGLang 0.5.17 (1.2 to 2.5). If vLLM's prompts are sorted, "
        f"these are {min(over_sorted):.2f} to {max(over_sorted):.2f} times. We reach "
        f"{min(shares):.0%} to {max(shares):.0%} of the card's limit. {_told_scaled(lines)}",
        numbers,
        tuple(gains.values()),
    )


def _over_vllm(line: Line) -> Gain:
    """Compare a job with vLLM's, whose prompts were shuffled, too."""
    rate = rival("offline", line["job"], "default")
    theirs = {**rival_job(line["job"]), "requests_per_s": rate}
    return Gain(line, theirs, runs_of(line), Runs(1, rate, rate), is_rival=True)


def _scaled_gains(lines: Sequence[Line]) -> dict[Mix, Gain]:
    """Planned jobs over the same jobs in the order given, with an LRU cache."""
    scaled = only(lines, part="scaled")
    gains = {}
    for line in only(scaled, way="planned"):
        prefix, own, degree = mix = line["prefix"], line["own"], line["degree"]
        lru = one(scaled, way="LRU, as given", prefix=prefix, own=own, degree=degree)
        gains[mix] = gain_of(line, lru)
    return gains


def _told_scaled(lines: Sequence[Line]) -> str:
    gains = _scaled_gains(lines)
    if not gains:
        return "With 8 % of the paper's requests and of its KV memory nothing was run"
    told = ", ".join(
        f"{gain.ratio:.2f} with {own:,} own tokens and degree {degree} (prompt tokens found: "
        f"{gain.ours['saving_ratio']:.0%} and {gain.baseline['saving_ratio']:.0%})"
        for (_, own, degree), gain in gains.items()
    )
    return (
        "With 8 % of the paper's requests and of its KV memory, the speed of planned jobs over "
        f"our own engine with an LRU cache and no plan is {told}"
    )


def plot_large(lines: Sequence[Line], figure: Figure) -> None:
    panels = figure.subplots(1, 2, width_ratios=(3, 1))
    for axes, size in zip(panels, LARGE, strict=True):
        found = only(lines, model=size.shape)
        _plot_ways(axes, found, size.shape, legend=size is QWEN_14B)


def judge_large(lines: Sequence[Line]) -> Verdict:
    gains = [
        gain_of(
            one(lines, model=size.shape, way="planned", prefix=2000, own=200, degree=degree), lru
        )
        for size in LARGE
        for lru in only(lines, model=size.shape, way="LRU, as given")
        for degree in [lru["degree"]]
    ]
    ratios = [gain.ratio for gain in gains]
    shares = [
        line["requests_per_s"] / line["limit_requests_per_s"] for line in only(lines, way="planned")
    ]
    numbers = (Number(min(ratios), 1.4), Number(max(ratios), 3.0))
    return Verdict(
        weighed(numbers),
        f"planned jobs are {min(ratios):.2f} to {max(ratios):.2f} times as fast as the same engine "
        "with an LRU cache and no plan (paper, over vLLM: 1.4 to 3); the jobs are so small that "
        f"the LRU cache never misses. They reach {min(shares):.0%} to {max(shares):.0%} of the "
        "card's limit",
        numbers,
        tuple(gains),
    )


def run_grid(settings: Settings) -> Iterator[Line]:
    """Fig. 6."""
    yield from _lines_of(settings, RIVAL_GRID, SCALED_GRID)


def plot_grid(lines: Sequence[Line], figure: Figure) -> None:
    _plot_both(lines, figure, _beside_vllm(only(lines, part="rival")))


def judge_grid(lines: Sequence[Line]) -> Verdict:
    gains = _scaled_gains(lines)
    theirs = {line["job"]: _over_vllm(line) for line in only(lines, part="rival")}
    few = gains.get((2000, 200, 2))
    numbers = (Number(few.ratio if few else 0.0, 1.7), Number(0.0, 10.8))
    return Verdict(
        weighed(numbers),
        "with vLLM's own job of 240 requests, prefixes of 16,000 and degree 4, we are "
        f"{theirs['b16000-sd4'].ratio:.1f} times as fast as vLLM 0.24 on the same shuffled "
        "prompts, and with its 1,600 requests at 2,000 and degree 16 "
        f"{theirs['b2000-sd16'].ratio:.2f} times. {_told_scaled(lines)} (paper, over vLLM: 1.7 at "
        "degree 2). The paper's 10.8 at 16,000 and degree 16, and prefixes of 8,000, were not "
        "measured",
        numbers,
        (*gains.values(), *theirs.values()),
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
