"""How long files and ended batches are kept, and what is never removed."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pytest

from mainstem.core.json import AnyJson
from mainstem.server.http.limits import ServerLimits
from mainstem.server.kept import pruning
from mainstem.server.kept.batch_store import Batch, BatchStatus, BatchStore
from mainstem.server.kept.file_store import FileStore
from mainstem.server.kept.pruning import Pruner
from tests.server.apis.test_batch_faults import hold_at_some_answers, num_answered
from tests.server.apis.test_batches import ENDED, a_client, a_row, answers, lines, run
from tests.server.running import Running, a_server
from tests.waiting import until

TTL_S = ServerLimits().file_ttl_s
LONG_AGO = int(time() - TTL_S - 100)


def prune(running: Running) -> None:
    assert running.gateway.batches is not None
    running.on_loop(running.gateway.batches.pruner.prune())


def age_files(folder: Path) -> None:
    """Set the times of every file to long ago."""
    for path in folder.glob("files/*/file-*.json"):
        aged = path.with_suffix(".aged")  # the server may be reading it
        aged.write_text(json.dumps(json.loads(path.read_text()) | {"created": LONG_AGO}))
        aged.rename(path)


def age_batches(folder: Path) -> None:
    for path in folder.glob("batches/*/batch_*.json"):
        record = json.loads(path.read_text())
        record["times"] = dict.fromkeys(record["times"], LONG_AGO)
        path.write_text(json.dumps(record))


def upload(running: Running, data: bytes = b"{}\n") -> AnyJson:
    form: dict[str, Any] = {"files": {"file": ("in", data)}, "data": {"purpose": "batch"}}
    made: AnyJson = running.client.post("/v1/files", **form).json()
    return made


def create(running: Running, file_id: str) -> Any:
    body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file_id}
    return running.post("/v1/batches", body)


def test_expired_files_and_batches_are_removed_and_others_stay(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        run(client, [a_row("old", "x"), a_row("bad", "x", n=0)])
    assert len(list(tmp_path.glob("files/*/*"))) == 6, "input, output and errors"
    age_files(tmp_path)
    age_batches(tmp_path)
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        until(lambda: not list(tmp_path.glob("files/*/*")))
        assert list(tmp_path.glob("batches/*/*")) == []
        assert client.batches.list().data == []
        young = run(client, [a_row("young", "x")])
        prune(running)
        assert [batch.id for batch in client.batches.list()] == [young.id]
        assert set(answers(client, young.output_file_id)) == {"young"}


def test_old_files_are_removed_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "PRUNE_S", 0.05)
    with a_server(data_dir=tmp_path) as running:
        for _ in range(2):
            upload(running)
            age_files(tmp_path)
            until(lambda: running.get("/v1/files").json()["data"] == [])


def test_a_file_reports_when_it_expires(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path, limits=ServerLimits(file_ttl_s=500.5)) as running:
        made = upload(running)
        assert made["expires_at"] == made["created_at"] + 500
        assert running.get(f"/v1/files/{made['id']}").json() == made
        assert running.get("/v1/files").json()["data"] == [made]


def test_the_file_of_a_running_batch_is_kept_however_old(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        hold = running.hold_after(1)
        made = upload(running, lines([a_row(f"r{n}", f"row {n}") for n in range(40)]))
        first, queued = (create(running, made["id"]).json()["id"] for _ in range(2))
        until(lambda: client.batches.retrieve(first).status == "in_progress")
        age_files(tmp_path)
        prune(running)
        hold.release()
        for batch_id in (first, queued):
            until(lambda: client.batches.retrieve(batch_id).status in ENDED)  # noqa: B023
            batch = client.batches.retrieve(batch_id)
            assert batch.status == "completed"
            assert len(answers(client, batch.output_file_id)) == 40
        prune(running)
        assert running.get(f"/v1/files/{made['id']}").status_code == 404


def test_a_batch_of_an_expired_file_is_refused(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path) as running:
        made = upload(running)
        age_files(tmp_path)
        refused = create(running, made["id"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_expired")


def a_batch(shelf: BatchStore, status: BatchStatus) -> Batch:
    made = shelf.create("owner", "/v1/completions", "file-" + "0" * 24)
    old = replace(made, times=dict.fromkeys(made.times, LONG_AGO))
    moved = old.moved(status)
    shelf.put(moved)
    return moved


def test_the_time_to_live_of_a_batch_counts_from_its_end(tmp_path: Path) -> None:
    """The batch was made long ago but has just ended, so no client can have read its answers
    before."""
    batches = BatchStore(tmp_path / "batches")
    batch = a_batch(batches, BatchStatus.EXPIRED)
    asyncio.run(Pruner(FileStore(tmp_path / "files"), batches, TTL_S).prune())
    assert batches.find("owner", batch.batch_id) == batch


def test_files_of_a_batch_are_kept_if_its_server_was_killed_at_its_end(tmp_path: Path) -> None:
    """The server was down for a long time: the files are old, and the batch has not recorded them
    yet."""
    files, batches = FileStore(tmp_path / "files"), BatchStore(tmp_path / "batches")
    batch = a_batch(batches, BatchStatus.FINALIZING)
    with files.writing("owner", batch.answer_names[0]) as (file_id, path):
        path.write_bytes(b"{}\n")
        files.put("owner", file_id, "f", "batch_output")
    age_files(tmp_path)
    pruner = Pruner(files, batches, TTL_S)
    asyncio.run(pruner.prune())
    assert files.find("owner", file_id) is not None
    batches.put(batch.moved(BatchStatus.COMPLETED))
    asyncio.run(pruner.prune())
    assert files.find("owner", file_id) is None


def test_if_there_are_too_many_batches_those_without_files_are_removed_first(
    tmp_path: Path,
) -> None:
    with (
        a_server(data_dir=tmp_path, limits=ServerLimits(kept_batches=3)) as running,
        a_client(running) as client,
    ):
        rows = [a_row("a", "x")]
        kept = [run(client, rows) for _ in range(3)]
        refused = create(running, kept[0].input_file_id)
        assert refused.status_code == 413
        assert "this key may have at most 3 batches" in refused.json()["error"]["message"]
        client.files.delete(str(kept[1].output_file_id))
        latest = run(client, rows)
        assert [batch.id for batch in client.batches.list()] == [latest.id, kept[2].id, kept[0].id]
        assert set(answers(client, kept[0].output_file_id)) == {"a"}


def test_a_batch_that_fails_keeps_its_answers(tmp_path: Path) -> None:
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        hold_at_some_answers(running)
        rows = [a_row(f"r{n}", f"row {n}", max_tokens=3 + n) for n in range(60)]
        made = upload(running, lines(rows))
        batch_id = create(running, made["id"]).json()["id"]
        until(lambda: num_answered(running, batch_id) > 5)
        client.files.delete(made["id"])  # the batch notices after a restart
    with a_server(data_dir=tmp_path) as running, a_client(running) as client:
        until(lambda: client.batches.retrieve(batch_id).status in ENDED)
        batch = client.batches.retrieve(batch_id)
        assert batch.status == "failed"
        assert "the file was removed" in str(batch.errors)
        assert len(answers(client, batch.output_file_id)) > 5
        assert not list(tmp_path.glob("batches/*/*.work.jsonl"))


def test_a_batch_with_damaged_answers_fails_and_expires_like_others(tmp_path: Path) -> None:
    batches = BatchStore(tmp_path / "batches")
    with a_server(data_dir=tmp_path) as running:
        made = upload(running)
    (owner,) = (path.name for path in (tmp_path / "files").iterdir())
    batch = batches.create(owner, "/v1/completions", made["id"])
    batches.work_path(batch).write_bytes(b"damaged\n")
    with a_server(data_dir=tmp_path) as running:
        url = f"/v1/batches/{batch.batch_id}"
        until(lambda: running.get(url).json()["status"] == "failed")
    age_batches(tmp_path)
    with a_server(data_dir=tmp_path):
        until(lambda: not list(tmp_path.glob("batches/*/*")))
