"""`make test-gpu` runs each test in exactly one of its processes."""

from pathlib import Path

import pytest

from tests.gpu.many import main

TESTS = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(30))
def test_each(number):
    with open({log!r}, "a") as log:
        log.write(f"{{number}}\\n")
    assert number != {wrong}
"""


@pytest.mark.parametrize("wrong", [None, 7])
def test_each_test_runs_once_and_a_failure_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: int | None
) -> None:
    log, tests = tmp_path / "log", tmp_path / "test_some.py"
    tests.write_text(TESTS.format(log=str(log), wrong=wrong))
    status = main(["-n", "2", str(tests), "-c", "pyproject.toml"])
    assert sorted(map(int, log.read_text().split())) == list(range(30))
    printed = capsys.readouterr().out
    if wrong is None:
        assert status == 0
        assert "30 passed, 0 failed, 0 skipped" in printed
    else:
        assert status == 1
        assert "29 passed, 1 failed, 0 skipped" in printed
        assert "assert 7 != 7" in printed
