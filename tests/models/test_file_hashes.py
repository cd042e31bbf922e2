"""Hashes of weights: every byte counts, and a hash is forgotten once its file changes."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mainstem.checkpoints import embedded
from mainstem.core import cache_files
from mainstem.core.errors import UnsupportedModel
from mainstem.models import file_hashes
from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.families import read_spec
from mainstem.models.file_hashes import KIND, MANIFEST, file_sha256
from mainstem.models.weight_files import SINGLE_FILE
from mainstem.models.weights import WeightDigest
from tests.models.checkpoints import change_in_place, make_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MAINSTEM_CACHE", str(folder))
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were hashed; all are old enough for their hash to be kept."""
    read: list[str] = []
    file_digest = hashlib.file_digest

    def noting(file, name):  # type: ignore[no-untyped-def]
        read.append(Path(file.name).name)
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noting)
    monkeypatch.setattr(file_hashes, "TICK_NS", -(1 << 62))
    return read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 16))
    return path


def note_of(cache: Path) -> Path:
    (note,) = (cache / KIND).iterdir()
    return note


def test_every_tensor_counts(cache: Path, tmp_path: Path) -> None:
    """A hash of 64 blocks of the file would miss most changes."""
    folder = tmp_path / "model"
    make_checkpoint("llama", folder, num_hidden_layers=6, intermediate_size=512)
    seen = {WeightDigest(folder).wait()}
    names = list(load_file(folder / SINGLE_FILE))
    for name in names:
        change_in_place(folder, name)
        seen.add(WeightDigest(folder).wait())
    assert len(seen) == 1 + len(names)


def test_an_unchanged_file_is_read_once(cache: Path, file: Path, hashed: list[str]) -> None:
    first = file_sha256(file)
    assert first == hashlib.sha256(file.read_bytes()).digest()
    assert file_sha256(file) == first
    assert hashed == ["weights"]


def test_a_changed_file_is_read_again_even_if_its_times_are_set_back(
    cache: Path, file: Path, hashed: list[str]
) -> None:
    before, times = file_sha256(file), file.stat()
    with file.open("r+b") as stream:
        stream.seek(30_000)
        stream.write(b"x")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = file_sha256(file)
    assert after == hashlib.sha256(file.read_bytes()).digest() != before
    assert len(hashed) == 2


def test_the_hash_of_a_file_that_was_just_written_is_not_stored(cache: Path, file: Path) -> None:
    """Another write within the same tick of the clock would not change the file's times."""
    file_sha256(file)
    assert not (cache / KIND).exists()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "a list", "other bytes"])
def test_a_damaged_stored_hash_is_computed_again(
    damage: str, cache: Path, file: Path, hashed: list[str]
) -> None:
    right = file_sha256(file)
    note = note_of(cache)
    text = note.read_text()
    damaged = {
        "flipped": text.replace(right.hex(), (right[:-1] + b"\0").hex()),
        "truncated": text[:-20],
        "empty": "",
        "a list": "[]",
        "other bytes": "\0\1\2",
    }
    note.write_text(damaged[damage])
    assert file_sha256(file) == right
    assert len(hashed) == 2
    assert note.read_text() == text
    assert file_sha256(file) == right
    assert len(hashed) == 2


def test_hashes_work_without_a_cache_folder(
    file: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(file / "below a file"))
    assert file_sha256(file) == file_sha256(file)
    assert len(hashed) == 2


def test_old_stored_hashes_are_deleted(
    cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "MOST_FILES", 3)
    for number in range(5):
        path = cache.parent / str(number)
        path.write_text("x")
        file_sha256(path)
    assert len(list((cache / KIND).iterdir())) == 3
    hashed.clear()
    file_sha256(path)
    assert hashed == [], "the newest is kept"


def embedded_file(cache: Path) -> Path:
    """A model as `embedded.py` writes it, with the manifest last."""
    folder = cache / "models" / "small"
    folder.mkdir(parents=True)
    path = folder / SINGLE_FILE
    path.write_bytes(b"weights")
    entry = {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    (folder / MANIFEST).write_text(json.dumps({"files": {SINGLE_FILE: entry}}))
    os.utime(folder / MANIFEST, ns=(path.stat().st_ctime_ns,) * 2)
    return path


def test_hashes_of_an_embedded_model_come_from_its_manifest(cache: Path, hashed: list[str]) -> None:
    assert embedded.MANIFEST == MANIFEST
    path = embedded_file(cache)
    assert file_sha256(path) == hashlib.sha256(b"weights").digest()
    assert hashed == []


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"model.safetensors": {"bytes": 7}}}'])
def test_a_damaged_manifest_is_ignored(text: str, cache: Path, hashed: list[str]) -> None:
    path = embedded_file(cache)
    (path.parent / MANIFEST).write_text(text)
    assert file_sha256(path) == hashlib.sha256(b"weights").digest()
    assert hashed == [SINGLE_FILE]


def test_an_embedded_model_that_was_changed_is_hashed(cache: Path, hashed: list[str]) -> None:
    path = embedded_file(cache)
    manifest_ns = (path.parent / MANIFEST).stat().st_mtime_ns
    while path.stat().st_mtime_ns <= manifest_ns:  # the clock ticks every few milliseconds
        path.write_bytes(b"changed")
    assert file_sha256(path) == hashlib.sha256(b"changed").digest()


def test_a_manifest_in_another_folder_is_ignored(cache: Path, hashed: list[str]) -> None:
    path = embedded_file(cache)
    elsewhere = cache.parent / "copy"
    path.parent.rename(elsewhere)
    file_sha256(elsewhere / SINGLE_FILE)
    assert hashed == [SINGLE_FILE]


def test_weights_that_change_while_they_are_loaded_are_refused(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    digest = WeightDigest(folder)
    load_decoder(folder, read_spec(folder), torch.float32)
    os.truncate(folder / SINGLE_FILE, 1000)
    with pytest.raises(UnsupportedModel, match="changed while it was loaded"):
        digest.wait()


def test_weights_whose_times_are_set_back_while_they_are_loaded_are_refused(
    cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    file = folder / SINGLE_FILE
    digest = WeightDigest(folder)
    digest.wait()  # every file is hashed
    times = file.stat()
    change_in_place(folder, "model.norm.weight")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UnsupportedModel, match="changed while it was loaded"):
        digest.wait()


def test_a_new_link_does_not_count_as_a_change(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    digest = WeightDigest(folder)
    (tmp_path / "link").hardlink_to(folder / SINGLE_FILE)
    assert digest.wait() == WeightDigest(folder).wait()
