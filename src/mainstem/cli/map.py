"""`mainstem map TABLE --prompt "Is {review} about {product}?" -o OUT`: a prompt for every row.

TABLE is CSV, TSV, JSON lines, Parquet or an Arrow file, a folder or pattern of such files, or "-"
for standard input. OUT has all columns and rows of TABLE, and the answers in new columns. `{row}`
in the prompt lists the fields of the row, in the order of columns that shares most.

Answers are kept in OUT.answers.jsonl while the job runs, so --resume continues after a kill.
Exit status: as that of `mainstem batch`.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mainstem.batch.done import MACHINE_FAULTS
from mainstem.batch.files import STANDARD, FileFault
from mainstem.cli.batch import REDO_CHANGED, JobEnd, JobInput, add_job_flags, open_engine, run_job
from mainstem.cli.batch_workers import has_workers, join_ray_address, load_tokenizer
from mainstem.cli.flag_types import member_of, positive_count
from mainstem.cli.map_plan import print_plan
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.tables.asking import Asking, error_column
from mainstem.tables.fields import Reorder, count_rows
from mainstem.tables.files import FileTable, write_answers
from mainstem.tables.formats import Format, format_of
from mainstem.tables.job import TableJob, Wish
from mainstem.tables.results import KeptOutcomes, answer_columns
from mainstem.tables.rows import TableRows
from mainstem.text.text_engine import TextEngine
from mainstem.text.tokenizer import Tokenizer

MAX_TOKENS = 256  # of an answer, unless --max-tokens is given
JOURNAL = ".answers.jsonl"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "mainstem map",
        usage="%(prog)s TABLE (--prompt TEXT | --prompt-file FILE) -o OUT [flags]",
        description=__doc__,
    )
    made.add_argument("table", metavar="TABLE", help="a file, folder or pattern; -: standard input")
    made.add_argument("-o", "--output", metavar="OUT", help="-: standard output")
    existing = made.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="continue after a kill: rows that are answered, and whose prompts are the same, are "
        "not answered again",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    _add_prompt_flags(made)
    made.add_argument(
        "--format",
        type=member_of(Format),
        metavar="NAME",
        help="of TABLE and OUT if they are '-': csv, tsv, jsonl, parquet or arrow (csv)",
    )
    made.add_argument("--limit", type=positive_count, metavar="N", help="only the first N rows")
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan (rows, tokens, what is saved, seconds) and answer nothing",
    )
    add_job_flags(made)
    made.set_defaults(max_tokens=MAX_TOKENS, temperature=0.0)
    return made


def _add_prompt_flags(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("what is asked")
    text = group.add_mutually_exclusive_group(required=True)
    flag = partial(add_flag, text)
    flag("--prompt", str, "{column} is a cell, {row} a list of fields, {{ a brace", metavar="TEXT")
    flag("--prompt-file", Path, "a Jinja template: {{ column }}, {{ row }}")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--no-chat", action="store_true", help="prompts are texts to continue: no chat template"
    )
    group.add_argument(
        "--fields", metavar="A,B,C", help="columns that {row} lists (all); without {row} in the "
        "prompt, they follow it",
    )  # fmt: skip
    group.add_argument(
        "--reorder",
        type=member_of(Reorder),
        default=Reorder.COLUMNS,
        metavar="WHAT",
        help="order of the fields in {row}: columns (one that shares most, for all rows), rows "
        "(each row may have another order), none (as given) (columns)",
    )
    group.add_argument(
        "--answer", default="answer", metavar="NAME", help="column of the answers (%(default)s); "
        "errors are in NAME_error",
    )  # fmt: skip
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--schema", type=Path, metavar="FILE", help="answers are JSON of this schema: a column for "
        "each property",
    )  # fmt: skip
    form.add_argument("--choices", metavar="A,B,C", help="answers are one of these texts")


def wish_of(args: argparse.Namespace) -> Wish:
    """What the flags ask of every row; raises InvalidRequest."""
    schema = None if args.schema is None else _json_file(args.schema)
    source = None if args.prompt_file is None else _text_file(args.prompt_file)
    return Wish(
        prompt=args.prompt,
        template=source,
        system=args.system,
        is_chat=not args.no_chat,
        fields=_listed(args.fields),
        reorder=args.reorder,
        answer=args.answer,
        schema=schema,
        choices=_listed(args.choices),
        may_score=not has_workers(args),  # workers are asked over the API of chats
    )


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _text_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(str(path), f"is not UTF-8: {error}") from None


def _json_file(path: Path) -> object:
    try:
        return json.loads(_text_file(path))
    except ValueError as error:
        raise InvalidRequest(str(path), f"is not JSON: {error}") from None


def _prepared(job: TableJob, tokenizer: Tokenizer) -> TableRows:
    job.prepare(tokenizer)
    if job.order.orders[0]:
        print(job.order.to_text(), file=sys.stderr)
    return job.rows()


def main(
    argv: list[str],
    load: Callable[[EngineConfig], TextEngine] = open_engine,
    load_words: Callable[[EngineConfig], Tokenizer] = load_tokenizer,
) -> int:
    """Exit status as above; errors in the call or the table are raised as MainstemError."""
    args = parser().parse_args(join_ray_address(argv))
    if args.output is None and not args.dry_run:
        raise ConfigError("-o OUT is missing (--dry-run needs none)")
    wish = wish_of(args)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="mainstem-map-")))
        table = _open_table(args, folder)
        job = TableJob(table, wish)
        if args.dry_run:
            print_plan(args, job, load_words)
            return 0
        target = _Target(args, table, folder)
        if target.is_complete():
            print(f"mainstem map: {args.output} is complete already", file=sys.stderr)
            return 0
        given = JobInput(
            args.table, args.output, partial(_prepared, job), lambda: nullcontext(job.rows())
        )
        args.output, args.resume = str(target.journal), target.resume
        end = run_job(args, lambda: given, load, load_words)
        return target.finish(end, job.asking, job.num_rows)


def _open_table(args: argparse.Namespace, folder: Path) -> FileTable:
    if args.table != STANDARD:
        return FileTable.open(args.table, args.limit)
    kind: Format = args.format or Format.CSV
    path = folder / f"stdin.{kind.value}"  # a table is read more than once
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return FileTable([str(path)], kind, args.limit)


class _Target:
    """The file that gets the table with its answers, and the journal of the answers beside it."""

    def __init__(self, args: argparse.Namespace, table: FileTable, folder: Path) -> None:
        """Raises InvalidRequest if there is a file that would be lost."""
        self._name, self._table, self._answer = args.output, table, args.answer
        self._is_written = False  # by an earlier run
        if args.output == STANDARD:
            if args.resume:
                raise InvalidRequest("--resume", "standard output cannot be resumed")
            self._kind: Format = args.format or Format.CSV
            self.journal, self.resume = folder / "answers.jsonl", None
            return
        path = Path(args.output)
        self._kind = format_of(args.output)
        self.journal = path.with_name(path.name + JOURNAL)
        if not path.parent.is_dir():
            raise InvalidRequest("-o", f"the folder {path.parent} does not exist")
        if table.has_file(path):
            raise InvalidRequest("-o", "is the table itself")
        has_answers = self.journal.exists() and self.journal.stat().st_size > 0
        self._is_written = args.resume and path.exists() and not has_answers
        if path.exists() and not args.overwrite and not args.resume:
            raise InvalidRequest(args.output, "exists already; use --overwrite, or another name")
        self.resume = REDO_CHANGED if args.resume else None

    def is_complete(self) -> bool:
        """Whether an earlier run has written everything; raises InvalidRequest if what it wrote is
        not of this table."""
        if not self._is_written:
            return False
        written = FileTable([self._name], self._kind)
        is_same = {*self._table.columns, error_column(self._answer)} <= set(written.columns)
        if not is_same or count_rows(written) != count_rows(self._table):
            reason = "is of another table or of fewer rows; use --overwrite"
            raise InvalidRequest(self._name, reason)
        return True

    def finish(self, end: JobEnd, asking: Asking, num_rows: int) -> int:
        """Write the table, if the job is complete; returns the exit status."""
        if not end.summary.is_complete:
            if self._name != STANDARD:
                said = f"{self._name} is not written; --resume continues from {self.journal}"
                print(f"mainstem map: {said}", file=sys.stderr)
            return end.status
        outcomes = KeptOutcomes(self.journal, num_rows, asking)
        columns = answer_columns(asking, self._answer)
        try:
            write_answers(self._table, outcomes, columns, self._name, self._kind)
        except FileFault as error:
            print(f"mainstem map: {error}", file=sys.stderr)
            return 1
        finally:
            outcomes.close()
        if MACHINE_FAULTS & end.summary.errors.keys():
            said = "some rows failed because of this machine; --resume tries them again"
            print(f"mainstem map: {said}", file=sys.stderr)
        else:
            self.journal.unlink()
        return end.status or int(outcomes.num_without_answer > 0)
