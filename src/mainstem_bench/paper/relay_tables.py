"""RelayAttention's Tables 3 and 4: few-shot questions, and other models."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from mainstem.core.config import Share
from mainstem_bench.paper import style
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Line, Number, Settings, Verdict
from mainstem_bench.paper.jobs import SYSTEMS, Job, run
from mainstem_bench.paper.lengths import SHOTS, mmlu_subjects
from mainstem_bench.paper.relay_jobs import LLAMA_7B, LOOKS, SHORT, sharegpt_line
from mainstem_bench.paper.results import one
from mainstem_bench.paper.rules import LEAST_RUNS, gain_of, weighed
from mainstem_bench.paper.style import Figure

MMLU_ANSWER = 32
MODELS = {  # KV tokens: as many as fit on an 80 GB card beside the weights, for 30B on two cards
    "llama2-13b": Size("llama2-13b", 60_000),
    "llama-30b": Size("llama-30b", 36_000),
    "phi-2": Size("phi-2", 160_000),
    "mistral-7b": Size("mistral-7b", 400_000),
}
LABELS = {
    "llama2-13b": "Llama 2\n13B",
    "llama-30b": "Llama\n30B",
    "phi-2": "Phi-2",
    "mistral-7b": "Mistral\n7B",
}
PAPER_MODELS = {  # Table 4: requests/s of vLLM, vLLM-PS, vLLM-RA by length of the system prompt
    "llama2-13b": {512: (0.99, 1.44, 1.71), 1024: (0.66, 1.23, 1.69)},
    "llama-30b": {512: (2.15, 3.01, 3.65), 1024: (1.52, 2.55, 3.64)},
    "phi-2": {512: (5.03, 6.29, 8.85), 1024: (3.54, 4.82, 8.76)},
    "mistral-7b": {512: (3.68, 5.40, 5.90), 1024: (2.60, 4.92, 5.85)},
}
PAPER_MMLU = {1: (502, 336, 306), 3: (851, 378, 311), 5: (1308, 432, 316)}  # A100-80G, seconds


def run_models(settings: Settings) -> Iterator[Line]:
    """Table 4."""
    for name, size in MODELS.items():
        for share in (Share.READS, Share.STORAGE, Share.NONE):
            for system in (16,) if settings.is_quick else (512, 1024):
                found = sharegpt_line(
                    settings, size, system, share, 60 if name == "llama-30b" else 100
                )
                yield {"model": name, **found}


def plot_models(lines: Sequence[Line], figure: Figure) -> None:
    for axes, system in zip(figure.subplots(1, 2, sharey=True), (512, 1024), strict=True):
        series = {}
        for share, look in LOOKS.items():
            found = [one(lines, model=m, system=system, share=share.value) for m in MODELS]
            series[SHORT[share]] = ([line["requests_per_s"] for line in found], look)
        style.bars(axes, list(LABELS.values()), series, "{:.0f}")
        style.finish(axes, f"system prompt of {system}", "", "requests a second")


def judge_models(lines: Sequence[Line]) -> Verdict:
    numbers, gains = [], []
    told: dict[str, list[str]] = {"none": [], "storage": []}
    for name, paper_rates in PAPER_MODELS.items():
        paper = dict(zip(("none", "storage", "reads"), paper_rates[1024], strict=True))
        line = {share: one(lines, model=name, system=1024, share=share) for share in paper}
        for share, parts in told.items():
            here = line["reads"]["requests_per_s"] / line[share]["requests_per_s"]
            theirs = paper["reads"] / paper[share]
            numbers.append(Number(here, theirs))
            gains.append(gain_of(line["reads"], line[share]))
            parts.append(f"{name} {here:.2f} (paper {theirs:.2f})")
    return Verdict(
        weighed(numbers),
        f"throughput of reading once / sharing nothing: {', '.join(told['none'])}; of reading once "
        f"/ storing once: {', '.join(told['storage'])}",
        tuple(numbers),
        tuple(gains),
    )


def run_mmlu(settings: Settings) -> Iterator[Line]:
    """Table 3, times only: each subject has its own examples."""
    rng, subjects = Random(0), mmlu_subjects()
    all_questions = [(at, q) for at, subject in enumerate(subjects) for q in subject.questions]
    drawn = rng.sample(all_questions, 12 if settings.is_quick else 500)
    groups, owns = [at for at, _ in drawn], [tokens for _, tokens in drawn]
    for shots in SHOTS:
        prefixes = [subject.prefix[shots] for subject in subjects]
        answers = np.full(len(drawn), 2 if settings.is_quick else MMLU_ANSWER)
        job = Job.after_prefixes(prefixes, owns, answers, groups)
        for share in (Share.READS, Share.STORAGE, Share.NONE):
            found = run(
                settings,
                settings.sized(LLAMA_7B),
                job,
                share,
                is_planned=share is not Share.NONE,
                repeats=LEAST_RUNS,
            )
            mean = round(float(np.mean([prefixes[at] for at in groups])), 1)
            yield {"shots": shots, "mean_prefix": mean, "paper_name": SYSTEMS[share], **found}


def plot_mmlu(lines: Sequence[Line], figure: Figure) -> None:
    axes, paper = figure.subplots(1, 2)
    names = [f"{shots} shot{'s' if shots > 1 else ''}" for shots in SHOTS]
    ours = {
        SHORT[share]: (
            [one(lines, shots=shots, share=share.value)["seconds"] for shots in SHOTS],
            look,
        )
        for share, look in LOOKS.items()
    }
    theirs = {
        SYSTEMS[share]: ([float(PAPER_MMLU[shots][at]) for shots in SHOTS], look)
        for at, (share, look) in enumerate(LOOKS.items())
    }
    style.bars(axes, names, ours, "{:.1f}")
    style.bars(paper, names, theirs, "{:.0f}")
    count = lines[0]["requests"]
    style.finish(axes, f"here: {count} questions, H200", "examples in the prompt", "seconds")
    style.finish(paper, "paper: all questions, A100-80G", "examples in the prompt", "seconds")


def judge_mmlu(lines: Sequence[Line]) -> Verdict:
    numbers, gains = [], []
    for shots, (none_s, _, reads_s) in PAPER_MMLU.items():
        reads, none = (one(lines, shots=shots, share=share) for share in ("reads", "none"))
        numbers.append(Number(_less(lines, shots, "reads"), 1 - reads_s / none_s))
        gains.append(gain_of(reads, none))
    told = {
        share: ", ".join(f"{_less(lines, shots, share):.0%}" for shots in SHOTS)
        for share in ("reads", "storage")
    }
    return Verdict(
        weighed(numbers),
        f"reading once takes {told['reads']} off the time of sharing nothing with 1, 3 and 5 "
        f"examples (paper 39, 63 and 76 %). Most of this comes from storing once, which alone "
        f"takes {told['storage']} off (paper 33, 55 and 67 %)",
        tuple(numbers),
        tuple(gains),
    )


def _less(lines: Sequence[Line], shots: int, share: str) -> float:
    """What a kind of sharing takes off the time, as a share of it."""
    shared, none = (one(lines, shots=shots, share=each)["seconds"] for each in (share, "none"))
    return float(1 - shared / none)
