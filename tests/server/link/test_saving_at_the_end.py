"""A server saves its pages before it ends; a further signal ends that."""

import signal
import socket
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from mainstem.cli.cache import FolderVerdict, verify
from tests.server.process import Process, a_process
from tests.server.saving_engine import STORE, STUCK
from tests.waiting import until

SAVED, UNSAVED = list(range(23)), list(range(30, 73))  # prompts of 5 and 10 full pages
UPLOAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"


def num_on_disk(folder: Path) -> int:
    address = f"file:{folder / STORE}/index.sqlite?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as index:
        return int(index.execute("SELECT count(*) FROM pages").fetchone()[0])


def num_cached(process: Process, prompt: list[int]) -> int:
    """Send a prompt; returns how many of its tokens were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    response = process.request("POST", "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def press_until_it_ends(process: Process, number: signal.Signals) -> int:
    """Send a signal until the server has ended its saves; returns its exit status. A signal after
    that could come when the server no longer handles it."""
    for _ in range(60):
        process.popen.send_signal(number)
        with suppress(TimeoutExpired):
            return process.popen.wait(1)
        if process.has_said("pages not saved"):
            break
    return process.popen.wait(60)


@pytest.mark.parametrize(
    ("number", "has_upload"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
    ],
)
def test_a_further_signal_ends_the_wait_for_saves(
    tmp_path: Path, number: signal.Signals, has_upload: bool
) -> None:
    """With an upload that does not end, the third signal closes its connection first."""
    flags = ["--disk-dir", str(tmp_path), "--host-gb", "1"]
    with a_process(flags, "saving") as process:
        num_cached(process, SAVED)
        until(lambda: num_on_disk(tmp_path) == 5)
        (tmp_path / STUCK).touch()
        num_cached(process, UNSAVED)
        host, port = process.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=300) as connection:
            connection.sendall(UPLOAD if has_upload else UPLOAD[:4])
            try:
                assert press_until_it_ends(process, number) == 128 + number
            finally:
                (tmp_path / STUCK).unlink()
        until(lambda: process.has_said("pages not saved"))
    (said,) = [line["pages"] for line in process.lines if line["event"] == "pages not saved"]
    assert said == 10
    assert not process.has_said("unreadable"), process.lines
    assert not [line for line in process.lines if "traceback" in line]
    assert verify(tmp_path / STORE) == FolderVerdict(str(tmp_path / STORE), 5, {})
    with a_process(flags, "saving") as process:
        assert num_cached(process, UNSAVED) == 0
        assert num_cached(process, SAVED) == 20
        assert process.stop() == 0
    assert num_on_disk(tmp_path) == 15
