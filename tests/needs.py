"""What some tests need that `make setup` does not bring: programs, and packages of other projects.

A test without what it needs is skipped. `python -m tests.needs` says in one line what is missing
here and how to get it; it prints nothing if all is here. `.ci/run`, which installs everything, asks
for names alone: `python -m tests.needs debian` for Debian's packages, `packages` for Python's.
"""

import shutil
import sys
from importlib.util import find_spec

import pytest

PROGRAMS = {  # and Debian's packages
    "redis-server": "redis-server",
    "openssl": "openssl",
    "chromium": "chromium",
    "node": "nodejs",
}
PACKAGES = ("ray", "compressed_tensors", "pyarrow", "pandas", "polars")
OTHER_NAMES = {"chromium": "chromium-browser"}


def find_program(name: str) -> str | None:
    """The path of a program, which may have another name on other systems."""
    return shutil.which(name) or shutil.which(OTHER_NAMES.get(name, name))


def is_here(name: str) -> bool:
    """Whether a program or a package is installed."""
    return (find_program(name) if name in PROGRAMS else find_spec(name)) is not None


def reason(name: str) -> str:
    """Why a test is skipped."""
    return f"needs {name}, which is not installed"


def needs(name: str) -> pytest.MarkDecorator:
    """A mark for tests that need a program or a package."""
    return pytest.mark.skipif(not is_here(name), reason=reason(name))


def skip_without(name: str) -> None:
    """Skip the calling test, or the fixture's tests, unless a program or a package is installed."""
    if not is_here(name):
        pytest.skip(reason(name))


def missing_debian() -> list[str]:
    """Debian's packages of the programs that are not installed."""
    return [package for name, package in PROGRAMS.items() if not is_here(name)]


def how_to_get() -> str:
    """One line on what is missing; empty if nothing is."""
    missing = [name for name in (*PROGRAMS, *PACKAGES) if not is_here(name)]
    if not missing:
        return ""
    ways = [f"apt install {' '.join(missing_debian())}"] if missing_debian() else []
    if not set(missing) <= PROGRAMS.keys():
        ways.append(".venv/bin/pip install -c constraints.txt -e '.[ci]'")
    return f"Skipped: tests that need {', '.join(missing)}. To run them: {'; '.join(ways)}"


def main() -> None:
    """Print what is missing; nothing if all is here."""
    said = {
        "debian": lambda: " ".join(missing_debian()),
        "packages": lambda: " ".join(name for name in PACKAGES if not is_here(name)),
    }.get(" ".join(sys.argv[1:]), how_to_get)()
    if said:
        print(said)


if __name__ == "__main__":
    main()
