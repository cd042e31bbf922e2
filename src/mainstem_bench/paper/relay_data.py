"""RelayAttention's data and cards: lengths (Fig. 9, Table 1) and rates of cards (Table 2)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mainstem.plan.cost import card_for
from mainstem_bench.paper import projections, style
from mainstem_bench.paper.item import Line, Number, Outcome, Settings, Verdict
from mainstem_bench.paper.lengths import (
    LEAST,
    MOST_ALL,
    MOST_USER,
    SHOTS,
    mmlu_subjects,
    sharegpt_turns,
)
from mainstem_bench.paper.results import one
from mainstem_bench.paper.rules import agreed
from mainstem_bench.paper.style import Figure

BINS = 40
MOST_SHOTS = max(SHOTS)  # the paper's prompts have all five examples
# the paper's Table 1: data, part, which end of the range, tokens. The range of ShareGPT's user
# prompts is set by a filter, there and here
PAPER_RANGES = (
    ("ShareGPT", "answer", "most", 2013),
    ("MMLU", "system prompt", "least", 379),
    ("MMLU", "system prompt", "most", 2895),
    ("MMLU", "user prompt", "least", 55),
    ("MMLU", "user prompt", "most", 1219),
)
PAPER_CARDS = {"A40": 696, "A100-PCIE-40GB": 1555, "A100-SXM4-80GB": 2039}  # GB/s


def _numbers() -> dict[tuple[str, str], np.ndarray]:
    """Return lengths by data set and part."""
    first = np.array([turns[0] for turns in sharegpt_turns() if turns])
    is_kept = (first >= LEAST).all(1) & (first[:, 0] <= MOST_USER) & (first.sum(1) <= MOST_ALL)
    first = first[is_kept]
    subjects = mmlu_subjects()
    return {
        ("ShareGPT", "user prompt"): first[:, 0],
        ("ShareGPT", "answer"): first[:, 1],
        ("MMLU", "system prompt"): np.array([subject.prefix[MOST_SHOTS] for subject in subjects]),
        ("MMLU", "user prompt"): np.array([q for subject in subjects for q in subject.questions]),
    }


def run_lengths(_: Settings) -> Iterator[Line]:
    """Fig. 9 and Table 1."""
    for (data, part), values in _numbers().items():
        heights, edges = np.histogram(values, BINS)
        yield {
            "data": data,
            "part": part,
            "count": len(values),
            "least": int(values.min()),
            "most": int(values.max()),
            "mean": round(float(values.mean()), 1),
            "median": float(np.median(values)),
            "counts": heights.tolist(),
            "edges": np.round(edges, 1).tolist(),
        }


def plot_lengths(lines: Sequence[Line], figure: Figure) -> None:
    for axes, line in zip(figure.subplots(2, 2).flat, lines, strict=True):
        axes.stairs(line["counts"], line["edges"], fill=True, color=style.OURS["color"])
        axes.axvline(line["mean"], label=f"mean {line['mean']:.0f}", **style.LIMIT)
        style.finish(axes, f"{line['data']}, {line['part']}", "tokens", "requests")


def judge_shapes(lines: Sequence[Line]) -> Verdict:
    user, answer = (one(lines, data="ShareGPT", part=part) for part in ("user prompt", "answer"))
    system, question = (
        one(lines, data="MMLU", part=part) for part in ("system prompt", "user prompt")
    )
    is_skewed = user["median"] < user["mean"] / 2
    return Verdict(
        Outcome.REPRODUCED if is_skewed else Outcome.NOT,
        f"half of ShareGPT's user prompts have at most {user['median']:.0f} tokens (mean "
        f"{user['mean']:.0f}), half of the answers at most {answer['median']:.0f} (mean "
        f"{answer['mean']:.0f}). Half of MMLU's prompts with 5 examples have at most "
        f"{system['median']:.0f} tokens (mean {system['mean']:.0f}, most {system['most']:,}), half "
        f"of its {question['count']:,} questions at most {question['median']:.0f}",
    )


def judge_lengths(lines: Sequence[Line]) -> Verdict:
    numbers, told = [], []
    for data, part, end, paper in PAPER_RANGES:
        here = one(lines, data=data, part=part)[end]
        numbers.append(Number(here, paper))
        told.append(f"{data} {part}, {end} {here:,} (paper {paper:,})")
    return Verdict(
        agreed(numbers),
        f"tokens: {'; '.join(told)}. Other tokenizers counted them; how much is due to that, and "
        "what the paper's prompts say besides examples and questions, is not known. The range "
        "of ShareGPT's user prompts is the paper's because requests outside it are left out",
        tuple(numbers),
    )


def run_card(settings: Settings) -> Iterator[Line]:
    """Table 2: this device (without a GPU, an H200), and two of the paper's cards, projected."""
    has_gpu = torch.cuda.is_available() and not settings.is_quick
    name = torch.cuda.get_device_name() if has_gpu else "NVIDIA H200"
    card = card_for(name)
    yield {
        "name": name,
        "gb_per_s": round(card.bytes_per_s / 1e9),
        "tflops": round(card.flops_per_s / 1e12),
        "flops_per_byte": round(card.flops_per_s / card.bytes_per_s),
    }
    yield from projections.run_relay(settings)


def plot_card(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    ours = lines[0]
    names = [*PAPER_CARDS, ours["name"].removeprefix("NVIDIA ")]
    values = [*PAPER_CARDS.values(), ours["gb_per_s"]]
    bars = axes.bar(names, values, color=[*[style.PAPER["color"]] * 3, style.OURS["color"]])
    axes.bar_label(bars, fontsize=8)
    style.finish(axes, "memory bandwidth", "", "GB a second", legend=False)


def judge_card(lines: Sequence[Line]) -> Verdict:
    line, a40 = one(lines, name="NVIDIA H200"), one(lines, card_name="A40")
    return Verdict(
        Outcome.CANNOT,
        "there is no A40 and no A100 here, so all times of this paper are measured on an H200. It "
        f"reads {line['gb_per_s'] / PAPER_CARDS['A40']:.1f} times as fast as the A40 "
        f"({line['gb_per_s']:,} GB/s, measured). Projected from its data sheet, an A40 would do "
        f"{a40['projected_per_s']:.1f} requests/s of 64 user and 128 answer tokens after a system "
        "prompt of 2,048 with Llama2-7B",
    )
