"""IdSet: millions of names in little memory."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

RECENT = 1 << 16  # names kept in a plain set before they are packed


class IdSet:
    """A set of strings that supports `add` and `in`, at 16 bytes each.

    Names are kept as 128-bit hashes: among a billion names, the chance of a collision is 1e-21.
    Hashes are in sorted runs, which are merged when two have similar sizes, as in an LSM tree.
    """

    def __init__(self) -> None:
        self._recent: set[bytes] = set()
        self._runs: list[NDArray[np.bytes_]] = []  # sorted; each at least twice as long as the next

    def __len__(self) -> int:
        return len(self._recent) + sum(len(run) for run in self._runs)

    def __contains__(self, name: str) -> bool:
        if not self._recent and not self._runs:
            return False
        return self._has(_digest(name))

    def add(self, name: str) -> bool:
        """Add a name; False if it was there already."""
        digest = _digest(name)
        if self._has(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) == RECENT:
            self._pack()
        return True

    def _has(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        wanted = np.array(digest, dtype="S16")
        for run in self._runs:
            place = int(np.searchsorted(run, wanted))
            if place < len(run) and run[place] == wanted:
                return True
        return False

    def _pack(self) -> None:
        self._runs.append(np.sort(np.array(list(self._recent), dtype="S16")))
        self._recent.clear()
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(np.sort(np.concatenate([older, newer]), kind="stable"))


def _digest(name: str) -> bytes:
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
