"""How an engine is built: config.json with unknown fields, and the store."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mainstem.cli import cache
from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, StoreConfig
from mainstem.core.errors import ConfigError, UnsupportedModel
from mainstem.core.step import Runner
from mainstem.engine import build
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem.models.weights import WeightDigest
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.origin import Origin, folder_origin
from mainstem.runner.ranks.load import load_model
from tests.builders import a_request, run_all
from tests.models.checkpoints import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    make_checkpoint("llama", made)
    path = made / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_depth": 1.4}))
    return made


def a_config(*ignored: str) -> EngineConfig:
    model = ModelConfig(model="mine", ignore_config_fields=ignored)
    return EngineConfig(model=model, cache=CacheConfig(kv_tokens=64))


def test_an_unknown_field_is_ignored_with_a_line_on_stderr(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("mainstem"), "propagate", False)  # not to pytest
    with pytest.raises(UnsupportedModel, match="scale_depth"):
        build_engine(folder, a_config())
    build_engine(folder, a_config("scale_depth", "not_there")).close()
    told = [line for line in capsys.readouterr().err.splitlines() if "config.json" in line]
    assert len(told) == 1
    assert "mine: ignored scale_depth because of" in told[0]


def test_ignoring_a_field_that_is_absent_or_null_does_not_rename_pages(folder: Path) -> None:
    """Names depend only on fields that the file has and that are ignored."""
    ignoring = folder_origin(folder, ["scale_depth"]).digest()
    assert folder_origin(folder, ["scale_depth", "not_there"]).digest() == ignoring
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_depth": None}))
    plain = folder_origin(folder)
    assert plain.digest() == folder_origin(folder, ["scale_depth"]).digest()
    assert plain.spec.ignored_fields == ()
    assert WeightDigest(folder).wait() == plain.weights.wait()


def test_a_runner_is_closed_if_the_engine_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the runner's processes would keep running."""
    made: list[Runner] = []
    closed: list[Runner] = []

    def load(origin: Origin, config: EngineConfig) -> tuple[Runner, RunnerFacts]:
        runner, facts = load_model(origin, config)
        made.append(runner)
        monkeypatch.setattr(runner, "close", lambda: closed.append(runner))
        return runner, facts

    monkeypatch.setattr(build, "load_model", load)
    config = replace(a_config("scale_depth"), store=StoreConfig(host_gb=1e6))
    with pytest.raises(ConfigError, match="host_gb=1e"):
        build_engine(folder, config)
    assert closed == made
    assert len(made) == 1


def with_disk(folder: Path, disk: Path) -> Engine:
    store = StoreConfig(host_gb=0.01, disk_dir=str(disk), disk_gb=0.1)
    model = ModelConfig(model="org/mine")
    return build_engine(
        folder, EngineConfig(model=model, cache=CacheConfig(kv_tokens=512), store=store)
    )


def test_an_emptied_store_is_reported_once_and_every_store_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("mainstem"), "propagate", False)  # not to pytest
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    folder, disk = tmp_path / "model", tmp_path / "disk"
    make_checkpoint("llama", folder)

    def run() -> list[str]:
        capsys.readouterr()
        engine = with_disk(folder, disk)
        run_all(engine, [a_request(list(range(3, 73)), 2)])
        engine.close()
        return [line for line in capsys.readouterr().err.splitlines() if "KV store" in line]

    assert run() == []
    assert run() == []
    (store,) = cache.find_stores(disk)
    found = cache.stats(store)
    assert (found.model, found.pages, found.identity[:16]) == ("org/mine", 4, store.name)
    shutil.rmtree(disk)
    assert run() == [
        f"the KV store in {store} has lost 4 pages: it is empty, and held 4 pages when it was last "
        "used. 0 are left; what is lost is computed again"
    ]
    cache.clear(store)
    assert run() == [], "a cleared store is no loss"
    (store / "0000.pages").unlink()
    assert len(run()) == 1
    assert run() == []
