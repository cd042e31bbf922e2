"""The page's modules without a DOM, in Node.js: tests/server_page/modules/*.mjs."""

import os
import re
import shutil
import subprocess
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from tests.needs import skip_without

MODULES = Path(__file__).parent / "modules"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the page that Node.js reads as modules, as a browser does."""
    folder = tmp_path_factory.mktemp("page")
    with as_file(files("mainstem.server") / "page") as source:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    folder.joinpath("package.json").write_text('{"type": "module"}')
    return folder


@pytest.mark.parametrize("name", sorted(path.stem for path in MODULES.glob("*.mjs")))
def test_the_tests_of_a_module_pass_in_node(name: str, page: Path) -> None:
    skip_without("node")
    ran = subprocess.run(
        ["node", "--test", MODULES / f"{name}.mjs"],
        env={**os.environ, "PAGE": str(page)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"pass [1-9]", ran.stdout)
