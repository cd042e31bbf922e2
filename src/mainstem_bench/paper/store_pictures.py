"""Plots and verdicts of what `store_engine` measures."""

from collections.abc import Sequence

from mainstem.core.tables import gigabytes
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Gain, Line, Number, Outcome, Runs, Verdict
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rules import gain_of, weighed
from mainstem_bench.paper.style import Figure

WAYS = {"recompute": style.NOTHING, "load first": style.STORED, "by layers": style.OURS}
POLICY_NAMES = {"lookahead": "look-ahead", "lru": "LRU", "fifo": "FIFO"}
MOST = 0.95  # "nearly all"
REPEATS = 3  # runs behind a spread, in lines that do not say it
LLAMA_13B_BYTES = 2 * 40 * 5120 * 2  # a token's K and V in 40 layers, bf16
PAGE_TOKENS = 16
LINK_GB_PER_S = 52.0  # of pages to host memory (`mainstem bench sessions --part grain`)
MOST_HIDDEN = 0.8  # of the copies: "saving overlaps the computation"
BUFFERS = {"all": "none", "0": "0", "5": "5", "10": "10", "15": "15", "auto": "auto"}


def plot_phases(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    for phase, look in (("prefill", style.OURS), ("decode step", style.STORED)):
        found = only(lines, phase=phase)
        style.curve(axes, found, "tokens", "ms", phase, look)
    style.log_y(axes)
    style.log2_ticks(axes, sorted({line["tokens"] for line in lines}))
    style.finish(axes, "8B, 8 sequences, H200", "prompt tokens of each", "milliseconds")


def judge_phases(lines: Sequence[Line]) -> Verdict:
    sizes = sorted({line["tokens"] for line in lines})
    grows = {
        phase: one(lines, phase=phase, tokens=sizes[-1])["ms"]
        / one(lines, phase=phase, tokens=sizes[0])["ms"]
        for phase in ("prefill", "decode step")
    }
    is_so = grows["prefill"] > 4 * grows["decode step"]
    return Verdict(
        Outcome.REPRODUCED if is_so else Outcome.NOT,
        f"from {sizes[0]} to {sizes[-1]:,} tokens a prefill takes {grows['prefill']:.1f} times as "
        f"long, a decode step {grows['decode step']:.2f} times",
    )


def plot_turns(lines: Sequence[Line], figure: Figure) -> None:
    tokens, times = figure.subplots(1, 2)
    style.curve(tokens, lines, "turn", "history", "history", style.NOTHING)
    style.curve(tokens, lines, "turn", "new", "new", style.OURS)
    style.curve(times, lines, "turn", "all_ms", "all tokens", style.NOTHING)
    style.curve(times, lines, "turn", "new_ms", "new tokens only", style.OURS)
    tokens.set_yscale("symlog", linthresh=10)
    times.set_ylim(bottom=0)
    style.finish(tokens, "ShareGPT, means", "turn", "tokens of the prompt")
    style.finish(times, "Mistral-7B's layers, H200", "turn", "ms to the first token")


def judge_turns(lines: Sequence[Line]) -> Verdict:
    last = lines[-1]
    share = last["history"] / (last["history"] + last["new"])
    saved = 1 - last["new_ms"] / last["all_ms"]
    numbers = (Number(share, 0.99, 0.05), Number(saved, 0.99, 0.05))
    return Verdict(
        weighed(numbers),
        f"in turn {last['turn']}, {share:.1%} of the prompt is history, and computing it again is "
        f"{saved:.0%} of {last['all_ms']:.0f} ms to the first token (paper 99 %): the new tokens "
        f"alone take {last['new_ms']:.0f} ms here",
        numbers,
    )


def plot_loading(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    sizes = sorted({line["history"] for line in lines})
    names = [f"{line['history']}/{line['new']}" for line in only(lines, way="recompute")]
    series = {
        way: ([one(lines, history=size, way=way)["ms"] for size in sizes], look)
        for way, look in WAYS.items()
    }
    style.bars(axes, names, series, "{:.0f}")
    title = "Llama2-13B, 16 sequences, history in host memory, H200"
    style.finish(axes, title, "tokens of history / new tokens", "ms to the last first token")


def judge_loading(lines: Sequence[Line]) -> Verdict:
    sizes = sorted({line["history"] for line in lines})

    def ms(history: int, way: str) -> float:
        return float(one(lines, history=history, way=way)["ms"])

    ratios = [ms(size, "recompute") / ms(size, "by layers") for size in sizes]
    hidden = [ms(size, "load first") - ms(size, "by layers") for size in sizes]
    is_all = min(ratios) > 1
    gains = tuple(
        gain_of(loaded, computed, "ms", REPEATS)
        for loaded, computed in (
            [one(lines, history=size, way=way) for way in ("by layers", "recompute")]
            for size in sizes
        )
    )
    return Verdict(
        Outcome.REPRODUCED if is_all else Outcome.NOT,
        "computing everything takes "
        + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        + " times as long as loading by layers with histories of "
        + ", ".join(str(size) for size in sizes)
        + " tokens. Loading all layers of a sequence before it starts takes "
        f"{min(hidden):.0f} to {max(hidden):.0f} ms longer than loading by layers"
        + ("" if is_all else ". Where it is below 1, this card computes faster than it loads"),
        gains=gains,
    )


def plot_buffers(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    names = [BUFFERS[line["layers"]] for line in lines]
    style.bars(axes, names, {"here": ([line["ms"] for line in lines], style.OURS)}, "{:.1f}")
    base = one(lines, layers="all")["ms"]
    axes.axhline(base * (1 - 0.35), color=style.PAPER["color"], linestyle=":",
                 label="paper: 35 % less without a buffer")  # fmt: skip
    axes.axhline(base * (1 - 0.61), color=style.PAPER["color"], linestyle="-.",
                 label="paper: 61 % less with 15 layers")  # fmt: skip
    title = "Llama2-13B, 16 sequences, 1,000 tokens loaded, 100 new, H200"
    style.finish(axes, title, "layers of the read buffer (none: load, then compute)",
                 "ms to the last first token")  # fmt: skip


def judge_buffers(lines: Sequence[Line]) -> Verdict:
    ms = {line["layers"]: line["ms"] for line in lines}
    numbers = (Number(1 - ms["0"] / ms["all"], 0.35), Number(1 - ms["15"] / ms["all"], 0.61))
    loaded = lines[0]["batch"] * lines[0]["history"] * LLAMA_13B_BYTES
    return Verdict(
        weighed(numbers),
        f"loading all layers first takes {ms['all']:.0f} ms; loading by layers {ms['0']:.0f} ms "
        f"without a buffer, {ms['15']:.0f} with 15 layers, {ms['auto']:.0f} with the engine's "
        f"choice. {gigabytes(loaded)} in {ms['auto']:.0f} ms are "
        f"{loaded / ms['auto'] / 1e6:.0f} GB/s, nearly the rate of the link (55 GB/s, measured). "
        "In this engine sequences that are loaded compute while others load, also without layers",
        numbers,
    )


def plot_saving(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    sizes = sorted({line["prompt"] for line in lines})
    series = {
        name: ([one(lines, save=save, prompt=size)["ms"] for size in sizes], look)
        for name, save, look in (
            ("saved at the end, steps wait", "sync", style.NOTHING),
            ("saved while decoding", "decoding", style.OURS),
        )
    }
    style.bars(axes, [f"{size:,}" for size in sizes], series, "{:.0f}")
    title = "Llama2-13B, 16 sequences, 20 decode steps, H200"
    style.finish(axes, title, "prompt tokens", "ms until all is saved")


def judge_saving(lines: Sequence[Line]) -> Verdict:
    sizes = sorted({line["prompt"] for line in lines})
    less = [
        1
        - one(lines, save="decoding", prompt=size)["ms"]
        / one(lines, save="sync", prompt=size)["ms"]
        for size in sizes
    ]
    pairs = [
        [one(lines, save=save, prompt=size) for save in ("decoding", "sync")] for size in sizes
    ]
    gains = tuple(gain_of(decoding, sync, "ms", REPEATS) for decoding, sync in pairs)
    hidden = [
        1e-3 * (sync["ms"] - decoding["ms"]) * LINK_GB_PER_S
        / (decoding["saved_pages"] / REPEATS * PAGE_TOKENS * LLAMA_13B_BYTES / 1e9)
        for decoding, sync in pairs
    ]  # fmt: skip
    return Verdict(
        Outcome.REPRODUCED if min(hidden) > MOST_HIDDEN else Outcome.PARTLY,
        f"saving while decoding takes {min(less):.1%} to {max(less):.1%} off the time of the job "
        f"(paper 13 to 15 %). That is {min(hidden):.0%} to {max(hidden):.0%} of the time in which "
        f"the link copies the saved pages ({LINK_GB_PER_S:g} GB/s, measured), which is a larger "
        "part of the job on this card",
        gains=gains,
    )


def plot_policies(lines: Sequence[Line], figure: Figure) -> None:
    times, found = figure.subplots(1, 2)
    looks = dict(zip(POLICY_NAMES, (style.OURS, style.STORED, style.NOTHING), strict=True))
    seconds, shares = {}, {}
    for policy, look in looks.items():
        line, name = one(lines, policy=policy), POLICY_NAMES[policy]
        seconds[name] = ([line["ttft_ms_mean"] / 1e3, line["ttft_ms_p95"] / 1e3], look)
        shares[name] = ([100 * line["hit_rate"], 100 * line["dram_share"]], look)
    style.bars(times, ["mean", "p95"], seconds, "{:.1f}")
    style.bars(found, ["prompt tokens\nfound", "loaded pages\nfrom DRAM"], shares, "{:.0f}")
    style.finish(times, "8B, 32 conversations, H200", "", "seconds to the first token")
    style.finish(found, "the same", "", "%")


def judge_policies(lines: Sequence[Line]) -> Verdict:
    """Look-ahead counts as better if even its worst run finds more than every run of the others."""
    runs = {policy: only(lines, policy=policy) for policy in POLICY_NAMES}
    found = {policy: [line["hit_rate"] for line in each] for policy, each in runs.items()}
    times = {policy: [line["ttft_ms_mean"] / 1e3 for line in each] for policy, each in runs.items()}
    ahead = runs["lookahead"][0]
    gains = tuple(
        Gain(ahead, runs[other][0], _runs(found["lookahead"]), _runs(found[other]))
        for other in ("lru", "fifo")
    )
    is_first = min(found["lookahead"]) > max(found["lru"] + found["fifo"])
    is_dram = min(line["dram_share"] for line in runs["lookahead"]) > MOST
    told = [
        f"{name} {_range(times[policy], '.2f')} s, {_range(found[policy], '.0%')}, "
        f"{_range([line['dram_share'] for line in runs[policy]], '.1%')}"
        for policy, name in POLICY_NAMES.items()
    ]
    return Verdict(
        Outcome.REPRODUCED if is_first and is_dram else Outcome.NOT,
        "mean time to the first token, prompt tokens found, loaded pages that came from DRAM: "
        + "; ".join(told)
        + ". Times are not judged: they differ little between policies",
        gains=gains,
    )


def _runs(values: Sequence[float]) -> Runs:
    return Runs(len(values), min(values), max(values))


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(each, form) for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def plot_ttft(lines: Sequence[Line], figure: Figure) -> None:
    _plot_documents(lines, figure, "ttft_ms", "ms to the first token", "prefill_tokens_per_s",
                    "prompt tokens a second")  # fmt: skip


def plot_tasks(lines: Sequence[Line], figure: Figure) -> None:
    _plot_documents(lines, figure, "task_ms", "ms a task", "answer_tokens_per_s",
                    "answer tokens a second")  # fmt: skip


def _plot_documents(
    lines: Sequence[Line], figure: Figure, left: str, left_y: str, right: str, right_y: str
) -> None:
    for axes, name, y in zip(figure.subplots(1, 2), (left, right), (left_y, right_y), strict=True):
        for way, look in (("recompute", style.NOTHING), ("store", style.OURS)):
            found = only(lines, way=way)
            x = [line["document"] / 1000 for line in found]
            axes.plot(x, [line[name] for line in found], label=way, **look)
        axes.set_ylim(bottom=0)
        style.finish(axes, "Mistral-7B's layers, batch 1, H200", "document, thousand tokens", y)


def judge_ttft(lines: Sequence[Line]) -> Verdict:
    longest = max(line["document"] for line in lines)
    old, new = (one(lines, document=longest, way=way) for way in ("recompute", "store"))
    less = 1 - new["ttft_ms"] / old["ttft_ms"]
    ratio = old["ttft_ms"] / new["ttft_ms"]
    numbers = (Number(less, 0.95, 0.1), Number(ratio, 22.0))
    return Verdict(
        weighed(numbers),
        f"at {longest:,} tokens the first token takes {old['ttft_ms']:.0f} ms if the document is "
        f"computed again, {new['ttft_ms']:.0f} ms if it is loaded: {less:.0%} less (paper 95 %), "
        f"{ratio:.1f} times the prefill throughput (paper 22)",
        numbers,
        (_document_gain(old, new, "ttft_ms"),),
    )


def judge_tasks(lines: Sequence[Line]) -> Verdict:
    longest = max(line["document"] for line in lines)
    old, new = (one(lines, document=longest, way=way) for way in ("recompute", "store"))
    more = new["answer_tokens_per_s"] / old["answer_tokens_per_s"] - 1
    left = 1 - new["prefill_share"]  # of a task's time, not for prefill: more is better
    numbers = (Number(more, 0.67), Number(left, 0.988))
    return Verdict(
        weighed(numbers),
        f"at {longest:,} tokens prefill takes {old['prefill_share']:.0%} of a task's time if the "
        f"document is computed again (paper 41 %), and {new['prefill_share']:.0%} with the store "
        f"(paper 1.2 %), which gives {more:.0%} more answer tokens a second (paper, at most 67 %). "
        "The gain is larger than the paper's because prefill is a larger part of a task here",
        numbers,
        (_document_gain(old, new, "ttft_ms"),),
    )


def _document_gain(old: Line, new: Line, name: str) -> Gain:
    return gain_of(new, old, name, new["tasks"])
