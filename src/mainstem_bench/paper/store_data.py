"""Numbers of turns and lengths of ShareGPT's conversations (AttentionStore Fig. 2)."""

from collections.abc import Iterator, Sequence

import numpy as np

from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Outcome, Settings, Verdict
from mainstem_bench.paper.lengths import sharegpt_turns
from mainstem_bench.paper.results import one
from mainstem_bench.paper.style import Figure

MOST_TURNS, MOST_TOKENS = 40, 32_768  # limits of the paper's plots


def run_sessions(_: Settings) -> Iterator[Line]:
    turns = np.array([len(each) for each in sharegpt_turns()])
    tokens = np.array([sum(user + answer for user, answer in each) for each in sharegpt_turns()])
    counts = np.bincount(turns[turns <= MOST_TURNS], minlength=MOST_TURNS + 1)[1:]
    yield {
        "part": "turns",
        "conversations": len(turns),
        "mean": round(float(turns.mean()), 2),
        "multi_turn": round(float((turns > 1).mean()), 4),
        "counts": counts.tolist(),
    }
    heights, edges = np.histogram(tokens[tokens <= MOST_TOKENS], 64)
    yield {
        "part": "tokens",
        "conversations": len(tokens),
        "mean": round(float(tokens.mean()), 1),
        "over_2k": round(float((tokens > 2048).mean()), 4),
        "over_4k": round(float((tokens > 4096).mean()), 4),
        "counts": heights.tolist(),
        "edges": np.round(edges, 1).tolist(),
    }


def plot_sessions(lines: Sequence[Line], figure: Figure) -> None:
    turns, tokens = figure.subplots(1, 2)
    line = one(lines, part="turns")
    turns.bar(range(1, MOST_TURNS + 1), line["counts"], color=style.OURS["color"])
    turns.set_yscale("log")
    style.finish(turns, f"mean {line['mean']:.1f} turns", "turns", "conversations", legend=False)
    line = one(lines, part="tokens")
    tokens.stairs(line["counts"], line["edges"], fill=True, color=style.OURS["color"])
    tokens.set_yscale("log")
    for at in (2048, 4096):
        tokens.axvline(at, label=f"{at:,}", **style.LIMIT)
    style.finish(
        tokens, f"mean {line['mean']:,.0f} tokens", "tokens", "conversations", legend=False
    )


def judge_sessions(lines: Sequence[Line]) -> Verdict:
    turns, tokens = one(lines, part="turns"), one(lines, part="tokens")
    is_alike = turns["multi_turn"] > 0.66 and tokens["over_4k"] > 0.27
    return Verdict(
        Outcome.REPRODUCED if is_alike else Outcome.NOT,
        f"{turns['multi_turn']:.0%} of {turns['conversations']:,} conversations have more than one "
        f"turn, and the mean is {turns['mean']:.2f}; {tokens['over_2k']:.0%} are longer than 2,048 "
        f"tokens and {tokens['over_4k']:.0%} longer than 4,096 (paper 73 %, 5.75, 47 % and 30 %). "
        "The turns are close to the paper's; the lengths are not. The tokenizer and the part of "
        "ShareGPT differ; how much each matters was not measured",
    )
