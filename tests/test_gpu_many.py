"""`make test-gpu` runs each test in exactly one of its processes."""

from pathlib import Path

import pytest

from tests.gpu.many import main

TESTS = """
from pathlib import Path
from time import monotonic, sleep
import pytest
pytestmark = pytest.mark.gpu
# the process of test 0 goes on in the other file, whose tests wait for it
WAITS = {{0: "14"}} | dict.fromkeys(range(16, 30), "0")

@pytest.fixture(scope="module")
def held():
    yield

@pytest.mark.parametrize("number", range({first}, {first} + 15))
def test_each(number, held):
    log, end = Path({log!r}), monotonic() + 60
    while number in WAITS and WAITS[number] not in log.read_text().split():
        assert monotonic() < end
        sleep(0.01)
    with log.open("a") as lines:
        lines.write(f"{{number}}\\n")
    assert number != {wrong}
"""


@pytest.mark.parametrize("wrong", [None, 7])
def test_each_test_runs_once_and_a_failure_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: int | None,
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most plugins take long to import
    log = tmp_path / "log"
    log.touch()
    for first in (0, 15):
        text = TESTS.format(log=str(log), wrong=wrong, first=first)
        (tmp_path / f"test_from_{first}.py").write_text(text)
    status = main(["-n", "2", str(tmp_path), "-c", "pyproject.toml", "-p", "pytest_timeout"])
    assert sorted(map(int, log.read_text().split())) == list(range(30))
    printed = capsys.readouterr().out
    if wrong is None:
        assert status == 0
        assert "30 passed, 0 failed, 0 skipped" in printed
    else:
        assert status == 1
        assert "29 passed, 1 failed, 0 skipped" in printed
        assert "assert 7 != 7" in printed
