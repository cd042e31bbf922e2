"""Whether this process runs Triton kernels under the interpreter.

The interpreter must be chosen before triton is imported, so these tests run in separate processes,
which the two files `test_interpreter.py` start: two, for two workers. Or set TRITON_INTERPRET=1 for
the whole of pytest.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels.drawn import is_recorded

ROOT = Path(__file__).parents[2]


def require_interpreter() -> None:
    """Skip the calling module unless kernels run on the CPU here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1; see test_interpreter.py", allow_module_level=True)


in_another_process = [
    pytest.mark.torch,
    pytest.mark.timeout(1800),  # after a change of sources it takes minutes, on a busy core many
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1",
        reason="the interpreter is on: these tests run in this process",
    ),
]
short_and_slow = pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)


def run_interpreted(folder: Path, names: Iterable[str], which: str) -> None:
    """Run tests of files in a folder under the interpreter, in another process; all must pass. The
    short run draws a part of them if all have passed with the same sources (drawn.py)."""
    draw = ["-p", "tests.kernels.drawn"] if which != "slow" and is_recorded(folder.name) else []
    files = [str(folder / name) for name in names]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:schemathesis",
            *draw,
            "-m",
            which,
            *files,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
