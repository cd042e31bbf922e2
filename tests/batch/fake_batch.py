"""Runs `mainstem batch` over FakeRunner: exact answers, no tensors. Tests of kills run it as a
program.

python -m tests.batch.fake_batch KILL_AT_BYTES IN -o OUT [flags]    (0: not killed)
"""

import io
import os
import signal
import sys
from typing import Any

from mainstem.cli.batch import main
from tests.fake_engines import FakeEngines, a_tokenizer


def kill_at(num_bytes: int) -> None:
    """The process is killed by the first write that brings a file to this size."""

    class Mortal(io.FileIO):
        def write(self, data: Any, /) -> int:
            room = max(0, num_bytes - os.fstat(self.fileno()).st_size)
            if len(data) >= room:
                super().write(memoryview(data)[:room])
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write(data)

    io.FileIO = Mortal  # type: ignore[misc]  # the output is opened with this class


def run(argv: list[str]) -> int:
    """The program."""
    if int(argv[0]):
        kill_at(int(argv[0]))
    return main(argv[1:], FakeEngines(num_pages=48), lambda _: a_tokenizer())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
