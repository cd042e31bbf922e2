"""Asks few-shot questions with four choices, with and without sharing: the answers must be the
same.

A question follows 1, 3 or 5 examples of its subject, as in RelayAttention's Table 3. The model's
choice is the likeliest of the letters A to D. For some questions the model also generates text.
Every way of sharing is compared with the first, question by question:

    none      every prompt is computed and stored separately
    storage   equal prefixes are computed and stored once
    reads     they are also read once per step

If a model only guesses, accuracy says nothing about the engine: then compare the logprobs and the
generated tokens. FILE, plain or .gz, has {"task", "prefix", "items": [{"q", "a"}]} on each line;
the default is a few subjects of MMLU.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter

from mainstem import LLM
from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig, Share
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.files import read_plain_or_gzip, text_lines
from mainstem_bench.feed import greedy
from mainstem_bench.kept import free_memory
from mainstem_bench.paper.lengths import shipped
from mainstem_bench.report import show_all

LETTERS = ("A", "B", "C", "D")
CHANCE = 1 / len(LETTERS)
EXAMPLE_END = "\n\n"


@dataclass(frozen=True, slots=True)
class FewshotQuestion:
    prompts: dict[int, str]  # by number of examples
    right: int  # which of the LETTERS


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's answers to the questions."""

    logprobs: list[list[float]]  # logprobs of the letters, by question
    tokens: list[tuple[int, ...]]  # generated tokens, for the first questions
    computed_tokens: int
    reads_saved: float  # percent of keys that were not read again, because readers share them
    seconds: float

    def choices(self) -> list[int]:
        return [row.index(max(row)) for row in self.logprobs]


@dataclass(frozen=True, slots=True)
class Quality:
    """One way of sharing, at one number of examples."""

    shots: int
    share: str
    questions: int
    accuracy: float  # percent
    margin: float  # half of the 95 % interval of the accuracy
    is_at_chance: bool  # whether 25 % is within the margin
    answer_perplexity: float  # perplexity of the right letter
    same_choices: float  # percent of choices that are the same as with the first way
    same_tokens: float  # percent of generated tokens that are the same
    logprob_difference: float  # the largest difference to the first way
    computed_tokens: int
    reads_saved: float  # percent of keys
    seconds: float


def read_questions(path: Path | None, shots: Sequence[int], count: int) -> list[FewshotQuestion]:
    """Return a random choice of `count` questions, which is the same in every run."""
    if path is None:
        with shipped("mmlu_few.jsonl.gz") as found:
            rows = read_plain_or_gzip(found)
    else:
        rows = read_plain_or_gzip(path)
    questions = []
    for number, row in enumerate(text_lines(rows), start=1):
        try:
            subject = json.loads(row)
            heads = {count: _head(subject["prefix"], count) for count in shots}
            for item in subject["items"]:
                prompts = {count: head + item["q"] for count, head in heads.items()}
                questions.append(FewshotQuestion(prompts, LETTERS.index(item["a"])))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(str(path), f"line {number}: {error}") from error
    if len(questions) < count:
        raise InvalidRequest("--questions", f"there are only {len(questions)}, {count} wanted")
    return Random(0).sample(questions, count)


def _head(prefix: str, count: int) -> str:
    """Return the introduction and the first `count` examples; an example ends with an empty
    line."""
    intro, _, rest = prefix.partition(EXAMPLE_END)
    ends = [at for at in range(len(rest)) if rest.startswith(EXAMPLE_END, at)]
    ends = [at for at in ends if rest[:at].rsplit("\n", 1)[-1].startswith("Answer: ")]
    if len(ends) < count:
        raise ValueError(f"there are only {len(ends)} examples, {count} wanted")
    return intro + EXAMPLE_END + rest[: ends[count - 1]] + EXAMPLE_END


def answer(llm: LLM, prompts: Sequence[str], num_going_on: int, num_tokens: int) -> Answers:
    """Score the letters after each prompt; generate text after the first ones. Afterwards no
    page is left on the device: fewer examples are a prefix of more examples."""
    before = replace(llm.counters)
    began_s = perf_counter()
    scores = llm.score(prompts, [f" {letter}" for letter in LETTERS], use_tqdm=False)
    outputs = llm.generate(prompts[:num_going_on], greedy(num_tokens), use_tqdm=False)
    seconds = perf_counter() - began_s
    llm.text_engine.engine.clear_device()
    seen = llm.counters.key_tokens_seen - before.key_tokens_seen
    saved = llm.counters.key_tokens_saved - before.key_tokens_saved
    return Answers(
        [[choice.logprob for choice in score.choices] for score in scores],
        [tuple(output.outputs[0].token_ids) for output in outputs],
        llm.counters.computed_tokens - before.computed_tokens,
        round(100 * saved / seen, 1),
        round(seconds, 1),
    )


def compare(shots: int, share: Share, found: Answers, first: Answers, right: list[int]) -> Quality:
    count, choices = len(right), found.choices()
    share_right = sum(map(int.__eq__, choices, right)) / count
    margin = 1.96 * math.sqrt(share_right * (1 - share_right) / count)
    pairs = [
        (token, other)
        for some, others in zip(found.tokens, first.tokens, strict=True)
        for token, other in zip(some, others, strict=True)
    ]
    differences = [
        abs(a - b)
        for row, other in zip(found.logprobs, first.logprobs, strict=True)
        for a, b in zip(row, other, strict=True)
    ]
    of_right = [row[at] for row, at in zip(found.logprobs, right, strict=True)]
    return Quality(
        shots=shots,
        share=share.value,
        questions=count,
        accuracy=round(100 * share_right, 2),
        margin=round(100 * margin, 2),
        is_at_chance=abs(share_right - CHANCE) <= margin,
        answer_perplexity=round(math.exp(-sum(of_right) / count), 4),
        same_choices=round(100 * sum(map(int.__eq__, choices, first.choices())) / count, 2),
        same_tokens=round(100 * sum(a == b for a, b in pairs) / max(1, len(pairs)), 2),
        logprob_difference=max(differences),
        computed_tokens=found.computed_tokens,
        reads_saved=found.reads_saved,
        seconds=found.seconds,
    )


def measure(
    config: EngineConfig,
    questions: Sequence[FewshotQuestion],
    shots: Sequence[int],
    shares: Sequence[Share],
    *,
    num_going_on: int,
    num_tokens: int,
) -> Iterator[Quality]:
    """Yield the results for every way of sharing and every number of examples. The model is loaded
    once for each way."""
    right = [question.right for question in questions]
    first: dict[int, Answers] = {}  # of the first way, by number of examples
    for share in shares:
        free_memory()
        llm = LLM.from_config(config.sharing(share))
        with closing(llm):
            for count in shots:
                prompts = [question.prompts[count] for question in questions]
                found = answer(llm, prompts, num_going_on, num_tokens)
                yield compare(count, share, found, first.setdefault(count, found), right)
        del llm  # otherwise its memory would still be taken when the next one is loaded


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench fewshot", description=__doc__)
    made.add_argument("--file", type=Path, metavar="FILE", help="questions (some of MMLU)")
    made.add_argument("--shots", nargs="+", type=positive_count, default=[1, 3, 5], metavar="N")
    made.add_argument("--questions", type=positive_count, default=100, metavar="N", help="(100)")
    flag = partial(add_flag, made)
    flag("--going-on", positive_count, "questions for which the model also generates text", 16)
    flag("--tokens", positive_count, "number of generated tokens", 16)
    made.add_argument(
        "--shares", nargs="+", choices=[share.value for share in Share],
        default=[share.value for share in (Share.NONE, Share.STORAGE, Share.READS)],
        metavar="SHARE", help="ways to compare with the first (none storage reads)",
    )  # fmt: skip
    made.add_argument("--json", action="store_true")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    config = engine_config(args)
    if config.store.host_gb is not None or config.store.disk_dir or config.store.remote:
        # Fewer examples are a prefix of more examples, so a lower tier would have their pages.
        raise ConfigError("--host-gb, --disk-dir, --remote: only the device's cache is measured")
    found = measure(
        config,
        read_questions(args.file, args.shots, args.questions),
        args.shots,
        [Share(name) for name in args.shares],
        num_going_on=args.going_on,
        num_tokens=args.tokens,
    )
    rows = ({"model": config.model.model, **asdict(quality)} for quality in found)
    show_all("fewshot", rows, args.json)
    return 0
