"""Loading a checkpoint whose config.json has a field that nobody here knows."""

import json
import logging
from pathlib import Path

import pytest

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig
from mainstem.core.errors import UnsupportedModel
from mainstem.engine.build import build_engine
from mainstem.models.weights import checkpoint_digest
from mainstem.runner.origin import folder_origin
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
    assert "mine: ignored scale_depth, as" in told[0]


def test_what_is_ignored_is_part_of_what_pages_are_named_after(folder: Path) -> None:
    """A version that knows the field computes other pages from the same file."""
    ignoring = folder_origin(folder, ["scale_depth"]).digest()
    assert folder_origin(folder, ["scale_depth", "not_there"]).digest() == ignoring
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_depth": None}))
    plain = folder_origin(folder)
    assert plain.digest() == folder_origin(folder, ["scale_depth"]).digest()
    assert plain.spec.ignored_fields == ()
    assert checkpoint_digest(folder) == plain.weights.wait()
