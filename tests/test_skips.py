"""CI fails if a test is skipped that tests/skips.py does not list; others are told what to
install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs, skips
from tests.kernels import test_interpreter

ROOT = Path(__file__).resolve().parent.parent
SKIPPING = """
import pytest

def test_runs(): pass

def test_skips(): pytest.skip({message!r})
"""


@pytest.mark.parametrize(
    ("message", "is_allowed", "settings"),
    [
        ("no time", False, {}),
        (needs.reason("chromium"), False, {}),
        (needs.reason("chromium"), True, {skips.MAY_MISS_PROGRAMS: "1"}),
        (needs.reason("ray"), False, {skips.MAY_MISS_PROGRAMS: "1"}),
    ],
)
def test_a_skip_that_is_not_listed_fails_the_run(
    tmp_path: Path, message: str, is_allowed: bool, settings: dict[str, str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(SKIPPING.format(message=message))
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MAINSTEM")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "tests.skips",
         str(tmp_path / "tests")],
        cwd=ROOT, env={**kept, **settings, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 passed, 1 skipped" in done.stdout
    assert done.returncode == (0 if is_allowed else 1)
    said = f"not listed in tests/skips.py: tests/test_it.py::test_skips: Skipped: {message}"
    assert (said in done.stdout) is not is_allowed


def test_an_entry_that_nothing_needs_is_reported() -> None:
    gpu, vllm = "tests/gpu/test_span_gpu.py", skips.LISTED[-1].places[0]
    assert not list(skips.complaints([(gpu, "Skipped: no CUDA device")], ["tests/test_a.py::b"]))
    (said,) = skips.complaints([], [f"{vllm}[apply_vllm]"])
    assert "could not import 'vllm" in said


def test_every_place_in_the_list_exists() -> None:
    for skip in skips.LISTED:
        for place in skip.places:
            assert list(ROOT.glob(f"{place.split('::')[0]}*")), place


def test_tests_that_need_the_interpreter_are_run_by_it() -> None:
    files = (ROOT / "tests" / "kernels").glob("test_*.py")
    wanted = {path.name for path in files if "\nrequire_interpreter()" in path.read_text()}
    assert wanted == set(test_interpreter.MODULES)


def test_one_line_says_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["needs"])
    monkeypatch.setattr(needs, "is_here", lambda name: name not in ("node", "ray"))
    needs.main()
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "need node, ray." in said
    assert "apt install nodejs; .venv/bin/pip install -c constraints.txt -e '.[ci]'" in said
    monkeypatch.setattr(needs, "is_here", lambda name: True)
    needs.main()
    assert capsys.readouterr().out == ""
