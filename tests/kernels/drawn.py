"""Which interpreted tests run: all after a change, a few each day otherwise.

    python -m tests.kernels.drawn     runs all, and writes the record

The record (interpreted_record.txt) has a hash of the sources that each folder's tests depend on, as
they were when all of these tests passed under Triton's interpreter. While the sources are the same,
`make test` runs another 48th of the tests each day. `make test-full` runs all.

As a pytest plugin it leaves out the tests that are not drawn.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("interpreted_record.txt")
DRAWN_OF = 48
KERNELS = ("src/mainstem/kernels", "tests/kernels")
ENGINE = tuple(f"src/mainstem/{name}" for name in ("core", "engine", "kv", "models", "sched"))
SOURCES = {  # what the interpreted tests of a folder depend on
    "kernels": KERNELS,
    "runner": (*KERNELS, *ENGINE, "src/mainstem/runner", "tests/runner", "tests/models"),
}


def state_of(folder: str) -> str:
    """Names the sources that a folder's tests depend on, and the versions that matter."""
    found = sha256(" ".join(version(name) for name in ("torch", "triton", "numpy")).encode())
    for path in sorted(path for name in SOURCES[folder] for path in (ROOT / name).rglob("*.py")):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return f"{folder} {found.hexdigest()[:32]}"


def is_recorded(folder: str) -> bool:
    """Whether all tests of the folder have passed with these sources."""
    return RECORD.is_file() and state_of(folder) in RECORD.read_text().splitlines()


def is_drawn(test: str, day: int) -> bool:
    """Whether a test runs on a day."""
    return (crc32(test.encode()) + day) % DRAWN_OF == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other days."""
    today = datetime.now(UTC).toordinal()
    left_out = [item for item in items if not is_drawn(item.nodeid, today)]
    items[:] = [item for item in items if is_drawn(item.nodeid, today)]
    config.hook.pytest_deselected(items=left_out)


def main(folders: Sequence[str] = tuple(SOURCES)) -> None:
    """Run all interpreted tests; if they pass, write the record."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import test_interpreter as kernels  # noqa: PLC0415  # after the setting
    from tests.runner import test_interpreter as runner  # noqa: PLC0415

    modules = {"kernels": kernels.MODULES, "runner": runner.MODULES}
    files = [str(ROOT / "tests" / folder / name) for folder in folders for name in modules[folder]]
    if pytest.main(["-q", "-m", "not slow", *files]) == pytest.ExitCode.OK:
        RECORD.write_text("".join(f"{state_of(folder)}\n" for folder in folders))


if __name__ == "__main__":
    main()
