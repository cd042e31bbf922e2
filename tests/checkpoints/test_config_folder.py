"""A model's config.json without its weights."""

from pathlib import Path

import huggingface_hub
import pytest

from mainstem.checkpoints.hub import config_folder
from mainstem.core.errors import ModelNotFound


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with config_folder(str(tmp_path)) as folder:
        assert folder == tmp_path


def test_a_hub_id_fetches_one_file_and_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(name: str, filename: str, local_dir: str) -> str:
        asked.append((name, filename))
        path = Path(local_dir) / filename
        path.write_text("{}")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with config_folder("owner/name") as folder:
        assert (folder / "config.json").is_file()
    assert asked == [("owner/name", "config.json")]
    assert not folder.exists()


def test_a_cached_hub_id_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(path))
    with config_folder("owner/name") as folder:
        assert folder == tmp_path


def test_a_missing_config_gives_the_same_error_as_a_missing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, filename: str, local_dir: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    for name in ("owner/name", str(tmp_path), "nowhere", "./no/where"):
        with pytest.raises(ModelNotFound, match=name), config_folder(name):
            pass
