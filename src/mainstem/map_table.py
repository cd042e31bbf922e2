"""`mainstem.map`: a prompt for every row of a table in memory (docs/tables.md)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mainstem.batch.ahead import Ahead
from mainstem.batch.bar import JobBar, read_so_far
from mainstem.batch.done import Done
from mainstem.batch.job import BatchJob, JobConfig
from mainstem.batch.ordering import WindowPlanner
from mainstem.batch.summary import Summary
from mainstem.batch.windows import RowReader, WindowReader
from mainstem.core.errors import InvalidRequest
from mainstem.llm.llm import LLM
from mainstem.plan.planner import PlanConfig
from mainstem.tables.job import TableJob, wish_for
from mainstem.tables.memory import MemoryTable
from mainstem.tables.results import HeldOutcomes, answer_columns
from mainstem.text.parsers.formats import find_formats
from mainstem.text.text_engine import TextEngine
from mainstem.wire.chat.parsing import CallParser

WINDOW_BYTES = 1 << 30  # of rows that are planned together
DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def map(  # noqa: PLR0913  # by keyword, as the flags of `mainstem map`
    table: Any,
    prompt: str | None = None,
    *,
    template: str | None = None,
    model: "str | Path | LLM" = "smollm2",
    system: str | None = None,
    chat: bool = True,
    fields: Sequence[str] | None = None,
    reorder: str = "columns",
    answer: str = "answer",
    schema: object = None,
    choices: Sequence[str] | None = None,
    sampling: Mapping[str, object] | None = None,
    use_tqdm: bool = True,
    **settings: Any,
) -> Any:
    """Ask a prompt about every row of a table, and return the table with the answers.

        mainstem.map(frame, "Is {review} about {product}?", choices=["yes", "no"])

    The table is a DataFrame of pandas or polars, a pyarrow.Table, or a list of dictionaries, and so
    is the result: a copy with the columns `answer` and `answer_error`. `template` is a Jinja
    template instead of a prompt. `model` is a name or folder (`settings` are those of LLM) or an
    LLM. `sampling` are fields of a request (max_tokens, temperature, ...); answers are greedy and
    have at most 256 tokens by default. The others mean the same as the flags of `mainstem map`.

    Raises InvalidRequest for a call that is wrong; a row without an answer gets an error instead.
    """
    wish = wish_for(
        prompt,
        template=template,
        system=system,
        chat=chat,
        fields=fields,
        reorder=reorder,
        answer=answer,
        schema=schema,
        choices=choices,
    )
    given = MemoryTable(table)
    job = TableJob(given, wish)
    CallParser({**DEFAULTS, **(sampling or {})})  # raises InvalidRequest if they are not valid
    with ExitStack() as opened:
        if isinstance(model, LLM):
            if settings:
                name = sorted(settings)[0]
                raise InvalidRequest(name, "cannot be set for an LLM that is loaded already")
            llm = model
        else:
            llm = opened.enter_context(LLM(model, **settings))
        with llm.lent_engine() as engine:
            outcomes = _run(job, engine, dict(sampling or {}), use_tqdm, lambda: llm.is_closed)
    cells = [outcomes.of(number) for number in range(1, job.num_rows + 1)]
    return given.with_answers(answer_columns(job.asking, answer), cells)


def _run(
    job: TableJob,
    engine: TextEngine,
    sampling: dict[str, object],
    is_shown: bool,
    should_stop: Callable[[], bool],
) -> HeldOutcomes:
    """Answer all rows; raises InvalidRequest if the engine was closed before."""
    tokenizer = engine.tokenizer
    job.prepare(tokenizer)
    formats = find_formats(tokenizer)
    parser = CallParser(
        {**tokenizer.sampling_defaults, **DEFAULTS, **sampling}, find_formats=lambda: formats
    )
    rows = RowReader(parser, lambda: tokenizer, max_model_len=engine.engine.max_model_len)
    source = job.rows()
    reader = WindowReader(source, rows, Done(), WINDOW_BYTES)
    outcomes = HeldOutcomes(job.asking)
    summary = Summary("table", "table", "")

    def preparing() -> str:
        return "reading" + read_so_far(reader.num_rows, source.progress)

    planner = WindowPlanner(PlanConfig(), has_dedupe=True)
    with JobBar(summary, preparing, is_shown) as bar, engine.engine.bus.guests():
        batch = BatchJob(engine, outcomes, JobConfig(""), summary, should_stop, bar)
        windows = Ahead(planner.plan(window) for window in reader)
        try:
            batch.run(windows)
        finally:
            windows.close()
            batch.abort_open()
    if not summary.is_complete:
        raise InvalidRequest("LLM", "was closed before all rows were answered")
    return outcomes
