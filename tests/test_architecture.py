"""The import law, and checks that everything named in docs and commands exists."""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from enum import Enum
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mainstem.cli.flags import add_engine_flags
from mainstem.cli.main import COMMANDS
from mainstem.core.config import EngineConfig
from mainstem_bench.cli import BENCHES

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mainstem"

BENCH, SIMULATE = ROOT / "src" / "mainstem_bench", ROOT / "src" / "mainstem_simulate"

# package -> the other packages it may import; a file next to the packages counts as one, and names
# that `mainstem` itself exports are for users only
MAY_IMPORT = {
    "core": "",
    "kernels": "core",
    "plan": "core",
    "kv": "core",
    "models": "core kernels",
    "sched": "core kv plan",
    "runner": "core kernels models kv plan",
    "engine": "core kv plan sched models runner",
    "text": "core engine",
    "checkpoints": "core models text",
    "wire": "core text",
    "batch": "core plan text wire",
    "tables": "core plan text batch",
    "server": "core plan engine text wire batch",
    "vllm_names": "core",
    "llm": "core plan engine text checkpoints vllm_names",
    "async_llm": "core text llm",
    "map_table": "core plan text wire batch tables llm",
    "ray": "core plan checkpoints text wire batch tables server llm vllm_names map_table",
    "cli": "core plan kv checkpoints text wire batch tables server llm models runner ray",
    "mainstem_simulate": "core kv sched runner checkpoints ray cli",
}
# these join the packages; `mainstem.LLM` is imported when it is first used
MAIN = {"__init__", "__main__"}
TORCH_OK = ("kernels/", "models/", "runner/")  # everything else runs without torch
ENVIRONMENT_OK = {
    "core/config.py",  # secrets
    "core/environment.py",
    "ray/workers.py",  # what Ray reads on import
}
MAX_SHARE = 0.2  # largest share of all lines in one package


def sources() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *SIMULATE.rglob("*.py")])


def place_of(path: Path) -> str:
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else SOURCE.parent))


def package_of(path: Path) -> str:
    return place_of(path).partition("/")[0].removesuffix(".py")


@cache
def parsed(path: Path) -> list[ast.AST]:
    """All nodes of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    """Every module a file names, TYPE_CHECKING blocks and local imports included."""
    found: set[str] = set()
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_packages_obey_the_import_law() -> None:
    unlawful = [
        f"{place_of(path)} imports {name}"
        for path in sources()
        for name in imports(path)
        if not is_lawful(place_of(path), package_of(path), name)
    ]
    assert not unlawful


def is_lawful(place: str, package: str, name: str) -> bool:
    """Whether a file may import a name: a.b.c for `import a.b.c` and for `from a.b import c`."""
    parts = name.split(".")
    if parts[0] == "torch":
        return place.startswith(TORCH_OK)
    if parts[0] in ("mainstem_bench", "mainstem_simulate"):
        return parts[0] == package
    if parts[0] != "mainstem" or package in MAIN:
        return True
    return len(parts) > 1 and parts[1] in {package, *MAY_IMPORT[package].split()}


def test_the_law_sees_every_form_of_import() -> None:
    def may(name: str) -> bool:
        return is_lawful("sched/queue.py", "sched", name)

    assert may("mainstem.kv.keys.PageKey")
    assert may("mainstem.kv")  # from mainstem import kv
    assert not may("mainstem.runner.cpu.CpuRunner")
    assert not may("mainstem.runner")
    assert not may("mainstem.__version__")
    assert not may("mainstem")
    assert not may("mainstem_simulate.traces")
    assert not may("torch")


def test_no_package_holds_more_than_a_fifth_of_the_lines() -> None:
    lines: Counter[str] = Counter()
    for path in sources():
        lines[package_of(path)] += len(path.read_text().splitlines())
    for package, count in lines.items():
        assert count <= MAX_SHARE * lines.total(), f"{package} has {count} of {lines.total()} lines"


def test_there_are_no_import_cycles() -> None:
    order: TopologicalSorter[str] = TopologicalSorter()
    for path in [*sources(), *BENCH.rglob("*.py")]:
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for found in imports(path):
            order.add(name, found, found.rpartition(".")[0])
    order.prepare()  # raises CycleError, which names them


def test_modules_have_a_docstring_and_use_neither_globals_nor_environment() -> None:
    for path in sources():
        check_module(path)


def check_module(path: Path) -> None:
    place = place_of(path)
    nodes = parsed(path)
    for node in nodes:
        assert not isinstance(node, ast.Global), f"{place} has a global"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            reads = node.value.id == "os" and node.attr in ("environ", "getenv")
            assert not reads or place in ENVIRONMENT_OK, f"{place} reads the environment"
    tree = nodes[0]
    assert isinstance(tree, ast.Module)
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


def test_every_command_has_a_module() -> None:
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


@pytest.mark.parametrize(
    "path",
    [ROOT / "docs" / "log.md", *sorted((ROOT / "docs" / "log").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_every_entry_of_the_log_opens_with_its_conclusion(path: Path) -> None:
    for entry in re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = entry.partition("\n\n")
        opening = body.partition("\n\n")[0]
        assert opening.startswith("Conclusion: "), f"{path.name}: {title}"
        assert opening.count("\n") < 3, f"{path.name}: {title}: more than three lines"
        assert re.match(r"\d{4}-\d\d-\d\d: ", title), f"{path.name}: {title}: no date"


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
    assert not documented, "docs/settings.md lists settings that do not exist"
    known = {option for action in parser._actions for option in action.option_strings}
    assert flags - {""} == known - {"-h", "--help", "--config"}


def test_the_results_table_is_made_from_the_results() -> None:
    script = ROOT / "benchmarks" / "pages.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, "pages are out of date: run `make docs`"
