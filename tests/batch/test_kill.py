"""kill -9 at random points of a job: no answer is lost or written twice."""

import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.batch import fake_batch
from tests.forked import run_forked

NUM_ROWS = 120
SOME_FAILED = 1  # exit status of a finished job, since the input has bad rows
ROOT = Path(__file__).resolve().parents[2]


def write_input(path: Path, changed: int = NUM_ROWS) -> None:
    """Questions over shared documents, some sampled, some refused, some the same.

    If `changed` is given, every `changed`-th prompt differs from the one written without it.
    """
    rows: list[str] = []
    for index in range(NUM_ROWS):
        row: dict[str, object] = {
            "custom_id": f"row {index}",
            "prompt": f"document {index % 7} and what is in it; question {index % 100}",
            "max_tokens": 4 + index % 9,
            "temperature": index % 2,
            "ignore_eos": True,
        }
        if index % changed == changed - 1:
            row["prompt"] = f"changed {index}"
        if index % 17 == 3:
            row["custom_id"] = "row 0"  # a custom_id that was used before
        if index % 19 == 4:
            row["nonsense"] = True
        rows.append("{" if index % 23 == 5 else json.dumps(row))
    path.write_text("".join(f"{row}\n" for row in rows))


def run(
    source: Path,
    output: Path,
    kill_at_bytes: int = 0,
    resume: str = "--resume",
    flags: Sequence[str] = (),
) -> int:
    """Start or resume the job in a separate process. It is killed when its output has
    `kill_at_bytes` bytes; 0: not killed."""
    job = [str(source), "-o", str(output), "--no-progress", resume, "--window-mib", "64", *flags]
    return run_forked(fake_batch.run, [str(kill_at_bytes), *job])


def essences(path: Path) -> list[str]:
    """The rows as a sorted list, without times and cached tokens."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["response"] is not None:
            del row["response"]["body"]["created"]
            del row["response"]["body"]["usage"]["prompt_tokens_details"]
        found.append(json.dumps(row, sort_keys=True))
    return sorted(found)


def check_kills(tmp_path: Path, num_kills: int) -> None:
    """Kill points are bytes of the output, so most of them cut a line."""
    source, whole, output = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_input(source)
    assert run(source, whole) == SOME_FAILED
    assert len(essences(whole)) == NUM_ROWS
    num_bytes = whole.stat().st_size
    points = random.Random(num_kills).sample(range(1, num_bytes * 9 // 10), num_kills)
    for point in sorted(points):
        assert run(source, output, point) == -signal.SIGKILL
    assert run(source, output) == SOME_FAILED
    assert essences(output) == essences(whole)


def test_kills_while_changed_rows_are_redone_lose_no_answer(tmp_path: Path) -> None:
    """The first kill is during the copy that leaves out the changed rows, the second after it."""
    source, whole, output = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_input(source)
    assert run(source, output) == SOME_FAILED
    before = essences(output)
    write_input(source, changed=5)
    assert run(source, whole) == SOME_FAILED
    num_bytes = whole.stat().st_size
    assert run(source, output, num_bytes // 2, "--resume=changed") == -signal.SIGKILL
    assert essences(output) == before, "the old file must stay until the copy is complete"
    assert run(source, output, num_bytes * 9 // 10, "--resume=changed") == -signal.SIGKILL
    assert run(source, output, resume="--resume=changed") == SOME_FAILED
    assert essences(output) == essences(whole)


def test_three_kills_lose_no_answer(tmp_path: Path) -> None:
    check_kills(tmp_path, 3)


@pytest.mark.slow
def test_twenty_kills_lose_no_answer(tmp_path: Path) -> None:
    check_kills(tmp_path, 20)
