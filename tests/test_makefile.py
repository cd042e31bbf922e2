"""`make` in a fresh clone of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OTHER_PYTHON = """#!/bin/sh
exec {python} -c "import sys; sys.version_info = (3, 13, 0); exec(sys.argv[2])" "$@"
"""


def test_another_python_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python3.13"
    python.write_text(OTHER_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    settings = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "setup", f"PYTHON={python}"],
        cwd=tmp_path, env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs Python 3.11 or 3.12: make PYTHON=python3.12" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / ".venv").exists()
