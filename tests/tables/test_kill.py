"""kill -9 at random points of `mainstem map`: no answer is lost, and the table is written once."""

import csv
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.tables import fake_map

NUM_ROWS = 60
SOME_FAILED = 1


def write_table(path: Path) -> None:
    """Rows that share fields, some equal, some with a bad cell."""
    with path.open("w", newline="", errors="surrogateescape") as file:
        out = csv.writer(file)
        out.writerow(["id", "text", "kind"])
        for index in range(NUM_ROWS):
            text = "\udcff" if index % 17 == 3 else f"text number {index % 40}"
            out.writerow([index, text, f"a kind of text, number {index % 4}"])


def run(source: Path, output: Path, kill_at_bytes: int = 0, flags: Sequence[str] = ()) -> int:
    """Run the job in a separate process. It is killed when a file that it writes has
    `kill_at_bytes` bytes; 0: not killed."""
    job = [str(source), "-o", str(output), "--prompt", "{row}", "--fields", "text,kind"]
    more = ["--no-progress", "--max-tokens", "8", "--temperature", "1", "--window-mib", "64"]
    return run_forked(fake_map.run, [str(kill_at_bytes), *job, *more, *flags])


def check_kills(tmp_path: Path, num_kills: int) -> None:
    source, whole, output = (tmp_path / name for name in ("in.csv", "whole.csv", "out.csv"))
    journal = tmp_path / "out.csv.answers.jsonl"
    write_table(source)
    assert run(source, whole) == SOME_FAILED
    points = random.Random(num_kills).sample(range(1, NUM_ROWS * 400), num_kills)
    for point in sorted(points):
        assert run(source, output, point, ["--resume"]) == -signal.SIGKILL
        assert journal.exists()
        assert not output.exists()
    assert run(source, output, flags=["--resume"]) == SOME_FAILED
    assert output.read_bytes() == whole.read_bytes()
    with output.open(newline="", errors="surrogateescape") as file:
        assert sum(1 for _ in csv.reader(file)) == NUM_ROWS + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv", "whole.csv"]


def test_two_kills_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, 2)


@pytest.mark.slow
def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, 10)
