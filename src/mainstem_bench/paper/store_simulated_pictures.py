"""Plots and verdicts of what `store_simulated` finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Number, Outcome, Verdict
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rules import agreed
from mainstem_bench.paper.store_simulated import MODELS, PCIE_GB_PER_S, POLICIES, ratio
from mainstem_bench.paper.style import Figure

PAPER_CAPACITY = {0.1: 0.51, 0.25: 0.98}  # share of CCpUT -> hit rate
CAPACITY_TOLERANCE = 0.1  # as for the hit rates of Fig. 13
POINTS = 10.0  # hit rates of Fig. 24 agree if they differ by at most this
POLICY_LOOKS = {"lookahead": style.OURS, "lru": style.STORED, "fifo": style.NOTHING}


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of each model: ours and the paper's."""

    what: str
    of: Callable[[Sequence[Line], str], float]
    paper: tuple[float, float, float, float]  # in the order of MODELS
    form: str  # format of one number
    tolerance: float  # 0.1: the claim holds here between 90 and 110 % of the paper's number
    note: Callable[[Sequence[Line]], str] = lambda _: ""

    def plot(self, lines: Sequence[Line], figure: Figure) -> None:
        axes = figure.subplots()
        ours = [self.of(lines, model) for model in MODELS]
        series = {"simulated here": (ours, style.OURS), "paper": (self.paper, style.PAPER)}
        style.bars(axes, list(MODELS), series, self.form)
        style.finish(axes, "ShareGPT, 128 GB of memory, 10 TB of disk, A100s", "", self.what)

    def judge(self, lines: Sequence[Line]) -> Verdict:
        ours = [self.of(lines, model) for model in MODELS]
        pairs = zip(ours, self.paper, strict=True)
        numbers = tuple(Number(mine, theirs, self.tolerance) for mine, theirs in pairs)
        told = ", ".join(
            f"{model} {self.form.format(mine)} (paper {self.form.format(theirs)})"
            for model, mine, theirs in zip(MODELS, ours, self.paper, strict=True)
        )
        return Verdict(agreed(numbers), f"{self.what}: {told}{self.note(lines)}", numbers)


def _unbounded(lines: Sequence[Line]) -> str:
    rates = [one(lines, model=model, way="AS")["hit_rate_unbounded"] for model in MODELS]
    return (
        f". A store without limits would find {_percents(rates)}: almost nothing leaves this one "
        "too soon, so these numbers are little more than the share "
        "of history in the prompts"
    )


def _waiting(lines: Sequence[Line]) -> str:
    told = []
    for model in MODELS:
        again, stored = (one(lines, model=model, way=way) for way in ("RE", "AS"))
        told.append(f"{model} {again['first_token_s']:.2f} and {stored['first_token_s']:.2f} s")
    return (
        ". Nearly all of this time is waiting in the queue: at one new session a second all of "
        "these machines are overloaded, by decoding most of all. From the start of a request to "
        f"its first token it is, computed again and with the store: {', '.join(told)}"
    )


def _loading(lines: Sequence[Line]) -> str:
    shares = [
        line["loaded_gb"] / PCIE_GB_PER_S / line["prefill_s"] for line in only(lines, way="AS")
    ]
    return (
        f". Loads that a prefill waits for count; they are {min(shares):.0%} to {max(shares):.0%} "
        "of its time"
    )


def _decoding(lines: Sequence[Line]) -> str:
    share = max(line["prefill_share"] for line in only(lines, way="RE"))
    return (
        f". Without a store, prefill is at most {share:.0%} of the device's time here, and no "
        "store can save more than that. In the paper it must have been more: if decoding took as "
        "long with and without the store, 88 % for 13B"
    )


def _saved(name: str) -> Callable[[Sequence[Line], str], float]:
    return lambda lines, model: 100 * (1 - 1 / ratio(lines, model, name))


HITS = Compared(
    "hit rate, % of prompt tokens",
    lambda lines, model: 100 * float(one(lines, model=model, way="AS")["hit_rate"]),
    (86, 71, 89, 90), "{:.0f}", 0.1, _unbounded,
)  # fmt: skip
TTFT = Compared(
    "time to the first token, reduction in %",
    _saved("mean_ttft_s"), (85, 61, 87, 86), "{:.0f}", 0.15, _waiting,
)  # fmt: skip
PREFILL = Compared(
    "prefill throughput, ratio to computing again",
    lambda lines, model: ratio(lines, model, "prefill_s"),
    (6.8, 2.6, 7.8, 7.2), "{:.1f}", 0.25, _loading,
)  # fmt: skip
GPU_TIME = Compared(
    "GPU time, computing again / with the store",
    lambda lines, model: ratio(lines, model, "device_s"),
    (4.0, 1.9, 3.3, 3.4), "{:.1f}", 0.25, _decoding,
)  # fmt: skip


def _storage(lines: Sequence[Line]) -> str:
    told = []
    for model in MODELS:
        again, stored = (one(lines, model=model, way=way) for way in ("RE", "AS"))
        storage = stored["cost_storage"] * stored["virtual_s"] / stored["device_s"]
        whole = stored["cost"] - stored["cost_storage"] + storage
        told.append(f"{model} {100 * (1 - whole / again['cost']):.0f}")
    return (
        ". Storage is paid only while the cards work. Paid for the whole run, in which the last "
        f"users pause for hours, the reduction in % is {', '.join(told)}{_decoding(lines)}"
    )


COST = Compared("cost, reduction in %", _saved("cost"), (70, 43, 66, 68), "{:.0f}", 0.25, _storage)


def plot_policies(lines: Sequence[Line], figure: Figure) -> None:
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
        style.bars(axes, names, series, "{:.0f}")
    unbounded = 100 * max(line["hit_rate_unbounded"] for line in lines)
    hits.axhline(unbounded, label="unbounded", **style.LIMIT)
    x = "host / disk, GB"
    style.finish(hits, "LLaMA-13B, ShareGPT, simulated", x, "hit rate, % of prompt tokens")
    style.finish(times, "the same", x, "device hours")


def judge_policies(lines: Sequence[Line]) -> Verdict:
    """Judge the claim at the paper's sizes: by how much look-ahead finds more than the others."""

    def rates(host_gb: float, disk_gb: float) -> list[float]:
        found = only(lines, host_gb=host_gb, disk_gb=disk_gb)
        return [one(found, policy=policy)["hit_rate"] for policy in POLICIES]

    numbers, told = [], []
    for disk_gb, paper in PAPER_POLICIES.items():
        ahead, *others = rates(128.0, disk_gb)
        numbers += [
            Number(ahead - other, gap, 0.25) for other, gap in zip(others, paper, strict=True)
        ]
        told.append(f"{_percents((ahead, *others))} with {disk_gb / 1000:g} TB")
    ahead_line = one(lines, policy="lookahead", host_gb=128.0, disk_gb=10_000.0)
    from_dram = ahead_line["hit_rate_dram"] / ahead_line["hit_rate"]
    return Verdict(
        agreed(numbers),
        f"with 128 GB of DRAM, the hit rates of look-ahead, LRU and FIFO are {' and '.join(told)} "
        f"of disk; {from_dram:.0%} of look-ahead's hits are in DRAM with 10 TB. The machine is "
        f"overloaded: a turn waits {ahead_line['mean_wait_s'] / 60:.0f} minutes on average, and "
        "look-ahead knows all that wait. At another point, 32 GB and 128 GB, the rates are "
        f"{_percents(rates(32.0, 128.0))}",
        tuple(numbers),
    )


def _percents(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.0%}" for rate in rates)


# paper, by GB of disk: by how much look-ahead's hit rate is above LRU's and FIFO's
PAPER_POLICIES = {2000.0: (0.27, 0.31), 10_000.0: (0.28, 0.38)}
OVERFLOW_LOST = (17.6, 41.5, 18.1, 18.4)  # paper: points of hit rate, in the order of MODELS
PAPER_MEDIA = {
    "HBM": (0.0, 0.0, 0.0, 0.0),
    "HBM+DRAM": (3.4, 1.7, 7.7, 19.1),
    "HBM+DRAM+SSD": (86.0, 71.0, 89.0, 90.0),
}


def plot_overflow(lines: Sequence[Line], figure: Figure) -> None:
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
    numbers, told = [], []
    for model, paper in zip(MODELS, OVERFLOW_LOST, strict=True):
        kept, cut = (one(lines, model=model, way=way)["hit_rate"] for way in ("AS", "OF"))
        numbers.append(Number(100 * (kept - cut), paper, 0.25))
        told.append(f"{model} {100 * (kept - cut):.0f} (paper {paper:.0f})")
    return Verdict(
        agreed(numbers),
        f"points of hit rate lost if a cut invalidates the KV: {', '.join(told)}. The lengths are "
        "scaled so that as many conversations have more than 2,048 and 4,096 tokens as in the "
        "paper; the same conversations give the paper's loss with the window of 4,096, but not "
        "with both windows of 2,048",
        tuple(numbers),
    )


def plot_media(lines: Sequence[Line], figure: Figure) -> None:
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
    close = [
        abs(100 * rate[model, way] - theirs) <= POINTS
        for way, paper in PAPER_MEDIA.items()
        for model, theirs in zip(MODELS, paper, strict=True)
    ]
    told = [
        f"{_percents([rate[model, way] for model in MODELS])} {where} (paper "
        f"{_percents([each / 100 for each in PAPER_MEDIA[way]])})"
        for way, where in (
            ("HBM", "on the device alone"),
            ("HBM+DRAM", "with 128 GB of host memory"),
            ("HBM+DRAM+SSD", "with 10 TB of disk"),
        )
    ]
    some = Outcome.PARTLY if 2 * sum(close) >= len(close) else Outcome.NOT
    dram = PAPER_MEDIA["HBM+DRAM"]
    over = [
        100 * rate[model, "HBM+DRAM"] / theirs for model, theirs in zip(MODELS, dram, strict=True)
    ]
    return Verdict(
        Outcome.REPRODUCED if all(close) else some,
        f"hit rates of {'; '.join(told)}. {sum(close)} of {len(close)} are within {POINTS:g} "
        f"points of the paper's; but with host memory they are {min(over):.1f} to {max(over):.1f} "
        "times the paper's",
    )


def plot_capacity(lines: Sequence[Line], figure: Figure) -> None:
    hits, speed = figure.subplots(1, 2)
    points = only(lines, part="point")
    style.curve(hits, points, "share", "hit_rate", "here", style.OURS, 100)
    paper = [100 * rate for rate in PAPER_CAPACITY.values()]
    hits.plot(list(PAPER_CAPACITY), paper, label="paper", **style.PAPER)
    unbounded = 100 * one(lines, part="capacity")["hit_rate_unbounded"]
    hits.axhline(unbounded, label="unbounded", **style.LIMIT)
    style.curve(speed, points, "share", "prompt_tokens_per_s", None, style.OURS, 1e-3)
    for axes, y in ((hits, "hit rate, %"), (speed, "thousand prompt tokens a device second")):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        style.finish(axes, "LLaMA-13B, ShareGPT, TTL 1 h", "capacity / CCpUT", y,
                     legend=axes is hits)  # fmt: skip


def judge_capacity(lines: Sequence[Line]) -> Verdict:
    found = {point["share"]: point["hit_rate"] for point in only(lines, part="point")}
    unbounded = one(lines, part="capacity")["hit_rate_unbounded"]
    pairs = [(found[share], theirs) for share, theirs in PAPER_CAPACITY.items()]
    numbers = tuple(Number(mine, theirs, CAPACITY_TOLERANCE) for mine, theirs in pairs)
    (tenth, paper_tenth), (quarter, paper_quarter) = pairs
    return Verdict(
        # both numbers, or the curve is another one
        Outcome.REPRODUCED if agreed(numbers) is Outcome.REPRODUCED else Outcome.NOT,
        f"the hit rate is {tenth:.0%} with a tenth of CCpUT (the storage for all sessions of one "
        f"TTL; paper {paper_tenth:.0%}) and {quarter:.0%} with a quarter (paper "
        f"{paper_quarter:.0%}). {unbounded:.0%} is the limit for any capacity here, since the "
        "first turn of a session counts and cannot be found; the paper does not say whether its "
        "rates count first turns. CCpUT is a whole window for every session of an hour; half of "
        "these conversations have fewer than 2,050 tokens, and half of the users think for less "
        "than a minute in all, so much less storage is enough than in the paper",
        numbers,
    )
