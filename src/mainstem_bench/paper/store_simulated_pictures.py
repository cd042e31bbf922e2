"""Plots and verdicts of what `store_simulated` finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Outcome, Verdict
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.store_simulated import MODELS, POLICIES, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_CAPACITY = {0.1: 0.51, 0.25: 0.98}  # share of CCpUT -> hit rate
CAPACITY_TOLERANCE = 0.1  # as for the hit rates of Fig. 13
POLICY_LOOKS = {"lookahead": style.OURS, "lru": style.STORED, "fifo": style.NOTHING}


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of each model: ours and the paper's."""

    what: str
    of: Callable[[Sequence[Line], str], float]
    paper: tuple[float, float, float, float]  # in the order of MODELS
    form: str  # format of one number
    tolerance: float  # 0.1: the claim holds here if we reach 90 % of the paper's number
    why: Callable[[Sequence[Line]], str] = lambda _: ""  # added if the claim does not hold
    note: Callable[[Sequence[Line]], str] = lambda _: ""  # always added

    def plot(self, lines: Sequence[Line], figure: "Figure") -> None:
        axes = figure.subplots()
        ours = [self.of(lines, model) for model in MODELS]
        series = {"simulated here": (ours, style.OURS), "paper": (self.paper, style.PAPER)}
        style.bars(axes, list(MODELS), series, self.form)
        style.finish(axes, "ShareGPT, 128 GB of memory, 10 TB of disk, A100s", "", self.what)

    def judge(self, lines: Sequence[Line]) -> Verdict:
        ours = [self.of(lines, model) for model in MODELS]
        pairs = zip(ours, self.paper, strict=True)
        is_all = all(mine >= (1 - self.tolerance) * theirs for mine, theirs in pairs)
        is_more = all(mine > theirs for mine, theirs in zip(ours, self.paper, strict=True))
        told = ", ".join(
            f"{model} {self.form.format(mine)} (paper {self.form.format(theirs)})"
            for model, mine, theirs in zip(MODELS, ours, self.paper, strict=True)
        )
        outcome = Outcome.EXCEEDED if is_more else Outcome.REPRODUCED if is_all else Outcome.NOT
        more = self.why(lines) * (outcome is Outcome.NOT) + self.note(lines)
        return Verdict(outcome, f"{self.what}: {told}{more}")


def _decoding(lines: Sequence[Line]) -> str:
    share = max(line["prefill_share"] for line in only(lines, way="RE"))
    return (
        f". Without a store, prefill is at most {share:.0%} of the device's time here, and no "
        "store can save more than that. The paper's numbers for 13B imply that prefill took 88 % "
        "of the time there"
    )


def _link(lines: Sequence[Line]) -> str:
    busy = max(line["link_busy"] for line in lines)
    return (
        f". Copies from host memory run while earlier requests are answered; they keep PCIe busy "
        f"for at most {busy:.0%} of the time"
    )


def _saved(name: str) -> Callable[[Sequence[Line], str], float]:
    return lambda lines, model: 100 * (1 - 1 / ratio(lines, model, name))


HITS = Compared(
    "hit rate, % of prompt tokens",
    lambda lines, model: 100 * float(one(lines, model=model, way="AS")["hit_rate"]),
    (86, 71, 89, 90), "{:.0f}", 0.1,
)  # fmt: skip
TTFT = Compared(
    "time to the first token, reduction in %",
    _saved("mean_ttft_s"), (85, 61, 87, 86), "{:.0f}", 0.15,
    note=_link,
)  # fmt: skip
PREFILL = Compared(
    "prefill throughput, ratio to computing again",
    lambda lines, model: ratio(lines, model, "prefill_s"),
    (6.8, 2.6, 7.8, 7.2), "{:.1f}", 0.25,
)  # fmt: skip
GPU_TIME = Compared(
    "GPU time, computing again / with the store",
    lambda lines, model: ratio(lines, model, "device_s"),
    (4.0, 1.9, 3.3, 3.4), "{:.1f}", 0.25, _decoding,
)  # fmt: skip
COST = Compared("cost, reduction in %", _saved("cost"), (70, 43, 66, 68), "{:.0f}", 0.25, _decoding)


def plot_policies(lines: Sequence[Line], figure: "Figure") -> None:
    hits, times = figure.subplots(1, 2)
    sizes = list(dict.fromkeys((line["host_gb"], line["disk_gb"]) for line in lines))
    names = [f"{host:g}/\n{disk:g}" for host, disk in sizes]
    for axes, name, factor in ((hits, "hit_rate", 100.0), (times, "device_s", 1 / 3600)):
        series = {
            policy: (
                [factor * one(lines, policy=policy, host_gb=h, disk_gb=d)[name] for h, d in sizes],
                POLICY_LOOKS[policy],
            )
            for policy in POLICIES
        }
        style.bars(axes, names, series, "{:.0f}" if factor > 1 else "{:.1f}")
    unbounded = 100 * max(line["hit_rate_unbounded"] for line in lines)
    hits.axhline(unbounded, label="unbounded", **style.LIMIT)
    x = "host / disk, GB"
    style.finish(hits, "LLaMA-13B, ShareGPT, simulated", x, "hit rate, % of prompt tokens")
    style.finish(times, "the same", x, "device hours")


def judge_policies(lines: Sequence[Line]) -> Verdict:
    def of(policy: str, host_gb: float) -> Line:
        return one(only(lines, policy=policy), host_gb=host_gb)

    ahead, lru, fifo = (of(policy, 32.0) for policy in POLICIES)
    wide = [line for line in lines if line["disk_gb"] == 10_000.0]
    from_dram = min(
        line["hit_rate_dram"] / line["hit_rate"] for line in only(lines, policy="lookahead")
    )
    lru_dram = one(wide, policy="lru")
    is_ahead = ahead["hit_rate"] > lru["hit_rate"] > fifo["hit_rate"]
    return Verdict(
        Outcome.REPRODUCED if is_ahead and from_dram > 0.99 else Outcome.NOT,
        f"with 32 GB of memory and 128 GB of disk, the hit rate is {ahead['hit_rate']:.0%} with "
        f"look-ahead, {lru['hit_rate']:.0%} with LRU and {fifo['hit_rate']:.0%} with FIFO; "
        f"{from_dram:.1%} of look-ahead's hits are in DRAM. With the paper's 128 GB and 10 TB all "
        f"three have {lru_dram['hit_rate']:.0%}, because real users answer within seconds and "
        "nothing is evicted; but LRU finds only "
        f"{lru_dram['hit_rate_dram'] / lru_dram['hit_rate']:.0%} of its hits in DRAM",
    )


OVERFLOW_LOST = (17.6, 41.5, 18.1, 18.4)  # paper: points of hit rate, in the order of MODELS
PAPER_MEDIA = {
    "HBM": (0.0, 0.0, 0.0, 0.0),
    "HBM+DRAM": (3.4, 1.7, 7.7, 19.1),
    "HBM+DRAM+SSD": (86.0, 71.0, 89.0, 90.0),
}


def plot_overflow(lines: Sequence[Line], figure: "Figure") -> None:
    hits, lost = figure.subplots(1, 2)
    rates = {
        way: [100 * one(lines, model=model, way=way)["hit_rate"] for model in MODELS]
        for way in ("AS", "OF")
    }
    series = {"kept": (rates["AS"], style.OURS), "invalidated": (rates["OF"], style.NOTHING)}
    names = [model.replace("-", "\n") for model in MODELS]
    style.bars(hits, names, series, "{:.0f}")
    style.finish(hits, "KV after a cut to the window", "", "hit rate, % of prompt tokens")
    ours = [kept - cut for kept, cut in zip(rates["AS"], rates["OF"], strict=True)]
    style.bars(lost, names, {"here": (ours, style.OURS), "paper": (OVERFLOW_LOST, style.PAPER)},
               "{:.0f}")  # fmt: skip
    style.finish(lost, "lost where KV is invalidated", "", "points of hit rate")


def judge_overflow(lines: Sequence[Line]) -> Verdict:
    told, is_alike = [], True
    for model, paper in zip(MODELS, OVERFLOW_LOST, strict=True):
        kept, cut = (one(lines, model=model, way=way)["hit_rate"] for way in ("AS", "OF"))
        lost = 100 * (kept - cut)
        is_alike = is_alike and lost > paper / 2
        told.append(f"{model} {lost:.0f} (paper {paper:.0f})")
    why = (
        ". Keeping KV is better for every model, but by less than in the paper, because about "
        "half as many of these conversations outgrow the window (Fig. 2)"
    )
    return Verdict(
        Outcome.REPRODUCED if is_alike else Outcome.NOT,
        f"points of hit rate lost if a cut invalidates the KV: {', '.join(told)}"
        + why * (not is_alike),
    )


def plot_media(lines: Sequence[Line], figure: "Figure") -> None:
    ours, theirs = figure.subplots(1, 2, sharey=True)
    looks = (style.NOTHING, style.STORED, style.OURS)
    names = [model.replace("-", "\n") for model in MODELS]
    here = {
        way: ([100 * one(lines, model=model, way=way)["hit_rate"] for model in MODELS], look)
        for way, look in zip(PAPER_MEDIA, looks, strict=True)
    }
    paper = {way: (PAPER_MEDIA[way], look) for way, look in zip(PAPER_MEDIA, looks, strict=True)}
    for axes, series, title in ((ours, here, "simulated here"), (theirs, paper, "paper")):
        style.bars(axes, names, series, "{:.0f}")
        style.finish(axes, title, "", "hit rate, % of prompt tokens")


def judge_media(lines: Sequence[Line]) -> Verdict:
    rate = {
        (model, way): one(lines, model=model, way=way)["hit_rate"]
        for model in MODELS
        for way in PAPER_MEDIA
    }
    alone = [rate[model, "HBM"] for model in MODELS]
    dram = [rate[model, "HBM+DRAM"] for model in MODELS]
    disk = [rate[model, "HBM+DRAM+SSD"] for model in MODELS]
    is_alike = max(alone) < 0.1 and max(dram) < 0.3 and min(disk) > 0.7
    told = [
        f"{min(rates):.0%} to {max(rates):.0%} {where}"
        for rates, where in (
            (alone, "on the device alone"),
            (dram, "with 128 GB of host memory"),
            (disk, "with 10 TB of disk"),
        )
    ]
    why = (
        ". The order is the same as in the paper, but the differences are smaller: the next turn "
        "of a conversation comes after seconds, so even a small memory still has many histories"
    )
    return Verdict(
        Outcome.REPRODUCED if is_alike else Outcome.NOT,
        f"hit rates of {', '.join(told)}" + why * (not is_alike),
    )


def plot_capacity(lines: Sequence[Line], figure: "Figure") -> None:
    hits, speed = figure.subplots(1, 2)
    points = only(lines, part="point")
    x = [point["share"] for point in points]
    hits.plot(x, [100 * point["hit_rate"] for point in points], label="here", **style.OURS)
    paper = [100 * rate for rate in PAPER_CAPACITY.values()]
    hits.plot(list(PAPER_CAPACITY), paper, label="paper", **style.PAPER)
    unbounded = 100 * one(lines, part="capacity")["hit_rate_unbounded"]
    hits.axhline(unbounded, label="unbounded", **style.LIMIT)
    per_s = [point["prompt_tokens_per_s"] / 1e3 for point in points]
    speed.plot(x, per_s, **style.OURS)
    for axes, y in ((hits, "hit rate, %"), (speed, "thousand prompt tokens a device second")):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        style.finish(axes, "LLaMA-13B, ShareGPT, TTL 1 h", "capacity / CCpUT", y,
                     legend=axes is hits)  # fmt: skip


def judge_capacity(lines: Sequence[Line]) -> Verdict:
    found = {point["share"]: point["hit_rate"] for point in only(lines, part="point")}
    unbounded = one(lines, part="capacity")["hit_rate_unbounded"]
    pairs = [(found[share], theirs) for share, theirs in PAPER_CAPACITY.items()]
    is_more = all(mine > theirs for mine, theirs in pairs)
    is_all = all(mine >= (1 - CAPACITY_TOLERANCE) * theirs for mine, theirs in pairs)
    (tenth, paper_tenth), (quarter, paper_quarter) = pairs
    return Verdict(
        Outcome.EXCEEDED if is_more else Outcome.REPRODUCED if is_all else Outcome.NOT,
        f"the hit rate is {tenth:.0%} with a tenth of CCpUT (the storage for all sessions of one "
        f"TTL; paper {paper_tenth:.0%}) and {quarter:.0%} with a quarter (paper "
        f"{paper_quarter:.0%}). {unbounded:.0%} is the limit for any capacity here, since the "
        "first turn of a session counts and cannot be found; the paper does not say whether its "
        "rates count first turns. Sessions are shorter than the window, and end long before the "
        "TTL",
    )
