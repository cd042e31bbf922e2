"""`mainstem demo`: questions about shared documents, answered with sharing on and off.

The documents and questions are shipped with the package; `--input` takes another file of the same
form, one JSON object a line: {"doc": text, "items": [{"q": question}, ...]}.
"""

import argparse
import json
import textwrap
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from time import perf_counter

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig, Share
from mainstem.core.errors import InvalidRequest
from mainstem.core.files import UNREADABLE, read_plain_or_gzip, text_lines
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from mainstem.core.tables import table
from mainstem.core.words import counted
from mainstem.llm import LLM
from mainstem.text.results import RequestOutput

INSTRUCTION = "Answer the question from the document, in one short sentence."


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a document."""

    doc_index: int
    doc: str
    text: str

    def messages(self) -> list[dict[str, str]]:
        """Instruction and document come first: questions about one document share this part."""
        content = f"Document:\n{self.doc}\n\nQuestion: {self.text}"
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": content}]


@dataclass(frozen=True, slots=True)
class DemoPass:
    """One pass over all questions."""

    share: Share
    seconds: float
    answers: list[RequestOutput]
    counters: Counters


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem demo", usage="%(prog)s [flags]", description=__doc__)
    made.add_argument("--input", type=Path, metavar="FILE.jsonl", help="documents and questions")
    flag = partial(add_flag, made)
    flag("--out", Path, "file for the answers", Path("out/demo.jsonl"), metavar="FILE.jsonl")
    flag("--max-tokens", positive_count, "maximum tokens of an answer", 24)
    flag("--limit", positive_count, "ask only the first N questions")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.share is not None:
        raise InvalidRequest("--share", "the demo runs with sharing on, and then off")
    questions = load_questions(args.input)[: args.limit]
    num_docs = len({question.doc_index for question in questions})
    make_writable(args.out)
    print(f"{counted(len(questions), 'question')} about {counted(num_docs, 'document')}\n")
    config = engine_config(args)
    runs = [run(config, share, questions, args.max_tokens) for share in (Share.READS, Share.NONE)]
    write_answers(args.out, questions, runs[0])
    print(report(questions, runs))
    print(f"\nAll answers: {args.out}")
    return 0


def load_questions(path: Path | None) -> list[Question]:
    """Questions in file order; raises InvalidRequest naming the line that is wrong."""
    questions: list[Question] = []
    try:
        if path is None:
            text = (files("mainstem") / "data" / "demo_docs.jsonl").read_text(encoding="utf-8")
        else:
            text = read_plain_or_gzip(path)
    except UnicodeDecodeError as error:
        raise InvalidRequest("--input", f"{path} is not UTF-8: {error}") from error
    except UNREADABLE as error:
        raise InvalidRequest("--input", f"cannot read {path}: {error}") from error
    for number, line in enumerate(text_lines(text), start=1):
        try:
            row = json.loads(line)
            doc, items = str(row["doc"]), row["items"]
            questions += [Question(number, doc, str(item["q"])) for item in items]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest("--input", f"line {number}: {error!r}") from error
    if not questions:
        raise InvalidRequest("--input", "has no questions")
    return questions


def run(config: EngineConfig, share: Share, questions: list[Question], max_tokens: int) -> DemoPass:
    """Answer everything with a new engine; loading is not part of the time."""
    llm = LLM.from_config(config.sharing(share))
    print("sharing on" if share is Share.READS else "sharing off", flush=True)
    began_s = perf_counter()
    answers = llm.chat(
        [question.messages() for question in questions],
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    seconds = perf_counter() - began_s
    llm.close()
    return DemoPass(share, seconds, answers, llm.counters)


def make_writable(path: Path) -> None:
    """Create the folder of the answers and check the file before the work, which takes minutes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise InvalidRequest("--out", f"cannot write {path}: {error.strerror}") from error


def write_answers(path: Path, questions: list[Question], done: DemoPass) -> None:
    with path.open("w", encoding="utf-8") as out:
        for question, answer in zip(questions, done.answers, strict=True):
            row = {
                "document": question.doc_index,
                "question": question.text,
                "answer": answer.outputs[0].text.strip(),
                "prompt_tokens": len(answer.prompt_token_ids),
                "cached_tokens": answer.num_cached_tokens,
            }
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def report(questions: list[Question], runs: list[DemoPass]) -> str:
    """Return three answers, and a table that shows what sharing saved."""
    shared, alone = runs
    rows = []
    for done in runs:
        counters = done.counters
        rows.append(
            [
                "on" if done is shared else "off",
                f"{done.seconds:.1f}",
                f"{len(questions) / done.seconds:.2f}",
                f"{counters.computed_tokens:,}",
                f"{counters.cached_tokens:,}",
                f"{counters.saving_ratio:.0%}",
            ]
        )
    header = ["sharing", "seconds", "requests/s", "prompt tokens computed", "saved", "saved %"]
    same = sum(
        a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(shared.answers, alone.answers, strict=True)
    )
    lines = [""]
    for index in _spread(len(questions), 3):
        answer = shared.answers[index].outputs[0].text.strip()
        lines += [f"Q: {questions[index].text}", *textwrap.wrap(f"A: {answer}", 96), ""]
    gain = alone.seconds / shared.seconds
    speed = f"{gain:.1f}x faster with sharing"
    if gain < 1:
        speed = f"{1 / gain:.1f}x slower with sharing (was the machine busy with other programs?)"
    lines += [
        table(header, rows),
        "",
        f"{speed}; {same} of {len(questions)} answers are the same token for token.",
    ]
    return "\n".join(lines)


def _spread(total: int, wanted: int) -> list[int]:
    """Up to `wanted` indices, spread evenly over `total`."""
    count = min(total, wanted)
    return [index * total // count for index in range(count)]
