"""Ray actors that answer the rows of a batch job, each with an engine in its process.

    driver: RayWorker --take(lines)--> EngineActor: queue -> windows -> BatchJob -> queue
                      <--finished()---                                         rows

An actor runs one BatchJob for its whole life. It takes the next bundle while rows of the last
bundle are still running, so that its engine does not wait for rows.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, Queue
from secrets import token_hex
from threading import Thread
from time import monotonic
from typing import Any

from mainstem.batch.ahead import Ahead
from mainstem.batch.bar import JobBar
from mainstem.batch.bundles import Task
from mainstem.batch.done import ENGINE_FAILED, Done
from mainstem.batch.driver import POLL_S, Desk, WorkerLost
from mainstem.batch.files import Line
from mainstem.batch.job import BatchJob, JobConfig
from mainstem.batch.ordering import PlannedWindow, WindowPlanner
from mainstem.batch.summary import Summary
from mainstem.batch.windows import RowReader, WindowReader
from mainstem.core.config import Device, EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.words import last_line
from mainstem.plan.planner import PlanConfig
from mainstem.text.encoding import App
from mainstem.text.parsers.formats import find_formats
from mainstem.text.text_engine import TextEngine
from mainstem.wire.calls import Call
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError

LOCAL = "local"
WAIT_S = 0.2  # longest wait for finished rows
RETRY_S = 0.5
PATIENCE_S = 600.0  # limit for the restart of an actor, which includes loading its model


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Settings of an actor; they are pickled."""

    config: EngineConfig
    defaults: Mapping[str, object]  # for fields that a row leaves out
    seed: int
    find_app: Callable[[Call], App | None]
    open_engine: Callable[[EngineConfig], TextEngine]
    parsers: tuple[str, str]  # of tool calls and of reasoning, by name


class _Lines:
    """The lines of a bundle, in the form of an input file."""

    progress = None

    def __init__(self, lines: Sequence[tuple[int, bytes | None]]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[Line]:
        for number, data in self._lines:
            yield Line(number, data)


@dataclass(frozen=True, slots=True)
class Progress:
    """What an actor reports."""

    rows: list[Mapping[str, object]]  # finished since the last report
    started: list[int]  # lines that its engine has now
    wants_more: bool


class EngineActor:
    """Answers bundles of lines; a Ray actor is made of it."""

    def __init__(self, settings: ActorSettings) -> None:
        engine = settings.open_engine(settings.config)
        tokenizer = engine.tokenizer
        formats = find_formats(tokenizer, *settings.parsers)
        parser = CallParser(settings.defaults, find_formats=lambda: formats)
        limit = engine.engine.max_model_len
        self._rows = RowReader(parser, lambda: tokenizer, settings.find_app, limit)
        self._planner = WindowPlanner(PlanConfig(), has_dedupe=False)
        self._asked: Queue[Sequence[tuple[int, bytes | None]]] = Queue()
        self._answered: Queue[Mapping[str, object]] = Queue()
        self._fault: BaseException | None = None
        name = settings.config.model.model
        summary = Summary("", "", name)
        bar = JobBar(summary, str, is_shown=False)
        job_config = JobConfig(name, settings.seed)
        self._job = BatchJob(engine, self, job_config, summary, lambda: False, bar)
        Thread(target=self._run, name="job", daemon=True).start()

    def take(self, lines: Sequence[tuple[int, bytes | None]]) -> None:
        """Take lines to answer, each with its number in the input."""
        self._asked.put(lines)

    def finished(self, wait_s: float) -> Progress:
        """Return what was done since the last call."""
        rows: list[Mapping[str, object]] = []
        try:
            rows.append(self._answered.get(timeout=wait_s))
            while True:
                rows.append(self._answered.get_nowait())
        except Empty:
            if self._fault is not None and not rows:
                raise RuntimeError(f"the engine failed: {self._fault}") from None
        return Progress(rows, self._job.started_lines, self._asked.empty())

    def append(self, row: Mapping[str, object]) -> None:
        """Called by the job with a finished row."""
        self._answered.put(row)

    def _run(self) -> None:
        try:
            self._job.run(Ahead(self._windows()))
        except BaseException as error:  # `finished` reports it
            self._fault = error

    def _windows(self) -> Iterator[PlannedWindow]:
        while True:
            lines = _Lines(self._asked.get())
            for window in WindowReader(lines, self._rows, Done(), sys.maxsize):
                yield self._planner.plan(window)


class RayWorker:
    """An EngineActor as the driver of a job sees it."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self.name = name
        self._open: dict[str, Task] = {}  # by custom_id
        self._started: set[int] = set()  # lines that the engine had at the last report

    async def work(self, desk: Desk) -> None:
        """See Worker."""
        from ray import exceptions  # noqa: PLC0415  # an extra

        last_s = monotonic()
        try:
            while True:
                try:
                    await self._step(desk)
                    last_s = monotonic()
                except exceptions.ActorDiedError as error:
                    raise WorkerLost(last_line(error)) from None
                except (exceptions.RayActorError, exceptions.RayTaskError) as error:
                    self._lose(desk, last_line(error))
                    if monotonic() - last_s > PATIENCE_S:
                        raise WorkerLost(f"no answer for {PATIENCE_S:.0f} s") from None
                    if isinstance(error, exceptions.RayTaskError):
                        self._restart()
                    await asyncio.sleep(RETRY_S)
        finally:
            desk.give_back(self._leave())

    async def _step(self, desk: Desk) -> None:
        found: Progress = await self._actor.finished.remote(WAIT_S if self._open else 0.0)
        for row in found.rows:
            self._settle(desk, row)
        self._started = set(found.started)
        if not found.wants_more:
            return
        tasks = desk.take(not self._open)
        if tasks:
            self._open |= {task.row.custom_id: task for task in tasks}
            await self._actor.take.remote([(task.line.number, task.line.data) for task in tasks])
        elif not self._open:
            await asyncio.sleep(POLL_S)

    def _settle(self, desk: Desk, row: Mapping[str, Any]) -> None:
        task = self._open.pop(row["custom_id"], None)
        if task is None:
            return  # the row was given back before its answer arrived
        if row["error"] is None:
            desk.answer(task, row["response"]["body"])
            return
        error = WireError(*(row["error"][name] for name in ("code", "message", "param")))
        if error.code == ENGINE_FAILED:
            desk.retry(task, error.message)
        else:
            desk.fail(task, error)

    def _lose(self, desk: Desk, reason: str) -> None:
        """Give back all rows. Only those that had started may have been the reason, or all of them
        if the actor died before it reported any."""
        held = list(self._open.values())
        started = [task for task in held if task.line.number in self._started] or held
        for task in started:
            del self._open[task.row.custom_id]
        self._started.clear()
        desk.lose(started, reason)
        desk.give_back(self._leave())

    def _restart(self) -> None:
        import ray  # noqa: PLC0415  # an extra

        ray.kill(self._actor, no_restart=False)

    def _leave(self) -> list[Task]:
        tasks = list(self._open.values())
        self._open.clear()
        return tasks


@contextmanager
def ray_workers(
    address: str, num_workers: int | None, settings: ActorSettings
) -> Iterator[Sequence[RayWorker]]:
    """Start actors in the cluster at `address`. For LOCAL, this is a new cluster on this machine,
    which ends with the actors.

    Without `num_workers`, there are as many actors as the cluster has GPUs for, and at least one.
    """
    if address == LOCAL:
        # listen on 127.0.0.1 only; must be set before Ray is imported, on Linux, too
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))  # else it is written to ~/.ray
    try:
        import ray  # noqa: PLC0415  # an extra
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'mainstem[ray]'") from None
    here = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", **here)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"--ray: cannot connect to {address} ({error})") from None
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if settings.config.model.device is Device.CPU:
            num_gpus = 0
        num_ranks = settings.config.model.tensor_parallel
        count = num_workers or max(1, num_gpus // num_ranks)
        resources = {"num_gpus" if num_gpus else "num_cpus": num_ranks}
        actor = ray.remote(EngineActor).options(max_restarts=-1, max_concurrency=2, **resources)
        yield [RayWorker(actor.remote(settings), f"actor {place}") for place in range(count)]
    finally:
        ray.shutdown()
