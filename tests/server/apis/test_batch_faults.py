"""Batches on a disk that fails, or with files that a kill has cut: no answer is lost."""

import asyncio
import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
from openai import OpenAI

from mainstem.core.files import write_whole
from mainstem.server import batch_runner
from mainstem.server.kept import batch_results, batch_store
from mainstem.server.kept.batch_store import Batch, BatchStatus, BatchStore
from mainstem.server.kept.file_store import FileStore
from tests.server.apis.test_batches import ENDED, a_client, a_row, answers, lines
from tests.server.running import Hold, Running, a_server
from tests.waiting import LIMIT_S, until

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """A disk that refuses some kinds of writes while a test says so, and counts refusals."""

    def __init__(self) -> None:
        self.refuses: tuple[str, ...] = ()
        self.num_refused = 0

    def check(self, kind: str) -> None:
        if kind in self.refuses:
            self.num_refused += 1
            raise FULL

    @contextmanager
    def full(self, *kinds: str) -> Iterator[None]:
        self.refuses = kinds
        yield
        until(lambda: self.num_refused > 0)
        self.refuses = ()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    put = FileStore.put

    class Checked(io.FileIO):
        def write(self, data: Any, /) -> int:
            disk.check("answer")
            return super().write(data)

    def checked_put(shelf: FileStore, owner: str, *names: Any) -> object:
        disk.check("file")
        return put(shelf, owner, *names)

    def checked_write(path: Path, data: bytes) -> None:
        disk.check("state")
        write_whole(path, data)

    monkeypatch.setattr(io, "FileIO", Checked)  # the call that appends answers
    monkeypatch.setattr(FileStore, "put", checked_put)
    monkeypatch.setattr(batch_store, "write_whole", checked_write)
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.05)
    return disk


def begin(client: OpenAI, num_rows: int) -> str:
    rows = [a_row(f"r{n}", f"row {n}", max_tokens=3 + n) for n in range(num_rows)]
    made = client.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    return client.batches.create(
        input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def num_answered(running: Running, batch_id: str) -> int:
    return int(running.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"])


def hold_at_some_answers(running: Running) -> Hold:
    """Most rows of the batches that begin are not answered before the hold's release."""
    return running.hold_when(lambda: len(running.engines.finished) > 5)


@pytest.mark.parametrize("kind", ["answer", "file", "state"])
def test_a_batch_continues_after_a_full_disk(tmp_path: Path, disk: Disk, kind: str) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        hold = hold_at_some_answers(running)
        batch_id = begin(client, 30)
        until(lambda: num_answered(running, batch_id) > 5)
        with disk.full(kind):
            hold.release()
        until(lambda: client.batches.retrieve(batch_id).status in ENDED)
        batch = client.batches.retrieve(batch_id)
        assert batch.status == "completed"
        assert len(answers(client, batch.output_file_id)) == 30
        running.settle()


def test_writes_to_a_full_disk_are_tried_less_and_less_often(tmp_path: Path, disk: Disk) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        batch_id = begin(client, 10)
        with disk.full("answer", "state"):
            sleep(1.0)
            assert disk.num_refused < 20, "pauses of 0.05 s, 0.1 s, 0.2 s, ...: five tries"
            assert client.batches.retrieve(batch_id).status in ("validating", "in_progress")
            cancelled = running.post(f"/v1/batches/{batch_id}/cancel", {})
            assert cancelled.json()["status"] == "cancelling"  # in memory, until it can be stored
        until(lambda: client.batches.retrieve(batch_id).status == "cancelled")


def test_files_that_do_not_fit_on_a_full_disk_are_refused(tmp_path: Path, disk: Disk) -> None:
    rows: dict[str, Any] = {
        "files": {"file": ("in", lines([a_row("a", "x")]))},
        "data": {"purpose": "batch"},
    }
    with a_server(data_dir=tmp_path) as running:
        stored = running.client.post("/v1/files", **rows).json()
        body = {
            "input_file_id": stored["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        with disk.full("file", "state"):
            for reply in (
                running.client.post("/v1/files", **rows),
                running.post("/v1/batches", body),
            ):
                assert reply.status_code == 507
                assert "No space left" in reply.json()["error"]["message"]
        assert running.get("/v1/batches").json()["data"] == []
        assert len(running.get("/v1/files").json()["data"]) == 1
        assert running.client.post("/v1/files", **rows).status_code == 200


def test_a_batch_ends_although_a_kill_came_before_its_end_was_recorded(tmp_path: Path) -> None:
    """Every row is answered and the batch's files exist; only the batch's state is old."""
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        batch_id = begin(client, 20)
        until(lambda: client.batches.retrieve(batch_id).status in ENDED)
        said = answers(client, client.batches.retrieve(batch_id).output_file_id)
    shelf = BatchStore(tmp_path / "batches")
    (batch,) = shelf._batches.values()
    output = FileStore(tmp_path / "files").path(batch.owner, str(batch.output_file_id))
    shelf.work_path(batch).write_bytes(output.read_bytes())
    shelf.put(replace(batch, status=BatchStatus.IN_PROGRESS, output_file_id=None, total=0))
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        until(lambda: client.batches.retrieve(batch_id).status in ENDED)
        ended = client.batches.retrieve(batch_id)
        assert ended.status == "completed"
        assert ended.request_counts is not None
        assert (ended.request_counts.total, ended.request_counts.completed) == (20, 20)
        assert answers(client, ended.output_file_id) == said


def test_a_cancelled_batch_with_an_incomplete_line_keeps_its_answers(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        hold_at_some_answers(running)
        batch_id = begin(client, 40)
        until(lambda: num_answered(running, batch_id) > 5)
    shelf = BatchStore(tmp_path / "batches")
    (batch,) = shelf.opened()
    shelf.put(batch.moved(BatchStatus.CANCELLING))
    work = shelf.work_path(batch)
    whole = work.read_bytes()
    work.write_bytes(whole + whole[:40])  # a kill may leave such a line
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        until(lambda: client.batches.retrieve(batch_id).status in ENDED)
        ended = client.batches.retrieve(batch_id)
        assert ended.status == "cancelled"
        assert len(answers(client, ended.output_file_id)) == whole.count(b"\n")


def test_a_write_that_fails_or_is_killed_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise FULL

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "state.json", b"{}")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "owner").mkdir()
    for shelf in (FileStore, BatchStore):
        (tmp_path / "owner" / "state.json.0123abcd.fresh").touch()
        shelf(tmp_path)
        assert list(tmp_path.glob("*/*")) == []


def test_batches_are_cancelled_on_a_full_disk_whether_they_run_or_wait(
    tmp_path: Path, disk: Disk
) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        hold = hold_at_some_answers(running)
        at_work, queued = begin(client, 60), begin(client, 60)
        until(lambda: num_answered(running, at_work) > 5)
        with disk.full("answer", "file", "state"):
            for batch_id in (queued, at_work):
                for _ in range(2):  # a client that asks again gets the same reply
                    reply = running.post(f"/v1/batches/{batch_id}/cancel", {})
                    assert (reply.status_code, reply.json()["status"]) == (200, "cancelling")
        hold.release()
        for batch_id in (queued, at_work):
            until(lambda: client.batches.retrieve(batch_id).status == "cancelled")  # noqa: B023
        kept = client.batches.retrieve(at_work)
        assert len(answers(client, kept.output_file_id)) > 5
        assert client.batches.retrieve(queued).output_file_id is None
        running.settle()
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        assert [batch.status for batch in client.batches.list()] == ["cancelled", "cancelled"]


def test_a_batch_cancelled_while_its_files_are_made_does_not_make_them_twice_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, at_it, most_at_it = batch_results.write_parts, [], []
    is_cancelled = Event()

    def slow_part(files: FileStore, batch: Batch, work: Path, status: BatchStatus) -> Batch:
        at_it.append(batch.batch_id)
        most_at_it.append(len(at_it))
        assert is_cancelled.wait(LIMIT_S)
        made = part(files, batch, work, status)
        at_it.remove(batch.batch_id)
        return made

    monkeypatch.setattr(batch_results, "write_parts", slow_part)
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        batch_id = begin(client, 3)
        until(lambda: bool(at_it))
        client.batches.cancel(batch_id)
        running.on_loop(asyncio.sleep(0.1))  # for a second attempt that does not wait
        is_cancelled.set()
        until(lambda: client.batches.retrieve(batch_id).status in ENDED)
        ended = client.batches.retrieve(batch_id)
        assert ended.status == "cancelled"
        assert len(answers(client, ended.output_file_id)) == 3
    assert most_at_it == [1, 1]
