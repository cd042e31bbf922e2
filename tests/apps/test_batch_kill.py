"""kill -9 at random points of a job: no answer is lost, none is there twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NUM_ROWS = 120
STEP_S = 0.01
ROOT = Path(__file__).resolve().parents[2]


def write_input(path: Path) -> None:
    """Questions over shared documents, some sampled, some refused, some the same."""
    rows: list[str] = []
    for index in range(NUM_ROWS):
        row: dict[str, object] = {
            "custom_id": f"row {index}",
            "prompt": f"document {index % 7} and what is in it; question {index % 100}",
            "max_tokens": 4 + index % 9,
            "temperature": index % 2,
            "ignore_eos": True,
        }
        if index % 17 == 3:
            row["custom_id"] = "row 0"  # used before
        if index % 19 == 4:
            row["nonsense"] = True
        rows.append("{" if index % 23 == 5 else json.dumps(row))
    path.write_text("".join(f"{row}\n" for row in rows))


def command(source: Path, output: Path, *flags: str) -> list[str]:
    module = [sys.executable, "-m", "tests.apps.fake_batch", str(STEP_S)]
    return [*module, str(source), "-o", str(output), "--no-progress", *flags]


def essences(path: Path) -> list[str]:
    """The rows as a sorted list, without the clock and what happened to be cached."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["response"] is not None:
            del row["response"]["body"]["created"]
            del row["response"]["body"]["usage"]["prompt_tokens_details"]
        found.append(json.dumps(row, sort_keys=True))
    return sorted(found)


def run_until_killed(source: Path, output: Path, at_bytes: int) -> bool:
    """Start or resume the job, kill it when the output has grown to `at_bytes`.

    False if it came to its end first.
    """
    with subprocess.Popen(
        command(source, output, "--resume"), cwd=ROOT, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            if output.exists() and output.stat().st_size >= at_bytes:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.001)
        assert process.returncode == 1, "the input has bad rows"
        return False


def check_kills(tmp_path: Path, num_kills: int) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source)
    whole = tmp_path / "whole.jsonl"
    assert subprocess.run(command(source, whole), cwd=ROOT, check=False).returncode == 1
    assert len(essences(whole)) == NUM_ROWS

    output = tmp_path / "out.jsonl"
    drawn = random.Random(num_kills)
    num_bytes = whole.stat().st_size
    for at_bytes in sorted(drawn.sample(range(num_bytes), num_kills)):
        was_killed = run_until_killed(source, output, at_bytes)
        assert was_killed or at_bytes > 0.9 * num_bytes
        if drawn.random() < 0.5:  # a write the kill caught in the middle
            with output.open("ab") as torn:
                torn.write(b'{"id": "batch_req_1", "custom_id": "row 1", "respon')
    assert not run_until_killed(source, output, 10 * num_bytes)
    assert essences(output) == essences(whole)


def test_three_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 3)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 20)
