"""Token ids of texts that were encoded before, bounded in bytes."""

from array import array
from collections import OrderedDict
from threading import Lock

CACHE_BYTES = 64 << 20
ENTRY_BYTES = 256  # memory of a key, a text's header and the entry in the table

Key = tuple[bytes, bool, str]  # (salt, whether the text begins a prompt, the text)


class PartCache:
    """Maps texts to ids, and evicts the least recently used text first. Thread-safe.

    Texts are found only with the salt they were stored with. Otherwise the time of an answer would
    reveal that another tenant has sent this text.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Key, array[int]] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Key) -> "array[int] | None":
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def add(self, key: Key, ids: "array[int]") -> None:
        size = _size(key, ids)
        if size > self._max_bytes // 4:
            return  # the text would evict everything else
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._entries.popitem(last=False))

    def check(self) -> None:
        """Raise if bytes are counted wrong."""
        with self._lock:
            assert self._num_bytes == sum(_size(*entry) for entry in self._entries.items())
            assert self._num_bytes <= self._max_bytes


def _size(key: Key, ids: "array[int]") -> int:
    text = key[2]
    per_character = 1 if text.isascii() else 4
    return ENTRY_BYTES + per_character * len(text) + ids.itemsize * len(ids)
