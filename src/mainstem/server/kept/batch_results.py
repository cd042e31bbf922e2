"""Makes the files that a client fetches from the answers of a batch that has ended.

OpenAI's API      one file of answers, one of errors
Anthropic's API   one file of results, with a line for each request, answered or not
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from mainstem.batch.idset import IdSet
from mainstem.core.json import AnyJson, Json
from mainstem.server.kept.batch_store import Batch, BatchStatus
from mainstem.server.kept.file_store import HIDDEN, FileStore
from mainstem.wire.errors import WireError
from mainstem.wire.messages.batches import errored_line, left_line, result_line


async def make_results(files: FileStore, batch: Batch, work: Path, status: BatchStatus) -> Batch:
    """Write the files of a batch that ends with this status; returns the batch with their ids. The
    thread that writes cannot be stopped: a cancelled caller still waits for it, so that no second
    thread writes the same files.
    """
    write = _write_results if batch.is_of_messages else write_parts
    writing = asyncio.ensure_future(asyncio.to_thread(write, files, batch, work, status))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.gather(writing, return_exceptions=True)
        raise


def write_parts(files: FileStore, batch: Batch, work: Path, _: BatchStatus) -> Batch:
    """Write the files of answers and of errors; an empty one is left out. Runs on a thread."""
    if not work.exists():
        return batch
    ids: list[str | None] = []
    for is_wanted, name in zip((True, False), batch.answer_names, strict=True):
        with files.writing(batch.owner, name) as (file_id, path):
            num_lines = 0
            with path.open("wb") as target:
                for line in _whole_lines(work):
                    is_answer = json.loads(line)["response"] is not None
                    if is_answer is is_wanted:
                        target.write(line)
                        num_lines += 1
            if num_lines:
                filename = f"{name.replace(' ', '_')}.jsonl"
                files.put(batch.owner, file_id, filename, "batch_output", batch.output_ttl_s)
            ids.append(file_id if num_lines else None)
    return replace(batch, output_file_id=ids[0], error_file_id=ids[1])


def _write_results(files: FileStore, batch: Batch, work: Path, status: BatchStatus) -> Batch:
    """Write one result for each request. Runs on a thread."""
    name = batch.answer_names[0]
    seen, num_answered, num_failed, num_left = IdSet(), 0, 0, 0
    with files.writing(batch.owner, name) as (file_id, path):
        with path.open("wb") as target:
            for line in _whole_lines(work):
                row: AnyJson = json.loads(line)
                is_answer = row["response"] is not None
                num_answered, num_failed = num_answered + is_answer, num_failed + (not is_answer)
                seen.add(row["custom_id"])
                _put_line(target, result_line(row))
            for custom_id in _asked(files, batch):
                if custom_id not in seen:
                    num_left += 1
                    _put_line(target, _left(batch, custom_id, status))
        files.put(batch.owner, file_id, f"{batch.batch_id}_results.jsonl", HIDDEN)
    if status not in _LEFT:
        num_failed += num_left
    return replace(
        batch,
        output_file_id=file_id,
        total=num_answered + num_failed + (num_left if status in _LEFT else 0),
        completed=num_answered,
        failed=num_failed,
    )


_LEFT = (BatchStatus.CANCELLED, BatchStatus.EXPIRED)  # other batches answer all that is asked


def _left(batch: Batch, custom_id: str, status: BatchStatus) -> Json:
    """The result of a request that was not answered."""
    if status in _LEFT:
        return left_line(custom_id, "canceled" if status is BatchStatus.CANCELLED else "expired")
    reason = batch.fault or "it was not answered"
    return errored_line(custom_id, WireError("batch_failed", f"the batch failed: {reason}"))


def _asked(files: FileStore, batch: Batch) -> Iterator[str]:
    """Yield the ids of all requests, if the file with them is still there."""
    path = files.path(batch.owner, batch.input_file_id)
    if path.exists():
        for line in _whole_lines(path):
            yield json.loads(line)["custom_id"]


def _put_line(target: BinaryIO, line: Json) -> None:
    target.write(msgspec.json.encode(line) + b"\n")


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; the last one is left out if the process was killed within it."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line
