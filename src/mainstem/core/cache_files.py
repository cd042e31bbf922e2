"""Notes about files that lie elsewhere. Each note is a small file in the user's cache folder.

Nothing depends on them: if a note is missing, damaged or cannot be written, the program works
without it.
"""

from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from platform import node

from mainstem.core.environment import cache_dir
from mainstem.core.files import write_whole

MOST_FILES = 512  # files of one kind at most; the oldest are removed


def cache_file(kind: str, path: Path) -> Path:
    """Return the path of the note of this kind about `path`. The note need not exist."""
    place = f"{node()}\0{path.resolve()}".encode("utf-8", "surrogateescape")
    return cache_dir() / kind / sha256(place).hexdigest()[:32]


def write_cache_file(target: Path, text: str) -> None:
    """Replace a note as a whole; raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(target, text.encode("utf-8"))
    _keep_newest(target.parent)


def _keep_newest(folder: Path) -> None:
    found = list(folder.iterdir())
    if len(found) > MOST_FILES:
        with suppress(OSError):  # another process may remove the same files
            found.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in found[:-MOST_FILES]:
                path.unlink(missing_ok=True)
