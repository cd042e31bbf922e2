"""Files of a batch job: compression, incomplete last lines, full disks, names of finished rows."""

import gzip
import io
import json
import os
import random
from pathlib import Path

import pytest

from mainstem.batch import files, idset
from mainstem.batch.answer_file import AnswerFile, Existing
from mainstem.batch.files import FileFault, InputFile, Line
from mainstem.batch.idset import IdSet
from mainstem.core.errors import ConfigError, InvalidRequest

SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst"]


def answer(custom_id: str) -> dict[str, object]:
    return {"custom_id": custom_id, "response": {"body": "\u00e9" * 50}, "error": None}


def failure(line: int) -> dict[str, object]:
    return {"custom_id": None, "response": None, "error": {"code": "x", "line": line}}


def rows_of(path: Path) -> list[str]:
    source = InputFile(str(path))
    found = [json.loads(line.data or b"")["custom_id"] for line in source]
    source.close()
    return found


def write(path: Path, names: list[str], existing: Existing = Existing.REFUSE) -> None:
    with AnswerFile(str(path), existing) as out:
        out.start()
        for name in names:
            out.append(answer(name))


def skip_without_zstd(suffix: str) -> None:
    if suffix.endswith(".zst"):
        pytest.importorskip("zstandard")


# --- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_compression_reads_back_what_it_wrote(tmp_path: Path, suffix: str) -> None:
    skip_without_zstd(suffix)
    path = tmp_path / f"out{suffix}"
    write(path, ["a", "b"])
    assert rows_of(path) == ["a", "b"]


def test_gzip_of_several_members_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"1\n2") + gzip.compress(b"3\n4\n"))
    source = InputFile(str(path))
    assert list(source) == [Line(1, b"1\n"), Line(2, b"23\n"), Line(3, b"4\n")]
    assert source.progress == 1.0
    source.close()


def test_a_cut_gzip_input_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(random.Random(0).randbytes(10_000))[:-100])
    source = InputFile(str(path))
    with pytest.raises(FileFault, match="is cut off"):
        list(source)
    source.close()


def test_an_input_named_gz_that_is_not_gzip_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(b"plain text\n")
    source = InputFile(str(path))
    with pytest.raises(FileFault, match="header"):
        list(source)
    source.close()


def test_an_input_that_shrinks_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 300_000 + b"\n" + b"y" * 300_000 + b"\n")
    source = InputFile(str(path))
    lines = iter(source)
    next(lines)
    os.truncate(path, 300_001)
    with pytest.raises(FileFault, match="shorter"):
        list(lines)
    source.close()


def test_a_line_beyond_the_limit_is_read_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 8)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"short\n" + b"l" * 50 + b"\n1234567\nend")
    source = InputFile(str(path))
    assert [line.data for line in source] == [b"short\n", None, b"1234567\n", b"end"]
    source.close()


def test_the_error_names_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        InputFile(str(tmp_path / "nowhere"))


def test_zst_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(files, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        InputFile("in.zst")
    with pytest.raises(ConfigError, match="pip install zstandard"):
        AnswerFile("out.zst", Existing.REFUSE)


# --- output --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_row_is_in_the_file_as_soon_as_it_is_appended(tmp_path: Path, suffix: str) -> None:
    skip_without_zstd(suffix)
    path = tmp_path / f"out{suffix}"
    with AnswerFile(str(path), Existing.REFUSE) as out:
        out.start()
        for number in range(5):
            out.append(answer(f"row {number}"))
            raw = io.FileIO(path, "rb")
            stream = files.buffered(raw, files.unpacker(path.name))
            found = [stream.readline() for _ in range(number + 1)]
            assert json.loads(found[-1])["custom_id"] == f"row {number}"
            raw.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_resume_cuts_an_incomplete_last_line(tmp_path: Path, suffix: str) -> None:
    """A file cut at any byte keeps its complete lines; after resuming, it is complete again."""
    skip_without_zstd(suffix)
    path = tmp_path / f"out{suffix}"
    names = [f"row {number}" for number in range(20)]
    write(path, names)
    whole = path.read_bytes()
    for cut in random.Random(1).sample(range(1, len(whole)), 25):
        path.write_bytes(whole[:cut])
        with AnswerFile(str(path), Existing.RESUME) as out:
            kept = [name for name in names if name in out.done.answered]
            assert len(kept) == out.done.num_answered
            out.start()
            for name in names:
                if name not in out.done.answered:
                    out.append(answer(name))
        assert rows_of(path) == names
        assert kept == names[: len(kept)]


def test_resume_recognizes_error_rows_by_their_line_number(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(str(path), Existing.REFUSE) as out:
        out.start()
        out.append(answer("a"))
        out.append(failure(12))
    with AnswerFile(str(path), Existing.RESUME) as out:
        assert "12" in out.done.failed_lines
        assert (out.done.num_answered, out.done.num_failed) == (1, 1)


def test_an_output_with_answers_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, ["a"])
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match="--resume or --overwrite"):
        AnswerFile(str(path), Existing.REFUSE)
    out = AnswerFile(str(path), Existing.OVERWRITE)
    assert path.read_bytes() == before, "nothing changes before start"
    out.start()
    out.close()
    assert path.read_bytes() == b""


def test_resume_refuses_a_file_that_is_not_a_batch_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"prompt": "mine"}\n')
    with pytest.raises(InvalidRequest, match="line 1"):
        AnswerFile(str(path), Existing.RESUME)
    assert path.read_text() == '{"prompt": "mine"}\n'


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        AnswerFile(str(path), Existing.REFUSE),
        pytest.raises(InvalidRequest, match="another run"),
    ):
        AnswerFile(str(path), Existing.RESUME)


def test_the_error_names_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        AnswerFile(str(tmp_path / "no" / "out.jsonl"), Existing.REFUSE)


def test_standard_output_cannot_be_resumed() -> None:
    with pytest.raises(InvalidRequest, match="standard output"):
        AnswerFile("-", Existing.RESUME)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_fault_with_a_reason() -> None:
    out = AnswerFile("/dev/full", Existing.REFUSE)
    out.start()
    with pytest.raises(FileFault, match="No space left"), out:
        out.append(answer("a"))


def test_a_partly_written_row_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle of a line leaves the lines before it."""
    path = tmp_path / "out.jsonl"
    room = 400

    class SmallDisk(io.FileIO):
        def write(self, data: object, /) -> int:
            left = room - os.fstat(self.fileno()).st_size
            if left <= 0:
                raise OSError(28, "No space left on device")
            return super().write(memoryview(data)[: min(left, 50)])  # type: ignore[arg-type]

    monkeypatch.setattr(io, "FileIO", SmallDisk)
    out = AnswerFile(str(path), Existing.REFUSE)
    out.start()
    for number in range(2):
        out.append(answer(str(number)))
    with pytest.raises(FileFault, match="2 rows written before are safe"), out:
        out.append(answer("one too many"))
    monkeypatch.undo()
    assert rows_of(path) == ["0", "1"]


# --- names ---------------------------------------------------------------------------------------


def test_an_idset_answers_as_a_set_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idset, "RECENT", 8)
    drawn = random.Random(2)
    ours, theirs = IdSet(), set()
    for _ in range(2000):
        name = f"name {drawn.randrange(1200)}"
        assert (name in ours) == (name in theirs)
        assert ours.add(name) == (name not in theirs)
        theirs.add(name)
        assert len(ours) == len(theirs)
