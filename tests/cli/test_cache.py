"""`mainstem cache` on a folder that an engine wrote."""

import json
from errno import EIO
from pathlib import Path

import pytest

from mainstem.cli import cache
from mainstem.core.errors import StoreError
from mainstem.kv.bytes.ledger import ledger_of
from mainstem.kv.bytes.page_index import MODEL, PageIndex, read_about
from mainstem.kv.bytes.segments import SegmentFiles
from tests.builders import a_request, run_all
from tests.kv.tiered import a_tiered_engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiered = a_tiered_engine(disk_dir=tmp_path / "model", num_pages=32)
    run_all(tiered.engine, [a_request(list(range(40)), 4)])
    tiered.engine.close()
    return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, object]]:
    status = cache.main([*argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return status, found


def test_stats_count_pages_and_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = ask(capsys, "stats", str(folder))
    assert status == 0
    assert found["pages"] == 10
    assert found["page_tokens"] == 4
    assert found["folder"] == str(folder / "model")
    cache.main(["stats", str(folder)])
    assert "model" in capsys.readouterr().out


def test_stats_name_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "stats", str(folder))[1]["model"] is None, "no name, as in an older store"
    store = folder / "model"
    about = read_about(store)
    PageIndex(store, about | {MODEL: "org/tiny"}).close()
    found = ask(capsys, "stats", str(folder))[1]
    assert (found["model"], found["identity"]) == ("org/tiny", "fake")
    cache.main(["stats", str(folder)])
    assert "org/tiny  fake" in capsys.readouterr().out


def test_a_cleared_store_is_not_reported_as_lost(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(folder / "cache"))
    note = ledger_of(folder / "model")
    note.parent.mkdir(parents=True)
    note.write_text("10 pages")
    ask(capsys, "clear", str(folder))
    assert not note.exists()


def test_verify_finds_a_flipped_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "verify", str(folder)) == (
        0,
        {"folder": str(folder / "model"), "pages": 10, "bad": {}},
    )
    path = folder / "model" / "0000.pages"
    raw = bytearray(path.read_bytes())
    raw[4096] ^= 1
    path.write_bytes(raw)
    status, found = ask(capsys, "verify", str(folder))
    assert status == 1
    assert found["bad"] == {"checksum": 1}


def test_a_page_that_cannot_be_read_is_counted_and_the_others_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SegmentFiles.read

    def failing(files: SegmentFiles, record: int, *into: memoryview) -> None:
        if record == 3:
            raise OSError(EIO, "Input/output error")
        read(files, record, *into)

    monkeypatch.setattr(SegmentFiles, "read", failing)
    assert cache.main(["verify", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("10  unreadable 1")


def test_clear_leaves_an_empty_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = ask(capsys, "clear", str(folder))
    assert status == 0
    assert isinstance(found["removed_bytes"], int)
    assert found["removed_bytes"] > 0
    with pytest.raises(StoreError, match="no saved pages"):
        cache.main(["stats", str(folder)])
    a_tiered_engine(disk_dir=folder / "model").engine.close()


def test_stats_work_on_a_store_in_use_and_verify_and_clear_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiered = a_tiered_engine(disk_dir=folder / "model")
    assert ask(capsys, "stats", str(folder))[1]["pages"] == 10
    for action in ("verify", "clear"):
        with pytest.raises(StoreError, match="in use by process"):
            cache.main([action, str(folder)])
    tiered.engine.close()
