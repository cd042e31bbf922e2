"""Compares answers with K and V in 16 bits and with every full page in fp8: few-shot questions with
four choices, and facts that must be found in long texts.

A fact (a needle) is a sentence with a number of seven digits, at some place in a text of --lengths
tokens; it is found if the answer begins with the number. `only_16_bits` and `only_fp8` count what
only one of the two got right, and `p_value` is that of a two-sided sign test of these. --file,
plain or .gz, has {"task", "prefix", "items": [{"q", "a"}]} on each line; the default is a few
subjects of MMLU.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from mainstem import LLM
from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig, KvDType
from mainstem.core.errors import ConfigError
from mainstem.core.files import read_plain_or_gzip
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.feed import greedy
from mainstem_bench.fewshot import LETTERS, FewshotQuestion, read_questions
from mainstem_bench.kept import free_memory
from mainstem_bench.report import show_all

CITIES = ("Oslo", "Lima", "Cairo", "Quito", "Dakar", "Turin", "Perth", "Kyoto", "Sofia", "Miami")
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Needle:
    prompt: list[int]
    number: str


@dataclass(frozen=True, slots=True)
class Compared:
    """The answers to one kind of question."""

    kind: str
    length: int  # tokens of the mean prompt
    count: int
    right_16_bits: float  # percent
    right_fp8: float
    only_16_bits: int  # right in 16 bits only
    only_fp8: int
    p_value: float
    same: float  # percent of answers that are equal


def make_needles(
    tokenizer: Tokenizer, text: str, length: int, count: int, random: Random
) -> Iterator[Needle]:
    """Facts at depths that are evenly spread over prompts of `length` tokens. Each prompt has a
    stretch of the text of its own as long as there is enough."""
    before, ids = tokenizer.encode(""), tokenizer.encode_plain(text)
    for index in range(count):
        city, number = random.choice(CITIES), str(random.randrange(10**6, 10**7))
        fact = tokenizer.encode_plain(f"\nThe secret number of {city} is {number}.\n")
        question = tokenizer.encode_plain(f"\nThe secret number of {city} is")
        room = length - len(before) - len(fact) - len(question)
        if room < 1 or len(ids) < room:
            raise ConfigError(f"the text has {len(ids):,} tokens, not enough for {length:,}")
        first = index * room % (len(ids) - room + 1)
        at = first + room * index // max(count - 1, 1)
        prompt = [*before, *ids[first:at], *fact, *ids[at : first + room], *question]
        yield Needle(prompt, number)


@dataclass(frozen=True, slots=True)
class _Asked:
    kind: str
    length: int
    answers: list[str]
    is_right: list[bool]


def ask(
    config: EngineConfig, questions: Sequence[FewshotQuestion], text: str, args: argparse.Namespace
) -> Iterator[_Asked]:
    """Ask one engine everything."""
    free_memory()
    llm = LLM.from_config(config)
    with closing(llm):
        if questions:
            prompts = [question.prompts[args.shots] for question in questions]
            scores = llm.score(prompts, [f" {letter}" for letter in LETTERS], use_tqdm=False)
            rows = [[choice.logprob for choice in score.choices] for score in scores]
            chosen = [row.index(max(row)) for row in rows]
            right = [a == question.right for a, question in zip(chosen, questions, strict=True)]
            length = sum(len(each.context_token_ids) for each in scores) // len(scores)
            yield _Asked("few-shot", length, [LETTERS[each] for each in chosen], right)
        for length in args.lengths if text else ():
            needles = list(make_needles(llm.tokenizer, text, length, args.needles, Random(length)))
            outputs = llm.generate(
                [needle.prompt for needle in needles], greedy(ANSWER_TOKENS), use_tqdm=False
            )
            answers = [output.outputs[0].text.strip() for output in outputs]
            right = [
                answer.startswith(needle.number)
                for answer, needle in zip(answers, needles, strict=True)
            ]
            yield _Asked("needle", length, answers, right)
    del llm  # otherwise its memory would still be taken when the next one is loaded


def compare(one: _Asked, other: _Asked) -> Compared:
    """`one` in 16 bits, the other in fp8."""
    pairs = list(zip(one.is_right, other.is_right, strict=True))
    only = pairs.count((True, False)), pairs.count((False, True))
    count = len(pairs)
    same = sum(a == b for a, b in zip(one.answers, other.answers, strict=True))
    return Compared(
        kind=one.kind,
        length=one.length,
        count=count,
        right_16_bits=round(100 * sum(one.is_right) / count, 2),
        right_fp8=round(100 * sum(other.is_right) / count, 2),
        only_16_bits=only[0],
        only_fp8=only[1],
        p_value=round(sign_test(*only), 4),
        same=round(100 * same / count, 2),
    )


def sign_test(some: int, others: int) -> float:
    """The probability that equal chances lead to counts at least as far apart."""
    total, least = some + others, min(some, others)
    tail = sum(math.comb(total, number) for number in range(least + 1))
    return min(1.0, 2 * tail / (1 << total))


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench kv-answers", description=__doc__)
    made.add_argument("--file", type=Path, metavar="FILE", help="questions (some of MMLU)")
    made.add_argument("--text", type=Path, metavar="FILE", help="a long text, for needles")
    flag = partial(add_flag, made)
    flag("--questions", positive_count, "number of few-shot questions", 100)
    flag("--shots", positive_count, "examples before a question", 5)
    made.add_argument(
        "--lengths", nargs="+", type=positive_count, default=[2000, 8000, 16000], metavar="N",
        help="tokens of prompts with a needle (2000 8000 16000)",
    )  # fmt: skip
    flag("--needles", positive_count, "needles for each length", 20)
    made.add_argument("--json", action="store_true")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    config = engine_config(args)
    questions = read_questions(args.file, [args.shots], args.questions)
    text = read_plain_or_gzip(args.text) if args.text else ""
    asked = []
    for kind in (KvDType.AUTO, KvDType.FP8):
        cache = replace(config.cache, kv_dtype=kind)
        asked.append(list(ask(replace(config, cache=cache), questions, text, args)))
    found = (compare(*pair) for pair in zip(*asked, strict=True))
    rows = ({"model": config.model.model, **asdict(each)} for each in found)
    show_all("kv-answers", rows, args.json)
    return 0
