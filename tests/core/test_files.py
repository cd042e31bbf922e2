"""Files are replaced as a whole, and read whether they are gzip or not."""

import gzip
import os
from pathlib import Path

import pytest

from mainstem.core.files import (
    UNREADABLE,
    read_plain_or_gzip,
    remove_leftovers,
    replacing,
    text_lines,
    write_whole,
)


def test_a_block_that_raises_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")

    def write_and_fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_there_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_whole_makes_private_files_and_replacing_obeys_the_umask(tmp_path: Path) -> None:
    write_whole(tmp_path / "private", b"x")
    with replacing(tmp_path / "shared") as file:
        file.write(b"x")
    (tmp_path / "plain").touch()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes["private"] == 0o600
    assert modes["shared"] == modes["plain"]


def test_only_leftovers_of_the_given_file_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    for name in ("a[1].json", "a[1].json.12ab34cd.fresh", "a1.json.12ab34cd.fresh"):
        (tmp_path / name).touch()
    remove_leftovers(path)
    assert sorted(os.listdir(tmp_path)) == ["a1.json.12ab34cd.fresh", "a[1].json"]


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_gzip_is_known_by_its_first_bytes_not_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes("füzet\r\n".encode())
    assert read_plain_or_gzip(path) == "füzet\r\n"
    path.write_bytes(gzip.compress("füzet\r\n".encode()))
    assert read_plain_or_gzip(path) == "füzet\r\n"
    path.write_bytes(b"")
    assert read_plain_or_gzip(path) == ""


def test_damaged_gzip_data_raises_what_callers_catch(tmp_path: Path) -> None:
    path = tmp_path / "text"
    whole = gzip.compress(os.urandom(1000))
    for data in (whole[:-20], whole[:100] + b"\xff" * 100 + whole[200:], whole[:3]):
        path.write_bytes(data)
        with pytest.raises(UNREADABLE):
            read_plain_or_gzip(path)


def test_lines_end_at_line_feeds_alone() -> None:
    """A string in JSON may hold the other marks that `str.splitlines` ends lines at."""
    row = '{"a": "1\u2028\x85\x0b2"}'
    assert text_lines(f"{row}\r\n\n{{}}") == [f"{row}\r", "", "{}"]
    assert text_lines("a\n") == ["a"]
    assert text_lines("") == []
