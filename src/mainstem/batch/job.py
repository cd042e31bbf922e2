"""The loop of a batch job. It submits rows in planned order, and appends each answer when it is
known."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from time import time
from typing import Protocol

import numpy as np

from mainstem.batch.ahead import Ahead
from mainstem.batch.bar import JobBar
from mainstem.batch.done import ENGINE_FAILED, FORM_LIMIT, MISSING_PACKAGE
from mainstem.batch.marks import Marker
from mainstem.batch.ordering import LengthEstimate, PlannedWindow, certain_output
from mainstem.batch.rows import Row, answer_row, error_row, score_row
from mainstem.batch.summary import Summary
from mainstem.batch.supply import Supply
from mainstem.batch.windows import Failure
from mainstem.core.errors import InvalidRequest, MissingPackage
from mainstem.core.events import StoreOpened
from mainstem.core.ids import RequestId
from mainstem.core.plan import Int32s
from mainstem.core.request import Delivery, Output, Request, SamplingParams
from mainstem.text.scoring import SCORE_SAMPLING, ContextScoring, ScoreOutput
from mainstem.text.text_engine import TextEngine
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.errors import WireError, from_invalid


class RowSink(Protocol):
    """Takes the rows of an output, each when it is done."""

    def append(self, row: Mapping[str, object]) -> None: ...


@dataclass(frozen=True, slots=True)
class JobConfig:
    """How a job is run."""

    model_name: str  # the model's name in answers
    seed: int = 0  # rows without a seed get one that is derived from this
    marker: Marker | None = None  # makes the marks of output lines


class RowWriter:
    """Writes the rows of a job's output and counts them."""

    def __init__(self, out: RowSink, config: JobConfig, summary: Summary, bar: JobBar) -> None:
        self._out = out
        self._marker = config.marker
        self._summary = summary
        self._bar = bar

    def answer(
        self, row: Row, line: dict[str, object], prompt_tokens: int, *, is_copy: bool
    ) -> None:
        """Write the line of an answered row; a copy has the answer of another row."""
        num_answers = row.call.sampling.n
        self._write(line, row.digest)
        self._summary.answered += 1
        self._bar.show_row(prompt_tokens, num_answers, is_copy)
        if is_copy:
            self._summary.deduplicated += 1
            self._summary.deduplicated_tokens += prompt_tokens * num_answers

    def fail(self, rows: Iterable[Row], error: WireError) -> None:
        """Write error rows for rows that cannot be answered."""
        for row in rows:
            self.refuse(Failure(row.line, row.custom_id, error, row.digest))

    def refuse(self, failure: Failure) -> None:
        """Write the error row of a line."""
        line = error_row(failure.line, failure.custom_id, failure.error)
        self._write(line, failure.digest)
        self._summary.failed += 1
        self._summary.errors[failure.error.code] += 1
        self._bar.show_row(0, 0, is_copy=True)

    def _write(self, line: dict[str, object], digest: str) -> None:
        self._out.append(line if self._marker is None else self._marker.marked(line, digest))


@dataclass(slots=True)
class _OpenRow:
    """A row that is being answered, and the rows that get the same answer."""

    row: Row
    copies: list[Row]
    template: int
    answers: PromptAnswers


@dataclass(slots=True)
class _Scored:
    """A row whose choices are being scored, and the rows that get the same scores."""

    row: Row
    copies: list[Row]
    scoring: ContextScoring
    open_ids: set[str]  # requests that are not answered


@dataclass(frozen=True, slots=True)
class _Next:
    """A row that is ready to be submitted."""

    row: Row
    copies: list[Row]
    prompt_ids: Int32s
    template: int
    plan_place: int | None
    new_tokens: int  # prompt tokens that will probably be computed


class BatchJob:
    """Answers windows of rows. `should_stop` is called between steps."""

    def __init__(
        self,
        engine: TextEngine,
        out: RowSink,
        config: JobConfig,
        summary: Summary,
        should_stop: Callable[[], bool],
        bar: JobBar,
    ) -> None:
        self._engine = engine
        self._rows = RowWriter(out, config, summary, bar)
        self._config = config
        self._summary = summary
        self._should_stop = should_stop
        self._bar = bar
        self._estimate = LengthEstimate()
        self._open: dict[str, _OpenRow] = {}
        # by request: its row, and its index among the requests of this row
        self._scored: dict[str, tuple[_Scored, int]] = {}
        summary.counters.attach(engine.engine.bus)
        engine.engine.bus.subscribe(StoreOpened, summary.note_store)
        self._supply = Supply(engine.engine.step_tokens)

    def run(self, windows: Ahead[PlannedWindow]) -> None:
        """Run until everything is answered or `should_stop` returns True; raises the error that
        ended `windows` early."""
        ready: Iterator[_Next] = iter(())
        upcoming = next(ready, None)
        while not self._should_stop():
            if upcoming is None and not windows.is_ended:
                is_idle = not self._engine.has_work
                window = windows.wait(self._should_stop_waiting) if is_idle else windows.poll()
                if window is not None:
                    ready = self._take(window)
                    upcoming = next(ready, None)
                    continue
            self._supply.begin_step()
            while upcoming is not None and self._supply.has_room(self._num_waiting):
                self._submit(upcoming)
                upcoming = next(ready, None)
            if self._engine.has_work:
                for output in self._engine.step():
                    self._hear(output)
                self._bar.show_step()
            elif upcoming is None and windows.is_ended:
                if windows.fault is not None:
                    raise windows.fault
                self._summary.is_complete = True
                return

    def abort_open(self) -> None:
        """Stop the rows that are being answered, after a run that did not end by itself."""
        for request_id in (*self._open, *self._scored):
            self._engine.abort(request_id)
        self._open.clear()
        self._scored.clear()

    @property
    def started_lines(self) -> list[int]:
        """Lines of the rows that the engine has now; for any thread."""
        names = [*self._open.copy(), *self._scored.copy()]
        return [int(name.partition(".")[0]) for name in names]

    def _should_stop_waiting(self) -> bool:
        """Whether to stop waiting; polled while the next window is made."""
        self._bar.show_preparing()
        return self._should_stop()

    # --- rows to the engine ---------------------------------------------------------------------

    def _take(self, planned: PlannedWindow) -> Iterator[_Next]:
        """Write the failures of a window, then yield its rows in order."""
        window = planned.window
        self._summary.note_window(planned)
        self._bar.show_window(window)
        for failure in window.failures:
            self._rows.refuse(failure)
        return self._in_order(planned)

    def _in_order(self, planned: PlannedWindow) -> Iterator[_Next]:
        rows, prompts = planned.window.rows, planned.window.prompts
        for stretch in planned.stretches(self._estimate):
            first: int | None = None
            if stretch.shared_with_next is not None:
                first = self._engine.engine.expect(stretch.shared_with_next)
            parts = (stretch.row_indices, stretch.templates, stretch.new_tokens)
            places = zip(*(part.tolist() for part in parts), strict=True)
            for offset, (index, template, new_tokens) in enumerate(places):
                place = None if first is None else first + offset
                equals = [rows[copy] for copy in planned.copies[index]]
                yield _Next(rows[index], equals, prompts[index], template, place, new_tokens)

    @property
    def _num_waiting(self) -> int:
        return self._engine.engine.num_waiting

    def _submit(self, item: _Next) -> None:
        row, sampling = item.row, item.row.call.sampling
        if row.choices:
            self._submit_scored(item)
            return
        request_id = RequestId(str(row.line))
        expected = certain_output(sampling)
        if expected is None:
            expected = self._estimate.expect(item.template, sampling.max_tokens)
        try:
            request = Request(
                request_id,
                item.prompt_ids,
                seeded(row, self._config.seed),
                salt=row.call.cache_salt,
                priority=row.call.priority,
                delivery=Delivery.AT_END,
                plan_place=item.plan_place,
                expected_tokens=expected,
                rendering=row.call.rendering(item.prompt_ids, self._engine.tokenizer),
            )
            self._engine.submit(request)
        except InvalidRequest as error:
            fault = from_invalid(error)
            if isinstance(error, MissingPackage):
                fault = WireError(MISSING_PACKAGE, fault.message, fault.param)
            self._rows.fail((row, *item.copies), fault)
            return
        answers = PromptAnswers(len(item.prompt_ids), sampling)
        self._open[request_id] = _OpenRow(row, item.copies, item.template, answers)
        self._supply.note(item.new_tokens, sampling.n)

    def _submit_scored(self, item: _Next) -> None:
        row = item.row
        scoring = ContextScoring(item.prompt_ids.tolist(), row.choices)
        opened = _Scored(row, item.copies, scoring, set())
        asked = scoring.prompts()
        for place, (ids, wanted) in enumerate(asked):
            request = Request(
                RequestId(f"{row.line}.{place}"),
                np.array(ids, np.int32),
                SCORE_SAMPLING,
                salt=row.call.cache_salt,
                priority=row.call.priority,
                delivery=Delivery.AT_END,
                # the context's pages are not needed after its last request has started
                plan_place=item.plan_place if place == len(asked) - 1 else None,
                expected_tokens=1,
                scoring=wanted,
            )
            opened.open_ids.add(request.request_id)
            self._scored[request.request_id] = opened, place
            try:
                self._engine.submit(request)
            except InvalidRequest as error:
                self._drop_scored(opened, from_invalid(error))
                return
        self._supply.note(item.new_tokens, len(asked))

    # --- answers to the file --------------------------------------------------------------------

    def _hear_score(self, output: Output) -> None:
        opened, place = self._scored.pop(output.request_id)
        if output.fault is not None:
            message = f"steps failed on this row: {output.fault}"
            self._drop_scored(opened, WireError(ENGINE_FAILED, message))
            return
        opened.scoring.take(place, output)
        opened.open_ids.discard(output.request_id)
        if not opened.open_ids:
            result = opened.scoring.result()
            self._note_scored(opened.row, result, is_copy=False)
            result.num_cached_tokens = len(result.context_token_ids)  # a copy computes nothing
            for row in opened.copies:
                self._note_scored(row, result, is_copy=True)

    def _note_scored(self, row: Row, result: ScoreOutput, is_copy: bool) -> None:
        line = score_row(row, result, self._config.model_name, int(time()))
        self._rows.answer(row, line, len(result.context_token_ids), is_copy=is_copy)

    def _drop_scored(self, opened: _Scored, fault: WireError) -> None:
        """Drop all choices of a row that cannot be scored."""
        for request_id in opened.open_ids:
            self._scored.pop(request_id, None)
            self._engine.abort(request_id)
        self._rows.fail((opened.row, *opened.copies), fault)

    def _hear(self, output: Output) -> None:
        if output.request_id in self._scored:
            self._hear_score(output)
            return
        opened = self._open.get(output.request_id)
        if opened is None:
            return  # the row has failed already
        if output.fault is not None:
            if output.is_form_fault:
                fault = WireError(FORM_LIMIT, f"given up: {output.fault}", "response_format")
            else:
                fault = WireError(ENGINE_FAILED, f"steps failed on this row: {output.fault}")
            self._give_up(output.request_id, opened, fault)
            return
        answers = opened.answers
        answers.add(output)
        if not answers.is_finished:
            return
        del self._open[output.request_id]
        for answer in answers.answers:
            self._estimate.observe(opened.template, len(answer.token_ids))
        self._answer(opened.row, answers, is_copy=False)
        answers.cached_tokens = answers.prompt_tokens  # a copy computes nothing
        for row in opened.copies:
            self._answer(row, answers, is_copy=True)

    def _give_up(self, request_id: str, opened: _OpenRow, fault: WireError) -> None:
        """Write error rows for a row that cannot be answered, and for its copies."""
        del self._open[request_id]
        self._engine.abort(request_id)
        self._rows.fail((opened.row, *opened.copies), fault)

    def _answer(self, row: Row, answers: PromptAnswers, is_copy: bool) -> None:
        name, tokenizer = self._config.model_name, self._engine.tokenizer
        line = answer_row(row, answers, name, tokenizer, int(time()))
        self._rows.answer(row, line, answers.prompt_tokens, is_copy=is_copy)


def seeded(row: Row, seed: int) -> SamplingParams:
    """Return a row's sampling. If it is not greedy and has no seed, it gets one from the job's seed
    and the row's id, so that a resumed job gives the same answers."""
    sampling = row.call.sampling
    if sampling.is_greedy or sampling.seed is not None:
        return sampling
    digest = blake2b(f"{seed} {row.custom_id}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little", signed=True))
