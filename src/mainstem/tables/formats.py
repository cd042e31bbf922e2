"""Formats of tables, by the names of their files."""

import glob
from enum import Enum
from pathlib import Path

from mainstem.core.errors import InvalidRequest

PACKED = (".gz", ".zst")


class Format(Enum):
    """A format of table files."""

    CSV = "csv"
    TSV = "tsv"
    JSON_LINES = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"

    @property
    def is_text(self) -> bool:
        """Whether it is read without the extra `tables`."""
        return self in (Format.CSV, Format.TSV, Format.JSON_LINES)


_ENDINGS = {
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".tab": Format.TSV,
    ".jsonl": Format.JSON_LINES,
    ".ndjson": Format.JSON_LINES,
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
}


def format_of(name: str) -> Format:
    """The format of a file, by the end of its name; raises InvalidRequest for an unknown one."""
    path = Path(name)
    is_packed = path.suffix in PACKED
    ending = (Path(path.stem) if is_packed else path).suffix.lower()
    found = _ENDINGS.get(ending)
    if found is None or (is_packed and not found.is_text):
        known = ", ".join(_ENDINGS)
        reason = f"its name must end in one of {known}; text formats may add .gz or .zst"
        raise InvalidRequest(name, reason)
    return found


def files_of(name: str) -> list[str]:
    """The files of a table, sorted: the file itself, the table files in a folder, or what matches a
    pattern. Raises InvalidRequest if there are none."""
    path = Path(name)
    if path.is_dir():
        found = [str(each) for each in path.iterdir() if each.is_file() and _is_table(each.name)]
        where = "the folder has no table files"
    elif path.exists() or not glob.has_magic(name):
        return [name]
    else:
        found = [each for each in glob.glob(name, recursive=True) if Path(each).is_file()]
        where = "no file matches"
    if not found:
        raise InvalidRequest(name, where)
    return sorted(found)


def _is_table(name: str) -> bool:
    try:
        format_of(name)
    except InvalidRequest:
        return False
    return not name.startswith((".", "_"))
