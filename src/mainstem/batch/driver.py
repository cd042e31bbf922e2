"""A job for many workers: the driver reads, plans, cuts and writes; workers pull bundles.

    input -> windows -> plan -> cut -> Bundles <--take-- worker 0 --rows--> server or actor
                                          ^    <--take-- worker 1
                                          |                 |
                                          +---- give_back --+--answers--> output

If a worker is lost, the rows it has at that moment go to the others. Each row is in one place at a
time, and its answer is written once. Rows that a worker died with are tried apart from the others
(suspects.py).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from mainstem.batch.ahead import Ahead
from mainstem.batch.answer_file import AnswerFile
from mainstem.batch.bar import JobBar
from mainstem.batch.bundles import Bundles, Task, cut_window
from mainstem.batch.done import ENGINE_FAILED
from mainstem.batch.files import FileFault, Line
from mainstem.batch.job import JobConfig, RowWriter
from mainstem.batch.ordering import LengthEstimate, PlannedWindow
from mainstem.batch.rows import Row, served_row
from mainstem.batch.summary import Summary
from mainstem.batch.suspects import Suspects, is_at_fault
from mainstem.batch.windows import RowSource
from mainstem.core.json import JsonView
from mainstem.wire.errors import WireError

POLL_S = 0.02
MOST_FAULTS = 5  # after engines failed on a row this many times, the row becomes an error row
MOST_DEATHS_IN_A_ROW = 20  # of a worker without an answer between them; then it is no longer used


class WorkerLost(Exception):
    """A worker that the job cannot use any more; the message says why."""


class Desk:
    """The interface between a worker and the driver: the worker takes rows and returns answers."""

    def __init__(self, driver: "Driver", worker: int) -> None:
        self._driver = driver
        self._worker = worker
        self._held: dict[int, Task] = {}  # by line
        self._num_deaths = 0  # since the last answer

    def take(self, is_idle: bool) -> Sequence[Task]:
        """Return the next rows of the worker's share; an idle worker steals from others. The list
        is empty if there are none now, or if the worker's rows are tried alone."""
        if any(task.is_suspect for task in self._held.values()):
            return ()
        tasks = self._driver.take(self._worker, is_idle, has_rows=bool(self._held))
        self._held |= {task.row.line: task for task in tasks}
        return tasks

    def check_model(self, name: str) -> None:
        """Raise WorkerLost unless the worker's model has the same name as that of the others."""
        self._driver.check_model(name)

    def say(self, text: str) -> None:
        """Show a line about the worker to the user."""
        self._driver.say(self._worker, text)

    def answer(self, task: Task, body: JsonView) -> None:
        """Record the answer to a row; `body` is OpenAI's completion object."""
        self._drop([task])
        self._num_deaths = 0
        self._driver.answer(task, body)

    def fail(self, task: Task, error: WireError) -> None:
        """Record the error of a row that no worker can answer."""
        self._drop([task])
        self._driver.fail(task, error)

    def give_back(self, tasks: Sequence[Task]) -> None:
        """Put rows back for any worker, without blaming them."""
        self._drop(tasks)
        self._driver.give_back(tasks)

    def retry(self, task: Task, reason: str) -> None:
        """Put back a row that the engine failed on and survived. After MOST_FAULTS times it becomes
        an error row."""
        self._drop([task])
        self._driver.retry(task, reason)

    def lose(self, tasks: Sequence[Task], reason: str) -> None:
        """Put back running rows whose worker died, perhaps because of one of them. Raises
        WorkerLost if it dies again and again."""
        is_alone = len(tasks) == len(self._held) == 1
        self._drop(tasks)
        self._driver.lose(self._worker, tasks, is_alone, reason)
        self._num_deaths += bool(tasks)
        if self._num_deaths >= MOST_DEATHS_IN_A_ROW:
            raise WorkerLost(f"it died {MOST_DEATHS_IN_A_ROW} times without an answer ({reason})")

    def _drop(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            del self._held[task.row.line]


class Worker(Protocol):
    """An engine somewhere that answers rows."""

    @property
    def name(self) -> str: ...

    async def work(self, desk: Desk) -> None:
        """Answer rows until cancelled. Gives its rows back before it raises WorkerLost."""


class KeptLines:
    """An input that keeps its lines, by number, until the driver removes them."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.lines: dict[int, Line] = {}

    def __iter__(self) -> Iterator[Line]:
        for line in self._source:
            self.lines[line.number] = line
            yield line

    @property
    def progress(self) -> float | None:
        return self._source.progress


class Driver:
    """Gives rows to workers and writes their answers."""

    def __init__(
        self,
        workers: Sequence[Worker],
        lines: dict[int, Line],
        out: AnswerFile,
        config: JobConfig,
        summary: Summary,
        bar: JobBar,
    ) -> None:
        self._workers = workers
        self._lines = lines
        self._rows = RowWriter(out, config, summary, bar)
        self._config = config
        self._summary = summary
        self._bar = bar
        self._bundles = Bundles(len(workers))
        self._suspects = Suspects()
        self._num_at_work = len(workers)
        self._estimate = LengthEstimate()
        self._num_open = 0  # tasks whose output lines are not written yet
        self._served_model: str | None = None

    def run(self, windows: Ahead[PlannedWindow], should_stop: Callable[[], bool]) -> None:
        """Run until everything is answered or `should_stop` returns True. Raises FileFault if no
        worker is left. If an error ended `windows` early, raises that error."""
        asyncio.run(self._run(windows, should_stop))

    async def _run(self, windows: Ahead[PlannedWindow], should_stop: Callable[[], bool]) -> None:
        at_work = {
            asyncio.create_task(worker.work(Desk(self, place))): worker
            for place, worker in enumerate(self._workers)
        }
        try:
            while not should_stop():
                self._set_aside(at_work)
                if not self._bundles and not self._suspects:
                    if (window := windows.poll()) is not None:
                        self._take_window(window)
                        continue
                    if windows.is_ended and not self._num_open:
                        self._end(windows)
                        return
                self._bar.show_step()
                await asyncio.sleep(POLL_S)
        finally:
            for task in at_work:
                task.cancel()
            await asyncio.gather(*at_work, return_exceptions=True)

    def _end(self, windows: Ahead[PlannedWindow]) -> None:
        if windows.fault is not None:
            raise windows.fault
        self._summary.is_complete = True

    def _set_aside(self, at_work: dict["asyncio.Task[None]", Worker]) -> None:
        """Report workers that were lost; raises FileFault if no worker is left."""
        for task in [task for task in at_work if task.done()]:
            worker = at_work.pop(task)
            self._num_at_work -= 1
            try:
                task.result()
            except WorkerLost as error:
                self._bar.write(f"mainstem batch: {worker.name} is no longer used: {error}")
        if not at_work:
            raise FileFault("no worker is left; start workers and run the job again with --resume")

    # --- windows in -----------------------------------------------------------------------------

    def _take_window(self, planned: PlannedWindow) -> None:
        window = planned.window
        self._summary.note_window(planned)
        self._bar.show_window(window)
        for failure in window.failures:
            self._rows.refuse(failure)
        count = len(self._workers)
        for worker, bundle in cut_window(planned, self._lines, count, self._estimate):
            self._bundles.add(worker, bundle)
            self._num_open += len(bundle.tasks)
        last = max((row.line for row in window.rows), default=0)
        for number in list(self._lines):  # a copy, since the reading thread adds lines
            if number <= last:
                del self._lines[number]  # the line has failed, or an earlier run answered it

    # --- what workers do ------------------------------------------------------------------------

    def take(self, worker: int, is_idle: bool, has_rows: bool) -> Sequence[Task]:
        """See Desk."""
        if not has_rows and (group := self._suspects.take(worker, self._num_at_work == 1)):
            return group
        bundle = self._bundles.take(worker)
        if bundle is None and is_idle:
            bundle = self._bundles.take_from_others()
        return () if bundle is None else bundle.tasks

    def say(self, worker: int, text: str) -> None:
        """See Desk."""
        self._bar.write(f"mainstem batch: {self._workers[worker].name} {text}")

    def check_model(self, name: str) -> None:
        """See Desk."""
        self._served_model = self._served_model or name
        if name != self._served_model:
            raise WorkerLost(
                f"it serves {name!r}, and the other workers serve {self._served_model!r}"
            )

    def give_back(self, tasks: Sequence[Task]) -> None:
        """See Desk."""
        self._bundles.give_back([task for task in tasks if not task.is_suspect])
        self._suspects.add_untried([task for task in tasks if task.is_suspect])

    def retry(self, task: Task, reason: str) -> None:
        """See Desk."""
        task.num_faults += 1
        if task.num_faults < MOST_FAULTS:
            self.give_back([task])
        else:
            self._give_up(task, f"engines failed on this row {task.num_faults} times", reason)

    def lose(self, worker: int, tasks: Sequence[Task], is_alone: bool, reason: str) -> None:
        """See Desk. `is_alone`: the worker had only this row."""
        if is_alone and is_at_fault(tasks[0], worker):
            times = f"{len(tasks[0].deaths_alone)} workers died that had only this row"
            self._give_up(tasks[0], times, reason)
        else:
            self._suspects.add(tasks)

    def _give_up(self, task: Task, what: str, reason: str) -> None:
        self.fail(task, WireError(ENGINE_FAILED, f"{what}; the last error: {reason}"))

    def answer(self, task: Task, body: JsonView) -> None:
        """See Desk."""
        usage = _usage(body)
        num_answers = task.row.call.sampling.n
        self._count(usage, num_answers)
        self._estimate.observe(task.template, usage["completion_tokens"] // num_answers)
        self._num_open -= 1
        self._write_answer(task.row, body, is_copy=False)
        for row in task.copies:
            self._write_answer(row, body, is_copy=True)

    def fail(self, task: Task, error: WireError) -> None:
        """See Desk."""
        self._num_open -= 1
        self._rows.fail((task.row, *task.copies), error)

    # --- answers out ----------------------------------------------------------------------------

    def _count(self, usage: Mapping[str, int], num_answers: int) -> None:
        counters = self._summary.counters
        prompt, cached = usage["prompt_tokens"], usage["cached_tokens"]
        counters.prompt_tokens += prompt * num_answers
        counters.computed_tokens += prompt - cached
        counters.cached_tokens += prompt * (num_answers - 1) + cached
        counters.generated_tokens += usage["completion_tokens"]
        counters.sequences_finished += num_answers

    def _write_answer(self, row: Row, body: JsonView, is_copy: bool) -> None:
        line = served_row(row, body, self._config.model_name, is_copy)
        self._rows.answer(row, line, _usage(body)["prompt_tokens"], is_copy=is_copy)


def _usage(body: JsonView) -> dict[str, int]:
    """Token counts of an answer; 0 if a server does not report them."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    # a response has other names than a chat
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        "completion_tokens": usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        "cached_tokens": details.get("cached_tokens") or 0,
    }
