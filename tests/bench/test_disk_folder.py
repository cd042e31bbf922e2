"""A benchmark leaves a user's `--disk-dir` as it was, also if pages of the same model are in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mainstem.cli.cache import find_stores, stats
from mainstem.cli.flags import engine_config
from mainstem.core.errors import ConfigError
from mainstem.engine.build import build_engine, build_random_engine
from mainstem.engine.engine import Engine
from mainstem_bench import cpu, policies, sessions
from mainstem_bench.settings import empty_folder, random_config
from mainstem_bench.shapes import SHAPES
from tests.builders import a_request, run_all


def leaves_pages_alone(engine: Engine, folder: Path, bench: Callable[[], int]) -> None:
    """Save pages, run a benchmark, and compare all files."""
    run_all(engine, [a_request(range(10, 80), max_tokens=2)])
    engine.close()
    assert [stats(store).pages for store in find_stores(folder)] == [4]
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    assert bench() == 0
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


def test_policies_leaves_pages_alone(tmp_path: Path) -> None:
    argv = ["--model-shape", "tiny", "--device", "cpu", "--policy", "lru", "--rate", "1000"]
    argv += ["--sessions", "2", "--turns", "1", "--host-gb", "0.01", "--disk-dir", str(tmp_path)]
    config = random_config(policies.parser().parse_args(argv), "tiny", 4096)
    engine = build_random_engine(SHAPES["tiny"], config)
    leaves_pages_alone(engine, tmp_path, lambda: policies.main(argv))


def test_sessions_leaves_pages_alone(tmp_path: Path) -> None:
    argv = ["--workload", "tiny", "--device", "cpu", "--tier", "disk"]
    argv += ["--host-gb", "0.1", "--disk-dir", str(tmp_path)]
    config = random_config(sessions.parser().parse_args(argv), "tiny", 512)
    engine = build_random_engine(SHAPES["tiny"], config)
    leaves_pages_alone(engine, tmp_path, lambda: sessions.main(argv))


def test_cpu_leaves_pages_alone(smollm2_folder: Path, tmp_path: Path) -> None:
    argv = ["--model", "smollm2", "--device", "cpu", "--kv-tokens", "512", "--threads", "1"]
    argv += ["--requests", "1", "--prefix", "0", "--own", "40", "--output", "2"]
    argv += ["--host-gb", "0.1", "--disk-dir", str(tmp_path)]
    engine = build_engine(smollm2_folder, engine_config(cpu.parser().parse_args(argv)))
    leaves_pages_alone(engine, tmp_path, lambda: cpu.main(argv))


def test_the_folder_is_inside_the_given_one_and_is_removed(tmp_path: Path) -> None:
    given = tmp_path / "not" / "there"
    with empty_folder(str(given)) as folder:
        assert Path(folder).parent == given
    assert not list(given.iterdir())


def test_a_file_in_place_of_the_folder_is_reported_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk-dir: no folder can be made"):
        empty_folder(str(tmp_path / "file"))


def test_without_a_disk_dir_the_error_names_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no temporary folder can be made: .*gone.*TMPDIR"):
        empty_folder(None)
