"""A plugin for CI, `pytest -p tests.skips`: a skipped test that is not listed here fails the run.

A listed skip that no longer happens is reported, so that the list stays short.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.needs import PROGRAMS, reason

MAY_MISS_PROGRAMS = "MAINSTEM_MAY_MISS_PROGRAMS"  # `.ci/run` sets it where it cannot install any

Skipped = Sequence[tuple[str, str]]  # ids of tests or files, and messages


@dataclass(frozen=True, slots=True)
class Skip:
    """Tests that are skipped in CI, too."""

    places: tuple[str, ...]  # how their ids begin
    message: str  # a part of it
    why: str

    def has(self, test: str) -> bool:
        return test.startswith(self.places)

    def covers(self, test: str, message: str) -> bool:
        return self.has(test) and self.message in message


LISTED = (
    Skip(("tests/gpu/",), "CUDA device", "CI has no GPU; `make test-gpu` runs them"),
    Skip(
        ("tests/kernels/", "tests/runner/test_gpu", "tests/runner/test_rounded_gpu.py"),
        "needs TRITON_INTERPRET=1",
        "tests/kernels/test_interpreter.py runs them in another process",
    ),
    Skip(("tests/kernels/test_int4.py",), "not supported in fp16", "there is no such format"),
    Skip(
        ("tests/server/link/test_kv_events.py::test_the_pages_of_a_store_are_rebuilt",),
        "could not import 'vllm",
        "vLLM needs another torch; the test also runs with a reader of our own",
    ),
)


def listed() -> tuple[Skip, ...]:
    """The skips that are allowed here."""
    if MAY_MISS_PROGRAMS not in os.environ:
        return LISTED
    why = "`.ci/run` could not install it"
    return (*LISTED, *(Skip(("tests/",), reason(name), why) for name in PROGRAMS))


def complaints(skipped: Skipped, passed: Sequence[str]) -> Iterator[str]:
    """Say which entries of the list nothing needs any more. `passed` are ids of tests."""
    for skip in LISTED:
        is_needed = any(skip.covers(*found) for found in skipped)
        if not is_needed and any(map(skip.has, passed)):
            yield f"tests/skips.py lists {skip.message!r}, but such tests are not skipped any more"


def unlisted(skipped: Skipped) -> list[str]:
    """Say which skips are not in the list."""
    return [
        f"skipped, and not listed in tests/skips.py: {test}: {message}"
        for test, message in skipped
        if not any(skip.covers(test, message) for skip in listed())
    ]


def _skipped(config: pytest.Config) -> Skipped:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [] if reporter is None else reporter.stats.get("skipped", [])
    return [(report.nodeid, str(report.longrepr[-1])) for report in reports]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the run fail if a skip is not listed. The workers of pytest-xdist have no reporter."""
    if session.exitstatus == pytest.ExitCode.OK and unlisted(_skipped(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what is wrong with skips and with the list."""
    skipped = _skipped(config)
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", [])]
    for line in (*unlisted(skipped), *complaints(skipped, passed)):
        terminalreporter.write_line(line)
