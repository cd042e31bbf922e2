"""The files in deploy/ can be parsed, and everything that they name exists."""

import json
import re
from pathlib import Path

import pytest

from mainstem.ray.serve_app import read_arguments
from mainstem_bench import serve as bench_serve

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
ROOT = DEPLOY.parent


def test_panels_of_the_dashboard_are_complete_and_do_not_overlap() -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            for target in panel["targets"]:
                assert target["expr"].count("(") == target["expr"].count(")")


def test_the_services_of_the_compose_file_fit_together() -> None:
    yaml = pytest.importorskip("yaml")
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in made["services"].items():
        for kind in ("secrets", "configs"):
            for used in service.get(kind, []):
                source = used["source"] if isinstance(used, dict) else used
                assert source in made[kind], f"{name} uses {source}"
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in made["volumes"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "a port is open to everybody"
    for config in made["configs"].values():
        if "file" in config:
            assert (DEPLOY / config["file"]).is_file()
        else:
            assert isinstance(yaml.safe_load(config["content"]), dict)
    build = made["services"]["mainstem"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_the_containerfile_copies_existing_files_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for names in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for name in names.split():
            assert (ROOT / name).exists(), f"COPY {name}"
    assert re.search(r"^FROM \S+:(?!latest)\S+$", text, re.MULTILINE)
    assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)
    assert text.rindex("USER") < text.index("ENTRYPOINT")


def test_the_readme_names_flags_that_exist() -> None:
    text = (DEPLOY / "README.md").read_text()
    known = set(re.findall(r"--[a-z-]+", bench_serve.parser().format_help()))
    for line in re.findall(r"^mainstem bench serve (.+)$", text, re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", line)) <= known


def test_the_image_holds_tested_versions_and_no_secrets() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    installed = re.findall(r"^RUN pip install (.+)$", text, re.MULTILINE)
    assert installed
    assert all("--constraint constraints.txt" in line for line in installed)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines.index("*") < min(place for place, line in enumerate(lines) if line[:1] == "!")
    copied = {
        name
        for names in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
        for name in names.split()
    }
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def test_no_command_runs_in_a_shell() -> None:
    """Without a shell, signals reach the server, and nothing in a flag is expanded."""
    text = (DEPLOY / "Containerfile").read_text()
    commands = re.findall(r"^ *(?:CMD|ENTRYPOINT) (.+)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert all(isinstance(word, str) for word in json.loads(command))


def test_the_password_of_grafana_has_no_default() -> None:
    yaml = pytest.importorskip("yaml")
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    given = made["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    found = re.fullmatch(r"\$\{(\w+):\?.+\}", given)
    assert found
    assert f"export {found[1]}=" in (DEPLOY / "README.md").read_text()


def test_prometheus_reaches_the_server_by_its_name() -> None:
    """A server without keys would refuse host names that --allowed-hosts does not list."""
    yaml = pytest.importorskip("yaml")
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    command = made["services"]["mainstem"]["command"]
    assert "--api-key-file" in command
    assert "--allowed-hosts" not in command


def test_the_files_for_ray_have_valid_arguments_and_existing_paths() -> None:
    yaml = pytest.importorskip("yaml")
    folder = DEPLOY / "ray"
    served = yaml.safe_load((folder / "serve.yaml").read_text())
    [application] = served["applications"]
    assert application["import_path"] == "mainstem.ray.serve_app:app"
    given = read_arguments(application["args"])
    assert given.replicas == 2
    cluster = yaml.safe_load((folder / "cluster.yaml").read_text())
    for path in cluster["file_mounts"].values():
        assert (ROOT / path).exists(), f"cluster.yaml copies {path}"
    assert len(cluster["provider"]["worker_ips"]) == cluster["max_workers"]
    commands = (folder / "README.md").read_text().split("```")[1]
    assert len(re.findall(r"^\S", commands, re.MULTILINE)) == 5
