"""The folder of a disk store: readable by its owner only, used by one process at a time."""

import fcntl
import os
from pathlib import Path

from mainstem.core.errors import StoreError

LOCK = "lock"


class StoreFolder:
    """Holds the folder's lock until `close`; the system frees it when the process dies."""

    def __init__(self, path: Path) -> None:
        """Make the folder (mode 0700) and lock it. If another process has the lock, StoreError
        names that process."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)
            self._file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot use {path} for pages: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._file, 32).decode(errors="replace").strip()
            os.close(self._file)
            raise StoreError(
                f"{path} is in use by process {owner or 'unknown'}; "
                "two processes cannot share a store"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._file)
