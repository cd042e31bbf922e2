"""Runs batches at a lower priority than interactive requests, one per tenant at a time.

Rows are read, planned and written by the parts of `mainstem batch`. No new row starts while many
interactive requests are open. Answers are appended to a file as they come. Only that file says
which rows are done, so a batch continues after a restart or a kill.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from time import time

import numpy as np

from mainstem.batch.answer_file import AnswerFile, Existing
from mainstem.batch.files import FileFault, InputFile
from mainstem.batch.job import seeded
from mainstem.batch.ordering import LengthEstimate, PlannedWindow, WindowPlanner
from mainstem.batch.rows import Row, answer_row, error_row, score_row
from mainstem.batch.windows import Failure, RowReader, WindowReader
from mainstem.core.errors import EngineAsleep, InvalidRequest, WeightsLost
from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.plan import Int32s
from mainstem.core.request import FinishReason, Request
from mainstem.plan.planner import PlanConfig
from mainstem.server.apps import AppFiller
from mainstem.server.http.auth import Tenant
from mainstem.server.http.limits import RequestGate
from mainstem.server.kept.batch_results import make_results
from mainstem.server.kept.batch_store import Batch, BatchStatus, BatchStore
from mainstem.server.kept.file_store import FileStore
from mainstem.server.link.answering import AbortFault, EngineFault, FormFault, RequestFault
from mainstem.server.link.engine_client import EngineClient, EngineState
from mainstem.server.metrics import ServerMetrics
from mainstem.server.served_model import ServedModel
from mainstem.text.encoding import App
from mainstem.text.scoring import ContextScoring
from mainstem.wire.answers import PromptAnswers
from mainstem.wire.calls import Call
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError, from_invalid

PRIORITY = 1 << 20  # batches run after interactive requests
MAX_BATCHES = 8  # batches that run at once
MAX_ROWS = 1024  # rows open at once, of all batches together
MAX_WAITING = 32  # no row is started while this many requests wait: clients use the same queue
BUSY_ANSWERS = 8  # no row is started while more interactive answers than this are open
LOOK_S = 0.02  # how often the runner checks whether it may start a row
WINDOW_BYTES = 64 << 20  # bytes of rows that are planned together
MAX_TRIES = 5  # attempts for a row while the engine fails
RETRY_S = 1.0  # pause after the engine or the disk failed; for the disk, it doubles each time
MAX_RETRY_S = 60.0  # longest pause after the disk failed

log = logging.getLogger("mainstem.server")


class BatchRunner:
    """Runs all batches, each in a task of the event loop."""

    def __init__(  # noqa: PLR0913, PLR0917  # parts of a server
        self,
        engine: EngineClient,
        gate: RequestGate,
        tenants: Sequence[Tenant],
        filler: AppFiller,
        model: ServedModel,
        files: FileStore,
        batches: BatchStore,
        metrics: ServerMetrics,
        is_draining: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._tenants = {tenant.owner: tenant for tenant in tenants}
        self._filler = filler
        self._model = model
        self._files = files
        self._batches = batches
        self._metrics = metrics
        self._is_draining = is_draining
        self._wake = asyncio.Event()
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # batch -> owner, task
        self._loop: asyncio.Task[None] | None = None
        self._is_closing = False
        self._num_open = 0  # open rows of all batches
        self._seen = engine.snapshot
        self._num_since = 0  # rows started since the snapshot `_seen`

    def start(self) -> None:
        self._loop = asyncio.ensure_future(self._run())

    def wake(self) -> None:
        """Look for batches to start, because there is a new batch, or one has ended."""
        self._wake.set()

    def cancel(self, batch: Batch) -> Batch:
        """End a batch early; answers so far are kept. If the disk fails, the batch stops as well,
        and its state is saved when the disk works again. If the process is killed before that, the
        batch continues after a restart.
        """
        if batch.is_ended or batch.status is BatchStatus.CANCELLING:
            return batch
        cancelling = batch.moved(BatchStatus.CANCELLING)
        try:
            self._batches.put(cancelling)
        except OSError as error:
            facts = {"batch": batch.batch_id, "reason": str(error)}
            log.error("a cancelled batch could not be saved", extra={"facts": facts})
            self._batches.note(cancelling)
        if batch.batch_id in self._running:
            self._running[batch.batch_id][1].cancel()
        self.wake()
        return cancelling

    async def close(self) -> None:
        """Stop running batches; a later process continues them."""
        self._is_closing = True
        tasks = [task for _, task in self._running.values()]
        if self._loop is not None:
            tasks.append(self._loop)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Start batches as they come, one per owner at a time, so that up to MAX_BATCHES owners do
        not wait for each other. A cancelled batch starts at once, to be finished."""
        while True:
            self._wake.clear()
            for batch in self._batches.opened():
                owners = {owner for owner, _ in self._running.values()}
                is_next = batch.owner not in owners and len(owners) < MAX_BATCHES
                is_leaving = batch.status is BatchStatus.CANCELLING
                if batch.batch_id not in self._running and (is_next or is_leaving):
                    task = asyncio.ensure_future(self._care_for(batch))
                    self._running[batch.batch_id] = (batch.owner, task)
            await self._wake.wait()

    async def _care_for(self, batch: Batch) -> None:
        """Work on a batch until it has ended; retry with growing pauses while the disk fails."""
        wait_s = RETRY_S
        try:
            # None: a client has deleted the batch after its end
            while (latest := self._found(batch)) is not None and not latest.is_ended:
                try:
                    await self._attempt(latest)
                except OSError as error:
                    facts = {"batch": batch.batch_id, "reason": str(error), "retry_s": wait_s}
                    log.error("a batch waits for the disk", extra={"facts": facts})
                    await self._sleep(wait_s)
                    wait_s = min(2 * wait_s, MAX_RETRY_S)
        finally:
            del self._running[batch.batch_id]
            self.wake()

    async def _attempt(self, batch: Batch) -> None:
        """Run a batch until it has ended; raises OSError while the disk fails."""
        try:
            await self._work(batch)
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            await self._finish(self._latest(batch), BatchStatus.CANCELLED)
        except Exception as group:  # an error of this batch; the others continue
            error = _first(group)
            if (fault := _disk_fault(error)) is not None:
                raise fault from None
            await self._give_up(self._latest(batch), error)

    async def _sleep(self, seconds: float) -> None:
        """Sleep this long, or until the batch is cancelled."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if self._is_closing:
                raise

    async def _give_up(self, batch: Batch, error: Exception) -> None:
        """End a batch that cannot continue; answers so far are kept if they can be read."""
        log.error("a batch failed", exc_info=error)
        is_known = isinstance(error, FileFault | InvalidRequest)
        failed = replace(batch, fault=str(error) if is_known else "internal error")
        try:
            await self._finish(failed, BatchStatus.FAILED)
        except (ValueError, LookupError, TypeError):  # its answers are damaged
            self._batches.put(failed.moved(BatchStatus.FAILED))

    def _found(self, batch: Batch) -> Batch | None:
        return self._batches.find(batch.owner, batch.batch_id)

    def _latest(self, batch: Batch) -> Batch:
        found = self._found(batch)
        assert found is not None
        return found

    # --- one batch ------------------------------------------------------------------------------

    async def _work(self, batch: Batch) -> None:
        """Answer the rows that are left, and complete the batch."""
        if batch.status is BatchStatus.CANCELLING:
            await self._finish(batch, BatchStatus.CANCELLED)
            return
        tenant = self._tenants.get(batch.owner)
        if tenant is None:
            raise InvalidRequest("key", "the key that this batch belongs to was removed")
        if await asyncio.to_thread(self._files.find, batch.owner, batch.input_file_id) is None:
            raise InvalidRequest("input_file_id", "the file was removed")
        if batch.status is not BatchStatus.IN_PROGRESS:
            batch = batch.moved(BatchStatus.IN_PROGRESS)
            self._batches.put(batch)
        path = self._files.path(batch.owner, batch.input_file_id)
        work = str(self._batches.work_path(batch))
        out = await asyncio.to_thread(AnswerFile, work, Existing.RESUME)
        with out, closing(InputFile(str(path))) as source:
            out.start()
            run = _BatchRun(self, batch, tenant, out)
            run.note_done()
            stored = await asyncio.to_thread(self._files.listed, batch.owner)
            room_bytes = self._gate.limits.stored_bytes - sum(file.num_bytes for file in stored)
            status = await run.answer_all(source, room_bytes)
        latest = self._latest(batch)
        if status is BatchStatus.FAILED:
            latest = replace(latest, fault="its answers exceed the storage limit of this key")
        await self._finish(latest, status)

    async def _finish(self, batch: Batch, status: BatchStatus) -> None:
        """Write the files with the answers, and save that the batch has ended."""
        finalizing = batch.moved(BatchStatus.FINALIZING)
        work = self._batches.work_path(batch)
        made = await make_results(self._files, finalizing, work, status)
        self._batches.put(made.moved(status))
        work.unlink(missing_ok=True)
        if batch.is_of_messages:  # its requests are no file of the client
            await asyncio.to_thread(self._files.remove, batch.owner, batch.input_file_id)
        facts = {"batch": batch.batch_id, "status": status.value, "rows": batch.total}
        log.info("batch ended", extra={"facts": facts})

    # --- what rows need -------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether another row may start now."""
        snapshot = self._engine.snapshot
        if snapshot is not self._seen:
            self._seen, self._num_since = snapshot, 0
        num_new = min(self._num_since, self._num_open)  # some of them may have ended already
        has_room = snapshot.num_waiting + num_new < MAX_WAITING
        is_busy = self._gate.open_answers > BUSY_ANSWERS or self._is_draining()
        is_running = self._engine.state is EngineState.RUNNING and not self._engine.is_asleep
        return has_room and self._num_open < MAX_ROWS and not is_busy and is_running

    def note_row(self, change: int) -> None:
        """Count a row that was started (1) or has ended (-1)."""
        self._num_open += change
        self._num_since += max(0, change)

    def reader(self, tenant: Tenant, source: InputFile, out: AnswerFile) -> Iterator[PlannedWindow]:
        """Return the rows that are left, in windows; each is planned when it is asked for, on a
        thread."""
        engine = self._engine
        formats = self._model.formats_of(engine.tokenizer)
        parser = CallParser(self._model.sampling, find_formats=lambda: formats)
        rows = RowReader(
            parser,
            lambda: engine.tokenizer,
            self._find_app,
            engine.max_model_len,
            find_salt=lambda call: tenant.page_salt(call.cache_salt),
        )
        windows = WindowReader(source, rows, out.done, WINDOW_BYTES)
        return map(WindowPlanner(PlanConfig(), has_dedupe=False).plan, windows)

    def note(self, batch: Batch) -> None:
        """Publish the progress of a batch."""
        latest = self._latest(batch)
        counted = replace(latest, total=batch.total, completed=batch.completed, failed=batch.failed)
        self._batches.note(counted)

    async def answer(self, batch: Batch, row: Row, ids: Int32s, salt: bytes) -> Json:
        """Return the output line of a row; raises WireError. Waits while there is no engine, or it
        sleeps, and tries again if the engine fails or has aborted the answer."""
        call = row.call
        if row.url != batch.endpoint:
            message = f"url: is {row.url}, but the batch is for {batch.endpoint}"
            raise WireError("mismatched_url", message, "url")
        try:
            request = Request(
                RequestId(f"{batch.batch_id}-{row.line}"),
                ids,
                seeded(row, 0),
                salt=salt,
                public_tokens=self._filler.public_tokens(self._find_app(call), ids),
                priority=PRIORITY + max(-PRIORITY // 2, min(call.priority, PRIORITY)),
                rendering=call.rendering(ids, self._engine.tokenizer),
            )
            num_failed = 0
            while num_failed < MAX_TRIES:
                await self._engine.running()  # waits without a limit
                try:
                    if row.choices:
                        return await self._score(row, request, batch.owner)
                    return await self._answer(row, request, batch.owner)
                except FormFault as fault:
                    raise WireError("form_limit_reached", str(fault), "response_format") from None
                except RequestFault as fault:
                    raise WireError("engine_failed", str(fault)) from None
                except (EngineAsleep, WeightsLost, AbortFault):
                    pass  # the row is not at fault, and waits without a limit
                except EngineFault:
                    num_failed += 1
                await asyncio.sleep(RETRY_S)
        except InvalidRequest as error:
            raise from_invalid(error) from None
        raise WireError("engine_failed", f"the engine failed {MAX_TRIES} times on this row")

    async def _score(self, row: Row, request: Request, owner: str) -> Json:
        """Score the choices of a row; their context is the prompt of `request`."""
        scoring = ContextScoring(request.prompt_ids.tolist(), row.choices)
        requests = [
            replace(
                request,
                request_id=RequestId(f"{request.request_id}.{place}"),
                prompt_ids=np.array(ids, np.int32),
                scoring=asked,
            )
            for place, (ids, asked) in enumerate(scoring.prompts())
        ]
        answering = await self._engine.submit(requests, owner)
        try:
            async for news in answering:
                for place, output in news:
                    scoring.take(place, output)
        finally:
            self._engine.abandon(answering)
            for opened in answering.requests:
                self._metrics.observe_ended(opened)
        return score_row(row, scoring.result(), self._name(row), int(time()))

    async def _answer(self, row: Row, request: Request, owner: str) -> Json:
        answers = PromptAnswers(len(request.prompt_ids), request.sampling)
        answering = await self._engine.submit([request], owner)
        try:
            async for news in answering:
                for _, output in news:
                    if output.finish_reason is FinishReason.ABORT:
                        raise AbortFault
                    answers.add(output)
        finally:
            self._engine.abandon(answering)
            if answers.is_finished:
                self._metrics.observe_ended(answering.requests[0])
        return answer_row(row, answers, self._name(row), self._engine.tokenizer, int(time()))

    def _find_app(self, call: Call) -> App | None:
        return self._filler.apps.resolve(call, self._model.names)[1]

    def _name(self, row: Row) -> str:
        """The model's name, as in the row."""
        return row.call.model or self._model.names[0]


class _BatchRun:
    """A running batch: its open rows and its counts."""

    def __init__(self, runner: BatchRunner, batch: Batch, tenant: Tenant, out: AnswerFile) -> None:
        self._runner = runner
        self._batch = batch
        self._tenant = tenant
        self._out = out

    def note_done(self) -> None:
        """Count the rows that are in the file already, from an earlier process or attempt."""
        done = self._out.done
        self._count(completed=done.num_answered, failed=done.num_failed)

    async def answer_all(self, source: InputFile, room_bytes: int) -> BatchStatus:
        """Answer every row that is left; returns how the batch ended: completed, out of time or out
        of room."""
        windows = self._runner.reader(self._tenant, source, self._out)
        async with asyncio.TaskGroup() as group:
            while (planned := await asyncio.to_thread(next, windows, None)) is not None:
                window = planned.window
                self._count(total=max(self._batch.total, window.num_rows_read))
                for failure in window.failures:
                    if self._num_bytes >= room_bytes:
                        return BatchStatus.FAILED
                    self._fail(failure)
                    # let other tasks run: there may be many thousands of rows
                    await asyncio.sleep(0)
                for index in _in_order(planned):
                    while not self._runner.may_start():
                        await asyncio.sleep(LOOK_S)
                    if time() > self._batch.times["expires_at"]:
                        return BatchStatus.EXPIRED
                    if self._num_bytes >= room_bytes:
                        return BatchStatus.FAILED
                    self._runner.note_row(1)
                    task = group.create_task(
                        self._answer(window.rows[index], window.prompts[index])
                    )
                    task.add_done_callback(lambda _: self._runner.note_row(-1))
        return BatchStatus.COMPLETED

    @property
    def _num_bytes(self) -> int:
        """Bytes written so far, including those of earlier processes."""
        return os.stat(self._out.name).st_size

    async def _answer(self, row: Row, ids: Int32s) -> None:
        try:
            salt = self._tenant.page_salt(row.call.cache_salt)
            line = await self._runner.answer(self._batch, row, ids, salt)
        except WireError as error:
            self._fail(Failure(row.line, row.custom_id, error))
        else:
            self._out.append(line)
            self._count(completed=self._batch.completed + 1)

    def _fail(self, failure: Failure) -> None:
        self._out.append(error_row(failure.line, failure.custom_id, failure.error))
        self._count(failed=self._batch.failed + 1)

    def _count(self, **counts: int) -> None:
        self._batch = replace(self._batch, **counts)  # type: ignore[arg-type]  # its own fields
        self._runner.note(self._batch)


def _first(error: Exception) -> Exception:
    """Return the error that ended a group of tasks."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _disk_fault(error: Exception) -> OSError | None:
    """Return the operating system's error behind an error of a file; a retry may succeed."""
    is_of_file = isinstance(error, FileFault | InvalidRequest)
    root = error.__context__ if is_of_file else error
    return root if isinstance(root, OSError) else None


def _in_order(planned: PlannedWindow) -> Iterator[int]:
    """Yield the indices of a window's rows in the order to run: rows that share a prefix are
    neighbours."""
    for stretch in planned.stretches(LengthEstimate()):
        yield from stretch.row_indices.tolist()
