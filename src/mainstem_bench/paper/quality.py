"""Measures what sharing and truncation do to answers, on real weights (SmolLM2-135M) and a CPU.

RelayAttention's Table 3 (few-shot MMLU, the accuracy), AttentionStore's Tables 1 and 2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mainstem.checkpoints.hub import resolve_model
from mainstem.core.config import Device, EngineConfig, ModelConfig, SchedConfig, Share
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench import fewshot
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Line, Outcome, Settings, Verdict
from mainstem_bench.paper.lengths import SHOTS, shipped
from mainstem_bench.paper.results import one
from mainstem_bench.truncated_questions import Questions, ask, compare, read_documents
from mainstem_bench.truncation import read_on, read_text, read_whole
from mainstem_bench.ways import WAYS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "smollm2"
WINDOW, TEXT_TOKENS, TURN_TOKENS = 512, 3072, 64
QUICK_WINDOW, QUICK_TEXT, QUICK_TURN = 64, 140, 16
QUESTIONS = 100
CUT_WAYS = {"recompute": "TT", "kv": "AS", "important": "AS, by attention", "naive": "NKVT"}
CLOSE = 1.05  # limit for perplexity with kv / perplexity with recompute


def a_config(window: int | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=MODEL, device=Device.CPU), sched=SchedConfig(max_model_len=window)
    )


# --- RelayAttention, Table 3 ----------------------------------------------------------------------


def run_answers(settings: Settings) -> Iterator[Line]:
    """Ask few-shot questions with and without sharing."""
    shots = (1,) if settings.is_quick else SHOTS
    count = 4 if settings.is_quick else QUESTIONS
    shares = (Share.NONE, Share.READS) if settings.is_quick else (*Share,)
    found = fewshot.measure(
        a_config(),
        fewshot.read_questions(None, shots, count),
        shots,
        sorted(shares, key=lambda share: share is not Share.NONE),
        num_going_on=min(count, 12),
        num_tokens=8,
    )
    for quality in found:
        yield {"model": MODEL, **asdict(quality)}


def plot_answers(lines: Sequence[Line], figure: "Figure") -> None:
    axes, logprobs = figure.subplots(1, 2)
    names = [f"{shots} shot{'s' if shots > 1 else ''}" for shots in SHOTS]
    looks = {"none": style.NOTHING, "storage": style.STORED, "reads": style.OURS}
    series = {
        share: ([one(lines, shots=shots, share=share)["accuracy"] for shots in SHOTS], look)
        for share, look in looks.items()
    }
    style.bars(axes, names, series, "{:.0f}")
    axes.axhline(100 * fewshot.CHANCE, label="chance", **style.LIMIT)
    style.finish(axes, f"{MODEL}: accuracy by what is shared", "", "% of questions")
    for share, look in list(looks.items())[1:]:
        found = [one(lines, shots=shots, share=share)["logprob_difference"] for shots in SHOTS]
        logprobs.semilogy(names, found, label=share, **look)
    logprobs.set_ylim(1e-7, 1)
    style.finish(logprobs, "largest difference to sharing nothing", "", "of a letter's logprob")


def judge_answers(lines: Sequence[Line]) -> Verdict:
    shared = [line for line in lines if line["share"] != "none"]
    is_equal = all(line["same_choices"] == 100.0 for line in shared)
    at_chance = [str(line["shots"]) for line in lines if line["is_at_chance"]]
    told = ", ".join(f"{one(lines, shots=s, share='reads')['accuracy']:.0f} %" for s in SHOTS)
    chance = ""
    if at_chance:
        chance = (
            f". With {', '.join(dict.fromkeys(at_chance))} examples the model only guesses (25 %), "
            "so equal accuracy proves little; but logprobs of the letters"
        )
        worst = max(line["logprob_difference"] for line in shared)
        chance += f" differ by {worst:.1g} at most"
    tokens, choices = (
        min(line[name] for line in shared) for name in ("same_tokens", "same_choices")
    )
    return Verdict(
        Outcome.REPRODUCED if is_equal else Outcome.NOT,
        f"accuracy with 1, 3 and 5 examples is {told}, with and without sharing. "
        f"{choices:.0f} % of questions get the same choice, and {tokens:.0f} % of generated tokens "
        f"are the same{chance}",
    )


# --- AttentionStore, Table 1 ----------------------------------------------------------------------


def run_perplexity(settings: Settings) -> Iterator[Line]:
    """Measure one long text, during which the window is cut many times."""
    window, num_tokens, turn = WINDOW, TEXT_TOKENS, TURN_TOKENS
    ways = list(CUT_WAYS)
    if settings.is_quick:
        window, num_tokens, turn, ways = QUICK_WINDOW, QUICK_TEXT, QUICK_TURN, ["kv"]
    config, folder = a_config(window), resolve_model(MODEL)
    ids = _text_ids(folder)[:num_tokens]
    whole = read_whole(folder, config, ids)
    assert whole is not None
    about = {"model": MODEL, "window": window, "text": "WikiText-2"}
    yield {**asdict(whole.reading(window)), **about, "like": "nothing dropped"}
    for way in ways:
        reading = read_on(folder, config, WAYS[way], ids, turn, whole)
        yield {**asdict(reading), **about, "like": CUT_WAYS[way]}


def plot_perplexity(lines: Sequence[Line], figure: "Figure") -> None:
    perplexity, agreement = figure.subplots(1, 2)
    names = ["whole", *CUT_WAYS]
    found = [one(lines, way=way) for way in names]
    series = {"": ([line["perplexity"] for line in found], style.OURS)}
    style.bars(perplexity, names, series, "{:.1f}")
    style.finish(perplexity, f"{MODEL}, window of {WINDOW}", "", "perplexity", legend=False)
    series = {"": ([100 * line["agreement"] for line in found[1:]], style.OURS)}
    style.bars(agreement, names[1:], series, "{:.0f}")
    style.finish(
        agreement, "likeliest token as with nothing dropped", "", "% of tokens", legend=False
    )


def judge_perplexity(lines: Sequence[Line]) -> Verdict:
    found = {way: one(lines, way=way) for way in ("whole", *CUT_WAYS)}
    recompute, kv, naive = (found[way]["perplexity"] for way in ("recompute", "kv", "naive"))
    told = ", ".join(f"{way} {line['perplexity']:.2f}" for way, line in found.items())
    same = ", ".join(f"{way} {found[way]['agreement']:.0%}" for way in CUT_WAYS)
    is_close = kv <= CLOSE * recompute and naive > 2 * recompute
    return Verdict(
        Outcome.REPRODUCED if is_close else Outcome.NOT,
        f"perplexity: {told}; kv is {kv / recompute - 1:.1%} above recompute, and naive fails, as "
        f"in the paper. How often the likeliest token is the same as with the whole text: {same}",
    )


# --- AttentionStore, Table 2 ----------------------------------------------------------------------


def run_questions(settings: Settings) -> Iterator[Line]:
    """Ask questions about documents after a cut that dropped older text, or the documents
    themselves."""
    ways = ["kv"] if settings.is_quick else ["recompute", "kv", "important"]
    config, folder = a_config(WINDOW), resolve_model(MODEL)
    with shipped("xquad_few.jsonl.gz") as path:
        documents = read_documents(path)
    if settings.is_quick:
        documents = [min(documents, key=lambda document: len(document.text))]
    for place in ("last",) if settings.is_quick else ("last", "first"):
        questions = Questions(tuple(documents), _text_ids(folder), place == "first")
        first = None
        for way in ways:
            score = ask(folder, config, WAYS[way], questions)
            first = first or score
            found = compare(first.answers, score.answers, "right")
            line = {name: value for name, value in asdict(score).items() if name != "answers"}
            yield {
                **line,
                "model": MODEL,
                "window": WINDOW,
                "document": place,
                "like": CUT_WAYS[way],
                "against": first.way,
                "right_difference": round(found.mean, 2),
                "right_margin": round(found.margin, 2),
            }


def plot_questions(lines: Sequence[Line], figure: "Figure") -> None:
    axes = figure.subplots()
    ways = ("recompute", "kv", "important")
    looks = (style.NOTHING, style.STORED, style.OURS)
    places = {"last": "the other text is older", "first": "the document is older"}
    series = {
        way: ([one(lines, way=way, document=place)["accuracy"] for place in places], look)
        for way, look in zip(ways, looks, strict=True)
    }
    style.bars(axes, list(places.values()), series, "{:.1f}")
    style.finish(axes, f"{MODEL}: questions on a document after a cut", "", "% of answers right")


def judge_questions(lines: Sequence[Line]) -> Verdict:
    told = []
    for place, meant in (("last", "after other text"), ("first", "before other text")):
        found = {
            way: one(lines, way=way, document=place) for way in ("recompute", "kv", "important")
        }
        shown = ", ".join(f"{way} {line['accuracy']:.1f} %" for way, line in found.items())
        told.append(f"documents {meant}: {shown}")
    kv = one(lines, way="kv", document="last")
    is_equal = abs(kv["right_difference"]) <= max(kv["right_margin"], 1.0)
    count = kv["questions"]
    return Verdict(
        Outcome.REPRODUCED if is_equal else Outcome.NOT,
        f"correct answers with {'; '.join(told)} ({count} questions; kv minus recompute is "
        f"{kv['right_difference']:+.1f} +- {kv['right_margin']:.1f} points)",
    )


def _text_ids(folder: Path) -> list[int]:
    with shipped("wikitext2_head.txt.gz") as path:
        return Tokenizer.load(folder).encode(read_text(path))
