"""Files that are replaced atomically, and files that may be gzip.

state.json                  the old contents, then the new ones; always complete
state.json.1f2e3d4c.fresh   the new contents while they are written
"""

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, TextIO

GZIP_MAGIC = b"\x1f\x8b"
PRIVATE = 0o600  # only the owner may read it
FRESH = ".fresh"
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error)  # gzip data may be damaged


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends, synced to the disk.

    A kill at any moment leaves the old file or the new one, and perhaps a leftover for
    `remove_leftovers`. If the block raises, `path` is unchanged. `mode` is subject to the umask.
    """
    fresh = path.with_name(f"{path.name}.{token_hex(4)}{FRESH}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file; only its owner may read the new one."""
    with replacing(path, PRIVATE) as file:
        file.write(data)


def remove_leftovers(path: Path) -> None:
    """Remove the leftovers beside `path` of a process that was killed within `replacing`. No other
    process may be replacing `path` now."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*{FRESH}"):
        leftover.unlink(missing_ok=True)


@contextmanager
def open_plain_or_gzip(path: Path) -> Iterator[TextIO]:
    """A UTF-8 file to read, unpacked if it begins as gzip does; reading may raise UNREADABLE."""
    with path.open("rb") as raw:
        is_gzip = raw.peek(2)[:2] == GZIP_MAGIC
        stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        yield io.TextIOWrapper(stream, encoding="utf-8", newline="")


def read_plain_or_gzip(path: Path) -> str:
    """The whole text of a file that is plain or gzip."""
    with open_plain_or_gzip(path) as file:
        return file.read()


def text_lines(text: str) -> list[str]:
    """The lines of a text, ended by line feeds alone: `str.splitlines` also ends them at U+2028 and
    other marks, which a string in JSON may hold."""
    *lines, last = text.split("\n")
    return [*lines, last] if last else lines
