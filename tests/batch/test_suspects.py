"""Workers that die: only the row that makes them die fails, however many rows they had."""

import asyncio
import json
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mainstem.batch.bundles import Task
from mainstem.batch.driver import Desk
from mainstem.batch.suspects import MOST_DEATHS_ALONE, OTHERS_FIRST_S, Suspects, is_at_fault
from mainstem.cli import batch as cli
from tests.batch.test_workers import answer, write

NUM_RUNNING = 16


class MortalWorker:
    """Answers NUM_RUNNING rows at a time, and dies if a bad row is among them, or in every n-th
    round."""

    def __init__(self, name: str, bad: Collection[str] = (), dies_every: int = sys.maxsize) -> None:
        self.name = name
        self._bad, self._dies_every = set(bad), dies_every
        self._num_rounds = self.num_deaths = 0

    async def work(self, desk: Desk) -> None:
        held: list[Task] = []
        try:
            while True:
                await asyncio.sleep(0.001)
                held += desk.take(not held)
                running, held[:] = held[:NUM_RUNNING], held[NUM_RUNNING:]
                self._num_rounds += bool(running)
                has_bad = not self._bad.isdisjoint(task.row.custom_id for task in running)
                if running and (has_bad or self._num_rounds % self._dies_every == 0):
                    self.num_deaths += 1
                    desk.lose(running, "killed")
                    desk.give_back(held)
                    held.clear()
                    continue
                for task in running:
                    desk.answer(task, {"choices": [{"text": "yes"}]})
        finally:
            desk.give_back(held)


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Sequence[MortalWorker],
    num_rows: int = 200,
) -> tuple[int, dict[str, str | None]]:
    """The job's status, and the code of each row's error."""

    @contextmanager
    def open_team(*_: Any) -> Iterator[Sequence[MortalWorker]]:
        yield workers

    monkeypatch.setattr(cli, "open_team", open_team)
    lines = [{"custom_id": f"row {n}", "prompt": f"question {n}"} for n in range(num_rows)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    status = answer(source, output, "--workers", "http://none", "--overwrite")
    found = [json.loads(line) for line in output.read_text().splitlines()]
    codes = {row["custom_id"]: row["error"] and row["error"]["code"] for row in found}
    assert len(codes) == len(found), "a row was written twice"
    return status, codes


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_bad", [1, 3])
def test_only_rows_that_kill_their_worker_alone_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_bad: int
) -> None:
    bad = {f"row {n}" for n in random.Random(num_bad).sample(range(200), num_bad)}
    workers = [MortalWorker(f"worker {n}", bad) for n in range(num_workers)]
    status, codes = run(tmp_path, monkeypatch, workers)
    assert status == 1
    assert len(codes) == 200
    assert {name for name, code in codes.items() if code is not None} == bad
    # by halves from NUM_RUNNING rows to one
    assert sum(worker.num_deaths for worker in workers) <= num_bad * (1 + 4 + MOST_DEATHS_ALONE)


@pytest.mark.parametrize("dies_every", [2, 3, 5])
def test_deaths_by_chance_fail_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_every: int
) -> None:
    workers = [MortalWorker(f"worker {n}", dies_every=dies_every + n) for n in range(2)]
    status, codes = run(tmp_path, monkeypatch, workers)
    assert sum(worker.num_deaths for worker in workers) >= 2
    assert status == 0
    assert list(codes.values()) == [None] * 200


def test_a_worker_that_always_dies_is_no_longer_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = MortalWorker("broken", dies_every=1)
    status, codes = run(tmp_path, monkeypatch, [broken, MortalWorker("good")])
    assert broken.num_deaths > 0
    assert (status, set(codes.values())) == (0, {None}), "the other worker answers all rows"
    run(tmp_path, monkeypatch, [broken])
    assert "broken is no longer used: it died 20 times without an answer" in capsys.readouterr().err


def a_task(line: int) -> Task:
    return Task(*(None,) * 3, line)  # type: ignore[arg-type]  # the task is not run


def test_a_row_that_a_worker_died_of_is_tried_by_another_worker() -> None:
    suspects, task = Suspects(), a_task(1)
    suspects.add([task])
    assert suspects.take(0, is_only=False) == [task]
    assert not is_at_fault(task, 0)
    suspects.add([task])
    assert not suspects.take(0, is_only=False)
    assert suspects.take(1, is_only=False) == [task]
    suspects.add_untried([task])
    assert suspects.take(0, is_only=True) == [task], "no other worker is left"
    assert not suspects


def test_a_row_does_not_wait_for_another_worker_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may exist and never ask: a server that is down, an actor that never starts."""
    suspects, task, now_s = Suspects(), a_task(1), [100.0]
    monkeypatch.setattr("mainstem.batch.suspects.monotonic", lambda: now_s[0])
    assert not is_at_fault(task, 0)
    suspects.add([task])
    now_s[0] += OTHERS_FIRST_S - 0.1
    assert not suspects.take(0, is_only=False)
    now_s[0] += 0.2
    assert suspects.take(0, is_only=False) == [task]
