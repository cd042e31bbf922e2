"""Files of clients: uploads, and the answers of batches.

    FOLDER/OWNER/file-ID.data    the bytes, complete before the .json file exists
    FOLDER/OWNER/file-ID.json    its record; without this, the file does not exist

Names of owners and ids are made by the server, so no path can lead out of the folder.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from time import time

from filelock import BaseFileLock, FileLock, Timeout

from mainstem.core.errors import ConfigError
from mainstem.core.files import FRESH, write_whole

HIDDEN = "message_batch"  # purpose of files that clients do not see: those of message batches
FILE_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file; `created` is in seconds since 1970."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created: int
    ttl_s: int | None = None  # when it expires, counted from `created`; None: with all others

    @property
    def is_hidden(self) -> bool:
        return self.purpose == HIDDEN

    def expires_s(self, ttl_s: float) -> float:
        """When it expires, if files live for `ttl_s`: never later than the others."""
        return self.created + (ttl_s if self.ttl_s is None else min(ttl_s, self.ttl_s))

    def to_json(self, ttl_s: float) -> dict[str, object]:
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created,
            "expires_at": int(self.expires_s(ttl_s)),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """The files of all owners. Methods block and are thread-safe: call them on a thread."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_fresh(folder)
        self._folder = folder
        for leftover in folder.glob("*/*.data"):
            if not leftover.with_suffix(".json").exists():
                leftover.unlink(missing_ok=True)  # its writer was killed

    @contextmanager
    def writing(self, owner: str, name: str | None = None) -> Iterator[tuple[str, Path]]:
        """Give the id of a new file, and the path for its bytes. The bytes are removed unless `put`
        is called. The same `name` gives the same id; without a name the id is new.
        """
        file_id = f"file-{token_hex(12)}" if name is None else named_id(name)
        path = self._path(owner, file_id, ".data")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            path.touch(mode=0o600)
            yield file_id, path
        finally:
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def put(
        self, owner: str, file_id: str, filename: str, purpose: str, ttl_s: int | None = None
    ) -> StoredFile:
        """Make a file visible, after its bytes were written."""
        path = self._path(owner, file_id, ".data")
        with path.open("rb") as data:
            os.fsync(data.fileno())
        num_bytes = path.stat().st_size
        stored = StoredFile(file_id, filename, purpose, num_bytes, int(time()), ttl_s)
        write_whole(path.with_suffix(".json"), json.dumps(asdict(stored)).encode())
        return stored

    def find(self, owner: str, file_id: str) -> StoredFile | None:
        """A file of this owner; None if there is none."""
        if not FILE_ID.fullmatch(file_id):
            return None
        return _read(self._path(owner, file_id, ".json"))

    def path(self, owner: str, file_id: str) -> Path:
        """The path of an existing file's bytes."""
        assert FILE_ID.fullmatch(file_id)
        return self._path(owner, file_id, ".data")

    def listed(self, owner: str) -> list[StoredFile]:
        """The owner's files, latest first."""
        found = [_read(path) for path in (self._folder / owner).glob("file-*.json")]
        files = [stored for stored in found if stored is not None]
        return sorted(files, key=lambda stored: (stored.created, stored.file_id), reverse=True)

    def expired(self, now_s: float, ttl_s: float) -> list[tuple[str, StoredFile]]:
        """Return the files that have expired, of all owners, including owners whose keys were
        removed."""
        owners = [folder.name for folder in self._folder.iterdir() if folder.is_dir()]
        files = [(owner, stored) for owner in owners for stored in self.listed(owner)]
        return [(owner, stored) for owner, stored in files if stored.expires_s(ttl_s) < now_s]

    def remove(self, owner: str, file_id: str) -> bool:
        """Remove a file; returns whether there was one."""
        if self.find(owner, file_id) is None:
            return False
        path = self._path(owner, file_id, ".json")
        path.unlink(missing_ok=True)
        path.with_suffix(".data").unlink(missing_ok=True)
        return True

    def _path(self, owner: str, file_id: str, suffix: str) -> Path:
        return self._folder / owner / f"{file_id}{suffix}"


def named_id(name: str) -> str:
    """The id of the file that is written under a name."""
    return f"file-{sha256(name.encode()).hexdigest()[:24]}"


def _read(path: Path) -> StoredFile | None:
    try:
        return StoredFile(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def remove_fresh(folder: Path) -> None:
    """Remove the leftovers, in the folders of owners, of a process that was killed in
    `write_whole`."""
    for leftover in folder.glob(f"*/*{FRESH}"):
        leftover.unlink(missing_ok=True)


def lock_folder(folder: Path) -> BaseFileLock:
    """Lock a folder against other processes until the result is released; any thread may do so."""
    lock = FileLock(folder / "lock", timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"another server is using the folder {folder}") from None
    except OSError as error:
        raise ConfigError(f"cannot write to the folder {folder}: {error.strerror}") from None
    return lock
