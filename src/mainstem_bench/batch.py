"""Compares `mainstem batch` with and without sharing and planning, on questions about documents.

--input is a file, also .gz, with one JSON object per line:
{"doc": text, "items": [{"q": question}, ...]}. The default is the documents of `mainstem demo`.
Answers are greedy and have a fixed number of tokens. Both runs answer the same file in one process,
each with a new engine; reading and tokenising are timed, loading the model is not. Answers are
compared before a speed is reported.
"""

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from mainstem.cli import batch
from mainstem.cli.demo import load_questions
from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, given_settings
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import SETTINGS
from mainstem.core.errors import InvalidRequest
from mainstem_bench.report import line, load_average, show_all

PLANNED: tuple[str, ...] = ()
PLAIN = ("--share", "none", "--no-plan", "--no-dedupe")
# settings without effect if nothing is shared
NOT_SHARED = {"span_levels", *(row.argument for row in SETTINGS if row.section == "store")}


@dataclass(frozen=True, slots=True)
class BatchPass:
    """One pass over all questions."""

    name: str
    seconds: float
    cpu_seconds: float  # of all threads, with loading; other programs affect it less than `seconds`
    requests_per_s: float
    computed_prompt_tokens: int
    saving_ratio: float


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench batch", description=__doc__)
    made.add_argument("--input", type=Path, metavar="FILE", help="documents and questions")
    made.add_argument("--requests", type=positive_count, default=200, metavar="N")
    flag = partial(add_flag, made)
    flag("--output", positive_count, "tokens per answer", 32)
    made.add_argument("--json", action="store_true")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    """Exit status 0 if both runs gave the same answers."""
    args = parser().parse_args(argv)
    prompts = read_prompts(args.input)[: args.requests]
    load = load_average()
    with TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows(prompts, args.output)))
        planned, ours = run("planned", source, [*engine_flags(args), *PLANNED])
        plain, theirs = run("plain", source, [*engine_flags(args, NOT_SHARED), *PLAIN])
    same = sum(ours[name] == theirs[name] for name in ours)
    speedup = plain.seconds / planned.seconds
    if args.json:
        values = {
            "requests": len(prompts),
            "output_tokens": args.output,
            "speedup": round(speedup, 3),
            "cpu_speedup": round(plain.cpu_seconds / planned.cpu_seconds, 3),
            "same_answers": same,
            "load_average": load,
            "runs": [asdict(planned), asdict(plain)],
        }
        print(line("batch", values))
    else:
        show_all("batch", [asdict(planned), asdict(plain)], is_json=False)
        print(f"\n{speedup:.2f}x; {same} of {len(prompts)} answers are the same")
    return 0 if same == len(prompts) else 1


def read_prompts(path: Path | None) -> list[str]:
    """Return one prompt per question, in file order. Prompts begin with the document, since that is
    the part they share."""
    prompts = []
    for each in load_questions(path):
        text = each.text
        if not text.startswith("\n"):
            text = f"\n\nQuestion: {text}\nAnswer:"
        prompts.append(each.doc + text)
    return prompts


def rows(prompts: list[str], output_tokens: int) -> list[dict[str, object]]:
    """Return the lines of the batch: one row per prompt."""
    fixed = {"temperature": 0, "max_tokens": output_tokens, "ignore_eos": True}
    return [
        {"custom_id": str(number), "prompt": prompt, **fixed}
        for number, prompt in enumerate(prompts)
    ]


def engine_flags(args: argparse.Namespace, left_out: Collection[str] = ()) -> list[str]:
    """The engine's flags as they were given, without those in `left_out`, which would have no
    effect."""
    if args.share is not None:
        raise InvalidRequest(
            "--share", "cannot be set: one run shares everything, the other nothing"
        )
    flags = ["--generation-config", "none"]  # no sampling and no penalties
    given = given_settings(args) | ({} if args.config is None else {"config": args.config})
    for name, value in given.items():
        if name in left_out:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        flags += [] if value is True else [str(value)]
    return flags


def run(name: str, source: Path, flags: list[str]) -> tuple[BatchPass, dict[str, str]]:
    """Answer the file once; returns its times and counts, and the text of every answer."""
    out, summary_file = source.with_name(f"{name}.jsonl"), source.with_name(f"{name}.json")
    began_s = process_time()
    argv = [str(source), "-o", str(out), "--summary-json", str(summary_file), *flags]
    status = batch.main(argv)
    if status >= 128:
        raise KeyboardInterrupt  # a signal stopped the run
    if status != 0:
        raise InvalidRequest("--input", "some questions could not be answered; see above")
    cpu_seconds = process_time() - began_s
    summary = json.loads(summary_file.read_text())
    answers: dict[str, str] = {}
    for text in out.read_text().splitlines():
        row = json.loads(text)
        answers[row["custom_id"]] = row["response"]["body"]["choices"][0]["text"]
    done = BatchPass(
        name,
        summary["seconds"],
        round(cpu_seconds, 3),
        summary["requests_per_s"],
        summary["computed_prompt_tokens"],
        summary["saving_ratio"],
    )
    return done, answers
