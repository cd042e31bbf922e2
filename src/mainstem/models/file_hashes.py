"""SHA-256 of whole files, remembered until the file changes.

file ---> stamp: size, times, inode
            | the embedded model's manifest is newer than the file: the SHA-256 in it
            | a note with this stamp is in the user's cache folder: the SHA-256 in it
            v otherwise
          read every byte, and keep the hash as a note
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time_ns

from mainstem.core.cache_files import cache_file, write_cache_file
from mainstem.core.environment import cache_dir

KIND = "hashes"  # the folder of the notes
MANIFEST = "manifest.json"  # the manifest of an embedded model, written after all its files
TICK_NS = 2_000_000_000  # two changes within this time may leave the same mtime


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the file system says about a file. ctime is included because tools that copy files may
    restore mtime, but cannot set ctime."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> "Stamp":
        found = path.stat()
        return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    @property
    def of_contents(self) -> tuple[int, int, int]:
        """The stamp without ctime, which changes when a new link to the file is made."""
        return self.size, self.mtime_ns, self.inode

    @property
    def changed_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


def file_sha256(path: Path) -> bytes:
    """The hash of a file's bytes; raises OSError if it cannot be read."""
    stamp = Stamp.of(path)
    known = _from_manifest(path, stamp) or _noted(path, stamp)
    if known is not None:
        return known
    began_ns = time_ns()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if Stamp.of(path) == stamp and began_ns > stamp.changed_ns + TICK_NS:
        _note(path, stamp, digest)
    return digest


def _from_manifest(path: Path, stamp: Stamp) -> bytes | None:
    """The hash in the manifest of an embedded model, unless the file changed after the manifest was
    written. Only an embedded model's manifest is trusted."""
    if path.parent.parent != cache_dir() / "models":
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = path.parent / MANIFEST
        entry = json.loads(manifest.read_text())["files"][path.name]
        if entry["bytes"] == stamp.size and stamp.changed_ns <= manifest.stat().st_mtime_ns:
            return _sha256_from(entry["sha256"])
    return None


def _noted(path: Path, stamp: Stamp) -> bytes | None:
    """The noted hash for this stamp; None if there is none, or the note is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        note = json.loads(cache_file(KIND, path).read_text())
        check = note.pop("check")
        if check == _check(note) and note["stamp"] == asdict(stamp):
            return _sha256_from(note["sha256"])
    return None


def _note(path: Path, stamp: Stamp, digest: bytes) -> None:
    """Remember a hash, if the cache folder can be written."""
    note: dict[str, object] = {
        "path": str(path.resolve()),
        "stamp": asdict(stamp),
        "sha256": digest.hex(),
    }
    note["check"] = _check(note)
    with suppress(OSError):
        write_cache_file(cache_file(KIND, path), json.dumps(note))


def _check(note: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


def _sha256_from(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"{text} is not a SHA-256")
    return digest
