"""`mainstem batch IN -o OUT`: answers a file of requests, one JSON line each, resumable.

IN is OpenAI's batch format (/v1/chat/completions, /v1/completions), or lines with a "prompt" (text
or token ids) or "messages" and sampling fields. Files may end in .gz or .zst; the name "-" is
standard input or output. Each answer is appended as soon as it is known; a line that cannot be
answered becomes an error row, and the job continues.

Exit status: 0 all rows answered, 1 some failed or the job stopped early, 2 the call was wrong,
130 stopped by Ctrl-C, 143 by SIGTERM (continue with --resume).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from mainstem.batch.ahead import Ahead
from mainstem.batch.answer_file import AnswerFile, Existing
from mainstem.batch.bar import JobBar, read_so_far
from mainstem.batch.done import Stale, find_stale
from mainstem.batch.driver import Driver, KeptLines
from mainstem.batch.files import FileFault, InputFile, Line
from mainstem.batch.job import BatchJob, JobConfig
from mainstem.batch.marks import Marker
from mainstem.batch.ordering import PlannedWindow, WindowPlanner
from mainstem.batch.summary import Summary
from mainstem.batch.windows import RowReader, RowSource, WindowReader
from mainstem.cli import flags
from mainstem.cli.app_flag import add_app_flag, apps_by_name
from mainstem.cli.batch_workers import (
    Team,
    add_worker_flags,
    has_workers,
    join_ray_address,
    load_tokenizer,
    open_team,
)
from mainstem.cli.parser import Parser, add_flag
from mainstem.cli.stop_signals import StopSignals
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.plan.planner import PlanConfig
from mainstem.text.parsers.formats import find_formats
from mainstem.text.text_engine import TextEngine
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.chat.parsing import CallParser

MIB = 1 << 20
LARGEST_WINDOW_MIB = 2048
KEEP_ALL, REDO_CHANGED = "all", "changed"  # values of --resume
DEFAULT_FLAGS = ["max_tokens", *flags.DRAW_FLAGS, "stop", "ignore_eos"]  # fields of SamplingParams


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "mainstem batch",
        usage="%(prog)s IN -o OUT [--resume[=changed] | --overwrite] [flags]",
        description=__doc__,
    )
    made.add_argument("input", metavar="IN", help="JSON lines, also .gz or .zst; -: standard input")
    made.add_argument("-o", "--output", required=True, metavar="OUT", help="-: standard output")
    existing = made.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        nargs="?",
        choices=[KEEP_ALL, REDO_CHANGED],
        const=KEEP_ALL,
        metavar=REDO_CHANGED,
        help="continue an existing OUT; =changed: also answer again the rows that changed after "
        "they were answered, or that another model answered",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    add_job_flags(made)
    return made


def add_job_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags that say how a job's rows are planned and answered."""
    made.set_defaults(command=made.prog)
    add_app_flag(made)
    made.add_argument("--no-plan", action="store_true", help="keep the input's order")
    made.add_argument(
        "--no-reorder",
        action="store_true",
        help="run prompts with equal prefixes together, but keep these groups in the input's "
        "order, instead of running those with long answers first",
    )
    made.add_argument(
        "--no-dedupe",
        action="store_true",
        help="compute equal greedy rows one by one; do not copy one answer",
    )
    flag = partial(add_flag, made)
    flag(
        "--levels", int, "maximum levels of shared prefixes; 1: as in BatchLLM", PlanConfig().levels
    )
    made.add_argument(
        "--window-mib", type=int, metavar="N",
        help="memory for rows that are planned together (1/8 of the free memory, up to 2048)",
    )  # fmt: skip
    made.add_argument("--summary-json", type=Path, metavar="FILE", help="also write the summary")
    made.add_argument("--no-progress", action="store_true", help="no progress bar")
    flags.add_parser_flags(made)
    add_worker_flags(made)
    _add_default_flags(made)
    flags.add_engine_flags(made)


def _add_default_flags(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("for rows that do not set them")
    group.add_argument(
        "--max-tokens", type=int, metavar="N",
        help="maximum tokens of an answer (16 for prompts, the rest of the context for chats)",
    )  # fmt: skip
    flags.add_draw_flags(group, {})
    flags.add_generation_flag(group)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before this text; repeatable",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="do not stop at end tokens",
    )
    flag = partial(add_flag, group)
    flag("--seed", int, "rows without a seed get one made from N and their custom_id", 0)


def open_engine(config: EngineConfig) -> TextEngine:
    """The model's engine, made like that of LLM."""
    from mainstem.llm import LLM  # noqa: PLC0415  # imports torch; wrong calls end without it

    return LLM.from_config(config).text_engine


def main(
    argv: list[str],
    load: Callable[[EngineConfig], TextEngine] = open_engine,
    load_words: Callable[[EngineConfig], Tokenizer] = load_tokenizer,
) -> int:
    """Exit status as above; errors in the call are raised as MainstemError."""
    args = parser().parse_args(join_ray_address(_joined(argv)))
    if args.resume == REDO_CHANGED and not Path(args.input).is_file():
        raise InvalidRequest(
            "--resume=changed", "needs an input file: standard input cannot be read twice"
        )
    return run_job(args, lambda: open_file(args.input, args.output), load, load_words).status


@dataclass(frozen=True, slots=True)
class JobInput:
    """Where the rows of a job come from."""

    name: str
    output: str  # the name of what the job makes, for the summary
    lines: Callable[[Tokenizer], RowSource]  # the rows, to be read once
    # the same rows, to be compared with those of an earlier run; called after `lines`
    again: Callable[[], AbstractContextManager[Iterable[Line]]]
    close: Callable[[], None] = lambda: None


def open_file(name: str, output: str) -> JobInput:
    """A batch file, or standard input."""
    source = InputFile(name)
    if source.is_same_file(output):
        source.close()
        raise InvalidRequest("-o", "is the input itself")
    return JobInput(name, output, lambda _: source, lambda: closing(InputFile(name)), source.close)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    status: int  # exit status of the command
    summary: Summary


def run_job(
    args: argparse.Namespace,
    open_input: Callable[[], JobInput],
    load: Callable[[EngineConfig], TextEngine],
    load_words: Callable[[EngineConfig], Tokenizer],
) -> JobEnd:
    """Answer the rows of an input into `args.output`; `args` are those of `add_job_flags`, and
    `resume` and `overwrite`."""
    is_spread = has_workers(args)
    config = flags.engine_config(args)
    config.check()
    if args.no_plan and (args.no_reorder or args.levels != PlanConfig().levels):
        raise ConfigError("--no-reorder and --levels would have no effect with --no-plan")
    defaults = _defaults(args)
    CallParser(defaults)  # raises InvalidRequest if the defaults are not valid
    find_app = apps_by_name(args.app)
    plan_config = PlanConfig(levels=args.levels, reorders=not args.no_reorder)
    planner = WindowPlanner(None if args.no_plan else plan_config, not args.no_dedupe)
    window_bytes = _window_bytes(args.window_mib)
    if args.summary_json is not None:
        _try_summary(args.summary_json)
    stop = StopSignals()
    with closing(open_input()) as given, ExitStack() as opened:
        summary = Summary(given.name, given.output, config.model.model)
        out = opened.enter_context(AnswerFile(args.output, _existing(args)))
        engine = None if is_spread else load(config)
        tokenizer = load_words(config) if engine is None else engine.tokenizer
        formats = find_formats(tokenizer, args.tool_call_parser, args.reasoning_parser)
        call_parser = CallParser(
            flags.model_defaults(args, tokenizer) | defaults, find_formats=lambda: formats
        )
        limit, identity = sys.maxsize, config.model.model.encode()
        if engine is not None:
            opened.enter_context(closing(engine.engine))
            limit = engine.engine.max_model_len
            identity = engine.engine.identity or identity
        marker = Marker(call_parser.defaults, args.seed, identity)
        source = given.lines(tokenizer)
        summary.redone = _forget_stale(args, given, out, marker)
        summary.failed_before = out.done.num_failed
        rows = RowReader(call_parser, lambda: tokenizer, find_app, limit, marker)
        kept = KeptLines(source)  # whole lines are sent to workers
        reader = WindowReader(source if engine else kept, rows, out.done, window_bytes)

        def preparing() -> str:
            if planner.num_planning:
                return f"planning {planner.num_planning:,} rows"
            return "reading" + read_so_far(reader.num_rows, source.progress)

        bar = opened.enter_context(JobBar(summary, preparing, not args.no_progress))
        job_config = JobConfig(config.model.model, args.seed, marker)
        if engine is not None:
            run = BatchJob(engine, out, job_config, summary, stop.is_set, bar).run
        else:
            team = Team(config, call_parser.defaults, args.seed, find_app, load)
            workers = opened.enter_context(open_team(args, team))
            driver = Driver(workers, kept.lines, out, job_config, summary, bar)
            run = partial(driver.run, should_stop=stop.is_set)
        fault = _run(run, map(planner.plan, reader), out, summary, stop)
    print(summary.to_text(), file=sys.stderr)
    if fault is not None:
        print(f"{args.command}: {fault}", file=sys.stderr)
    if args.summary_json is not None:
        said = json.dumps(summary.to_json(), indent=1) + "\n"
        args.summary_json.write_text(said, encoding="utf-8")
    if stop.received is not None:
        return JobEnd(128 + stop.received, summary)
    has_failed = fault is not None or summary.failed or summary.failed_before
    return JobEnd(1 if has_failed else 0, summary)


def _run(
    run: Callable[[Ahead[PlannedWindow]], None],
    planned: Iterable[PlannedWindow],
    out: AnswerFile,
    summary: Summary,
    stop: StopSignals,
) -> FileFault | None:
    """Run the job; a file error ends it and is returned, so that the summary is still printed."""
    began_s = perf_counter()
    windows: Ahead[PlannedWindow] | None = None
    try:
        with stop.caught():
            out.start()
            windows = Ahead(planned)
            run(windows)
            out.finish()
    except FileFault as fault:
        summary.is_complete = False
        return fault
    finally:
        summary.seconds = perf_counter() - began_s
        if windows is not None:
            windows.close()
    return None


def _joined(argv: list[str]) -> list[str]:
    """Join `--resume changed` to `--resume=changed`; any other word after --resume is not its
    value."""
    found: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--resume":
            after = next(words, None)
            value = REDO_CHANGED if after == REDO_CHANGED else KEEP_ALL
            found += [f"--resume={value}", *([after] if after not in (None, REDO_CHANGED) else [])]
        else:
            found.append(word)
    return found


def _forget_stale(
    args: argparse.Namespace, given: JobInput, out: AnswerFile, marker: Marker
) -> int:
    """Remove the output lines whose rows must be answered again, and return their number: errors
    that this machine caused and, with =changed, also changed rows and answers of another model.
    """
    stale = Stale()
    if args.resume == REDO_CHANGED and out.done.num_bytes:
        with given.again() as source:
            stale = find_stale(source, marker, out.done)
    elif num_others := out.done.models.total() - out.done.models[marker.model]:
        print(
            f"{args.command}: {num_others:,} lines of {args.output} are of another model (other "
            "weights, dtype or kind of device); --resume=changed answers their rows again",
            file=sys.stderr,
        )
    if not stale.counts and not out.done.num_machine_faults:
        return 0
    return out.forget(lambda entry: entry.is_machine_fault or stale.has(entry))


def _existing(args: argparse.Namespace) -> Existing:
    if args.resume:
        return Existing.RESUME
    return Existing.OVERWRITE if args.overwrite else Existing.REFUSE


def _defaults(args: argparse.Namespace) -> dict[str, object]:
    """Sampling fields that were given as flags."""
    values = {name: getattr(args, name) for name in DEFAULT_FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def _window_bytes(window_mib: int | None) -> int:
    if window_mib is None:
        from mainstem.runner.machine import describe_cpu  # noqa: PLC0415  # brings torch

        free_mib = describe_cpu().free_bytes // MIB
        return MIB * min(LARGEST_WINDOW_MIB, max(32, free_mib // 8))
    if window_mib < 1:
        raise ConfigError(f"--window-mib must be at least 1, got {window_mib}")
    return MIB * window_mib


def _try_summary(path: Path) -> None:
    """Raise InvalidRequest before the job if its summary cannot be written."""
    if not path.parent.is_dir():
        raise InvalidRequest("--summary-json", f"{path.parent} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequest("--summary-json", f"{path} cannot be written")
