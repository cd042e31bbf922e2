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

POLICY_LOOKS = {"lookahead": style.OURS, "lru": style.STORED, "fifo": style.NOTHING}


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of each model, ours beside the paper's."""

    what: str
    of: Callable[[Sequence[Line], str], float]
    paper: tuple[float, float, float, float]  # in the order of MODELS
    form: str  # for one number
    tolerance: float  # relative to the paper's; below it the claim does not hold here
    why: Callable[[Sequence[Line]], str] = lambda _: ""  # said where it does not

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
        return Verdict(outcome, f"{self.what}: {told}" + self.why(lines) * (outcome is Outcome.NOT))


def _decoding(lines: Sequence[Line]) -> str:
    share = max(line["prefill_share"] for line in only(lines, way="RE"))
    return (
        f". Prefill is at most {share:.0%} of the device's time here without a store, so no store "
        "can save more; the paper's numbers for 13B together mean that it was 88 % there"
    )


def _saved(name: str) -> Callable[[Sequence[Line], str], float]:
    return lambda lines, model: 100 * (1 - 1 / ratio(lines, model, name))


HITS = Compared(
    "hit rate, % of prompt tokens",
    lambda lines, model: 100 * float(one(lines, model=model, way="AS")["hit_rate"]),
    (86, 71, 89, 90), "{:.0f}", 0.1,
)  # fmt: skip
TTFT = Compared("time to the first token, % less", _saved("mean_ttft_s"), (85, 61, 87, 86),
                "{:.0f}", 0.15)  # fmt: skip
PREFILL = Compared(
    "prefill throughput, times as much", lambda lines, model: ratio(lines, model, "prefill_s"),
    (6.8, 2.6, 7.8, 7.2), "{:.1f}", 0.25,
)  # fmt: skip
GPU_TIME = Compared(
    "GPU time, times less", lambda lines, model: ratio(lines, model, "device_s"),
    (4.0, 1.9, 3.3, 3.4), "{:.1f}", 0.25, _decoding,
)  # fmt: skip
COST = Compared("cost, % less", _saved("cost"), (70, 43, 66, 68), "{:.0f}", 0.25, _decoding)


def plot_policies(lines: Sequence[Line], figure: "Figure") -> None:
    hits, times = figure.subplots(1, 2)
    sizes = list(dict.fromkeys((line["host_gb"], line["disk_gb"]) for line in lines))
    names = [f"{host:g}/\n{disk:g}" for host, disk in sizes]
    for axes, name, factor in ((hits, "hit_rate", 100.0), (times, "device_s", 1 / 3600)):
        series = {
            policy.value: (
                [
                    factor * one(lines, policy=policy.value, host_gb=h, disk_gb=d)[name]
                    for h, d in sizes
                ],
                POLICY_LOOKS[policy.value],
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

    ahead, lru, fifo = (of(policy.value, 32.0) for policy in POLICIES)
    wide = [line for line in lines if line["disk_gb"] == 10_000.0]
    from_dram = min(
        line["hit_rate_dram"] / line["hit_rate"] for line in only(lines, policy="lookahead")
    )
    lru_dram = one(wide, policy="lru")
    is_ahead = ahead["hit_rate"] > lru["hit_rate"] > fifo["hit_rate"]
    return Verdict(
        Outcome.REPRODUCED if is_ahead and from_dram > 0.99 else Outcome.NOT,
        f"at 32 GB and 128 GB of disk {ahead['hit_rate']:.0%} with look-ahead, "
        f"{lru['hit_rate']:.0%} with LRU, {fifo['hit_rate']:.0%} with FIFO; {from_dram:.1%} of "
        f"look-ahead's hits are in DRAM. At the paper's 128 GB and 10 TB all three have "
        f"{lru_dram['hit_rate']:.0%}, because real users answer after seconds and nothing is "
        f"pushed out; LRU still finds only {lru_dram['hit_rate_dram'] / lru_dram['hit_rate']:.0%} "
        "of it in DRAM",
    )


def plot_capacity(lines: Sequence[Line], figure: "Figure") -> None:
    hits, speed = figure.subplots(1, 2)
    points = only(lines, part="point")
    x = [point["share"] for point in points]
    hits.plot(x, [100 * point["hit_rate"] for point in points], label="here", **style.OURS)
    hits.plot([0.1, 0.25], [51, 98], label="paper", **style.PAPER)
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
    points = {point["share"]: point["hit_rate"] for point in only(lines, part="point")}
    unbounded = one(lines, part="capacity")["hit_rate_unbounded"]
    return Verdict(
        Outcome.EXCEEDED
        if points[0.1] > 0.51 and points[0.25] >= 0.98 * unbounded
        else Outcome.NOT,
        f"{points[0.1]:.0%} at a tenth of CCpUT and {points[0.25]:.0%} at a quarter, of "
        f"{unbounded:.0%} that no capacity exceeds: first turns are counted here, and the paper "
        "leaves them out. Sessions are shorter than the window and over long before the TTL",
    )
