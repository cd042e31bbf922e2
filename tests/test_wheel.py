"""`pip install` installs all packages and every file that they read."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packaged() -> set[str]:
    """Every file of the packages, with its name in a wheel."""
    packages = [SOURCE / name for name in ("mainstem", "mainstem_bench", "mainstem_simulate")]
    paths = [path for package in packages for path in package.rglob("*") if path.is_file()]
    return {str(path.relative_to(SOURCE)) for path in paths if "__pycache__" not in path.parts}


def test_every_file_that_is_not_a_module_is_package_data() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    found = {
        str(path.relative_to(SOURCE))
        for package, patterns in data.items()
        for pattern in patterns
        for path in (SOURCE / package).glob(pattern)
    }
    assert {name for name in packaged() if not name.endswith(".py")} <= found


def test_the_readme_names_every_extra() -> None:
    readme = (ROOT / "README.md").read_text()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"`{extra}`" in readme, f"README does not say what the extra {extra} is for"


@pytest.mark.slow
def test_a_wheel_has_all_packages_and_their_data(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(
        SOURCE, copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(copy)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("mainstem-*.whl")
    assert packaged() <= set(ZipFile(wheel).namelist())
