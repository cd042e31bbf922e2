"""Reads and writes JSON lines as bytes. A file is compressed if its name ends in .gz or .zst.
The name "-" means standard input or output.

Compressed output is one stream that is flushed after every line, so after a kill it can be read up
to the last whole line.
"""

import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from stat import S_ISREG
from types import ModuleType
from typing import Protocol

from mainstem.core.errors import ConfigError, InvalidRequest, MainstemError

MAX_LINE_BYTES = 1 << 26  # far more than any context window can hold
RAW_BYTES = 1 << 14  # read at once from a compressed file
GZIP_WINDOW = 31  # zlib: the largest window, in gzip's format
STANDARD = "-"
LINES_PER_LOOK = 64  # between two updates of an input's progress


class FileFault(MainstemError):
    """A file failed while the job ran, or no worker is left; what was written before is safe."""


class Unpack(Protocol):
    """A decompressor of one frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class Pack(Protocol):
    """A compressor of one frame."""

    def line(self, data: bytes) -> bytes:
        """Compress a line. The returned bytes are flushed: a reader can decompress all lines so
        far."""

    def end(self) -> bytes:
        """Bytes that end the frame."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an input; `data` is None if it is longer than MAX_LINE_BYTES, or if the row of a
    table gives no request: `fault` says why."""

    number: int  # from 1
    data: bytes | None
    fault: str | None = None


# --- reading -------------------------------------------------------------------------------------


class InputFile:
    """The lines of an input, read once. One thread reads; others may ask for `progress`.

    Raises InvalidRequest if the file cannot be opened, and FileFault if it cannot be read later.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        new_unpack = unpacker(name)  # reports a missing package before the file is opened
        try:
            if name == STANDARD:
                self._raw = io.FileIO(0, "rb", closefd=False)
            else:
                self._raw = io.FileIO(name, "rb")
        except OSError as error:
            raise InvalidRequest(name, error.strerror or str(error)) from None
        status = os.fstat(self._raw.fileno())
        self._num_bytes = status.st_size if S_ISREG(status.st_mode) else None
        self._bytes_read = 0
        self._stream = buffered(self._raw, new_unpack)

    def is_same_file(self, name: str) -> bool:
        """Whether `name` is this very file."""
        if STANDARD in (name, self.name) or not Path(name).exists():
            return False
        return os.path.samestat(os.fstat(self._raw.fileno()), os.stat(name))

    @property
    def progress(self) -> float | None:
        """The part of the file's bytes read so far; None if its size is not known."""
        return min(1.0, self._bytes_read / self._num_bytes) if self._num_bytes else None

    def __iter__(self) -> Iterator[Line]:
        number = 0
        try:
            while data := self._stream.readline(MAX_LINE_BYTES):
                number += 1
                if self._num_bytes and number % LINES_PER_LOOK == 0:
                    self._bytes_read = self._raw.tell()
                is_whole = len(data) < MAX_LINE_BYTES or data.endswith(b"\n")
                while len(data) == MAX_LINE_BYTES and not data.endswith(b"\n"):
                    data = self._stream.readline(MAX_LINE_BYTES)
                yield Line(number, data if is_whole else None)
            if self._num_bytes:
                self._bytes_read = self._raw.tell()
            self._check_size()
        except (OSError, EOFError, unpack_error(self.name)) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise FileFault(f"cannot read {self.name} after line {number}: {reason}") from None

    def close(self) -> None:
        """Close the file; a thread that is reading it gets an error."""
        self._raw.close()

    def _check_size(self) -> None:
        if self._num_bytes and os.fstat(self._raw.fileno()).st_size < self._num_bytes:
            raise EOFError("it became shorter while it was read")


def buffered(raw: io.FileIO, new_unpack: Callable[[], Unpack] | None) -> io.BufferedReader:
    """The (decompressed) bytes of a file; raises EOFError if a compressed file is cut off."""
    if new_unpack is None:
        return io.BufferedReader(raw, 1 << 18)
    return io.BufferedReader(_Unpacked(raw, new_unpack), 1 << 18)


class _Unpacked(io.RawIOBase):
    """The contents of a compressed file, frame after frame."""

    def __init__(self, raw: io.FileIO, new_unpack: Callable[[], Unpack]) -> None:
        self._raw = raw
        self._new_unpack = new_unpack
        self._unpack: Unpack | None = None  # None between frames
        self._left = b""  # decompressed, not returned yet
        self._packed = b""  # read, not decompressed yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # BufferedReader's own buffer
        while not self._left:
            packed = self._packed or self._raw.read(RAW_BYTES) or b""
            self._packed = b""
            if not packed:
                if self._unpack is not None:
                    raise EOFError("the compressed data is cut off")
                return 0
            unpack = self._unpack = self._unpack or self._new_unpack()
            self._left = unpack.decompress(packed)
            if unpack.eof:
                self._unpack, self._packed = None, unpack.unused_data
        size = min(len(view), len(self._left))
        view[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


# --- compression ---------------------------------------------------------------------------------


class _GzipPack:
    def __init__(self) -> None:
        self._packer = zlib.compressobj(wbits=GZIP_WINDOW)

    def line(self, data: bytes) -> bytes:
        return self._packer.compress(data) + self._packer.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._packer.flush()


class _ZstdPack:
    def __init__(self) -> None:
        zstandard = _zstandard()
        self._flush_block: int = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        self._packer = zstandard.ZstdCompressor().compressobj()

    def line(self, data: bytes) -> bytes:
        packed: bytes = self._packer.compress(data) + self._packer.flush(self._flush_block)
        return packed

    def end(self) -> bytes:
        packed: bytes = self._packer.flush()
        return packed


def new_pack(name: str) -> Pack | None:
    """A compressor for an output of this name; None for plain files."""
    if name.endswith(".gz"):
        return _GzipPack()
    return _ZstdPack() if name.endswith(".zst") else None


def unpacker(name: str) -> Callable[[], Unpack] | None:
    """A factory of decompressors for a file of this name; None for plain files."""
    if name.endswith(".gz"):
        return lambda: zlib.decompressobj(wbits=GZIP_WINDOW)
    if name.endswith(".zst"):
        make: Callable[[], Unpack] = _zstandard().ZstdDecompressor().decompressobj
        return make
    return None


def unpack_error(name: str) -> type[Exception]:
    """The exception that a decompressor raises for bytes that are not in its format."""
    if name.endswith(".zst"):
        error: type[Exception] = _zstandard().ZstdError
        return error
    return zlib.error


def _zstandard() -> ModuleType:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "a .zst file needs the package zstandard: pip install zstandard"
        ) from None
