"""The import law, and that what the docs and the command line name is there."""

import argparse
import ast
import re
import subprocess
import sys
from dataclasses import fields
from enum import Enum
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mainstem.apps.bench.cli import BENCHES
from mainstem.apps.cli import COMMANDS
from mainstem.apps.flags import add_engine_flags
from mainstem.core.config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mainstem"

MAY_IMPORT = {
    "core": "core",
    "kernels": "kernels core",
    "plan": "plan core",
    "kv": "kv core",
    "models": "models core kernels",
    "sched": "sched core kv plan",
    "runner": "runner core kernels models kv",
    "engine": "engine core kv plan sched runner",
    "apps": "apps core plan kv kernels engine sched",
}
EXTRA = {("kv/bytes", "kernels")}  # page copies use a kernel
SCHED_IN_APPS = {"apps/bench/host.py", "apps/bench/valleys.py"}  # measure the scheduler itself
TORCH_OK = ("kernels", "models", "runner", "kv/bytes")  # everything else runs without torch
TORCH_IN_APPS = ("apps/bench/",)  # benchmarks time the data plane and its rivals
ENVIRONMENT_OK = {"core/config.py"}


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module a file names, TYPE_CHECKING blocks and local imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_import_law(path: Path) -> None:
    place = str(path.relative_to(SOURCE))
    package = place.split("/", maxsplit=1)[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "torch":
            assert place.startswith((*TORCH_OK, *TORCH_IN_APPS)), f"{place} imports torch"
        if parts[0] != "mainstem" or len(parts) < 3 or package not in MAY_IMPORT:
            continue
        is_extra = any(place.startswith(a) and parts[1] == b for a, b in EXTRA)
        assert parts[1] in MAY_IMPORT[package].split() or is_extra, f"{place} imports {name}"
        if package == "apps" and parts[1] == "sched":
            assert place in SCHED_IN_APPS, f"{place} imports {name}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    order: TopologicalSorter[str] = TopologicalSorter()
    for path in sources():
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for found in imports(path):
            order.add(name, found, found.rpartition(".")[0])
    order.prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_globals_no_environment_and_a_docstring(path: Path) -> None:
    place = str(path.relative_to(SOURCE))
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{place} has a global"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            reads = node.value.id == "os" and node.attr in ("environ", "getenv")
            assert not reads or place in ENVIRONMENT_OK, f"{place} reads the environment"
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), f"{place} does not say what it is for"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            is_plain = any(
                isinstance(base, ast.Name) and base.id in ("Enum", "NamedTuple")
                for base in node.bases
            ) or bool(node.decorator_list)
            assert is_plain or ast.get_docstring(node), f"{place}: {node.name} has no docstring"


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"mainstem {command}" in readme, f"README does not mention `mainstem {command}`"


def test_every_command_can_be_imported() -> None:
    for command in [*COMMANDS.values()]:
        assert (ROOT / "src" / command.module.replace(".", "/")).with_suffix(".py").is_file()
    for module, _ in BENCHES.values():
        assert (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_named_in_the_docs_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for target in re.findall(r"`((?:src|docs|tests|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / target).exists(), f"{path.name} names {target}"


def test_every_setting_is_in_the_docs_with_its_flag_and_default() -> None:
    found = re.findall(
        r"^\| `(\w+)` \| (?:`(--[\w-]+)`)? *\| (?:`([^`]+)`)?",
        (ROOT / "docs" / "settings.md").read_text(),
        re.MULTILINE,
    )
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    config, flags = EngineConfig(), set()
    documented = {name: (flag, default) for name, flag, default in found}
    for section in fields(config):
        for setting in fields(getattr(config, section.name)):
            flag, default = documented.pop(setting.name)
            flags.add(flag)
            value = getattr(getattr(config, section.name), setting.name)
            shown = value.value if isinstance(value, Enum) else value
            assert default == ("" if shown is None else str(shown).replace("False", "false"))
    assert not documented, "docs/settings.md has settings that are not there"
    known = {option for action in parser._actions for option in action.option_strings}
    assert flags - {""} == known - {"-h", "--help", "--config"}


def test_the_results_table_is_made_from_the_results() -> None:
    script = ROOT / "benchmarks" / "table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, "README is out of date: python benchmarks/table.py"
