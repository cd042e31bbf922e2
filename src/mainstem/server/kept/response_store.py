"""Keeps responses, for `GET /v1/responses/ID` and for requests that continue them by id; and chats
that were answered with `store: true`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time

import msgspec

from mainstem.core.json import Json
from mainstem.server.http.limits import ServerLimits
from mainstem.text.kept_file import KeptFile, KeptTable, Key

Item = dict[str, object]

RECORD_BYTES = 1024  # approximate memory of a record besides its JSON
CHAT_PREFIX = "chatcmpl-"  # of the ids of chats

_STATEMENT = """CREATE TABLE IF NOT EXISTS responses (owner TEXT, response_id TEXT,
    previous_id TEXT, session_id TEXT, data BLOB, used_s REAL, PRIMARY KEY (owner, response_id))"""


class Exchanged(msgspec.Struct, frozen=True):
    """Input and output of a response, or of a chat, as stored in JSON."""

    input: list[Item]  # items, or a chat's messages; only those of this request, not earlier ones
    response: Json
    at_s: float = 0.0  # when a chat was answered, in seconds since 1970

    @property
    def items(self) -> list[Item]:
        """The items that this response adds to the conversation."""
        output = self.response["output"]
        assert isinstance(output, list)
        return [*self.input, *output]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response and its input, as JSON."""

    response_id: str
    previous_id: str | None
    session_id: str  # named after the first response of the conversation
    data: bytes
    used_s: float  # seconds since 1970

    @property
    def is_chat(self) -> bool:
        return self.response_id.startswith(CHAT_PREFIX)

    def read(self) -> Exchanged:
        return msgspec.json.decode(self.data, type=Exchanged)

    @property
    def num_bytes(self) -> int:
        return len(self.data) + RECORD_BYTES


@dataclass(slots=True)
class _Shelf:
    """The responses of one owner, least recently used first."""

    kept: dict[str, KeptResponse] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """Responses by owner; no owner finds another's. One thread uses it.

    When it is full, the owner with the most responses, or with the most bytes, loses its least
    recently used ones.
    """

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time) -> None:
        self._limits = limits
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self._count = 0
        self._num_bytes = 0
        self._changed: set[Key] = set()  # changed since the last `take_changes`

    def __len__(self) -> int:
        return self._count

    def find(self, owner: str, response_id: str) -> KeptResponse | None:
        self._forget_old(owner)
        return self._at(owner, response_id)

    def chain(self, owner: str, response_id: str) -> list[KeptResponse] | None:
        """The responses of a conversation, from the first up to this one, all marked as used now.
        None: one of them is missing."""
        found: list[KeptResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            kept = self.find(owner, wanted)
            if kept is None:
                return None
            found.append(kept)
            wanted = kept.previous_id
        found.reverse()
        for kept in found:
            self._put(owner, replace(kept, used_s=self._clock()))
        return found

    def chats(self, owner: str) -> list[KeptResponse]:
        """The owner's stored chats, in no certain order."""
        self._forget_old(owner)
        shelf = self._shelves.get(owner)
        return [] if shelf is None else [each for each in shelf.kept.values() if each.is_chat]

    def keep(
        self,
        owner: str,
        response_id: str,
        previous_id: str | None,
        session_id: str,
        exchanged: Exchanged,
    ) -> None:
        data = msgspec.json.encode(exchanged)
        self._put(owner, KeptResponse(response_id, previous_id, session_id, data, self._clock()))
        self._forget_old(owner)
        self._make_room()

    def _make_room(self) -> None:
        limits = self._limits
        while self._count > limits.kept_responses:
            self._forget_oldest(lambda shelf: len(shelf.kept))
        while self._num_bytes > limits.response_bytes:
            self._forget_oldest(lambda shelf: shelf.num_bytes)

    def remove(self, owner: str, response_id: str) -> KeptResponse | None:
        """Forget a response; returns it if there was one."""
        shelf = self._shelves.get(owner)
        kept = None if shelf is None else shelf.kept.pop(response_id, None)
        if shelf is None or kept is None:
            return None
        shelf.num_bytes -= kept.num_bytes
        self._num_bytes -= kept.num_bytes
        self._count -= 1
        self._changed.add((owner, response_id))
        if not shelf.kept:
            del self._shelves[owner]
        return kept

    def _put(self, owner: str, kept: KeptResponse) -> None:
        self.remove(owner, kept.response_id)
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.kept[kept.response_id] = kept
        shelf.num_bytes += kept.num_bytes
        self._num_bytes += kept.num_bytes
        self._count += 1
        self._changed.add((owner, kept.response_id))

    def _forget_oldest(self, size: Callable[[_Shelf], int]) -> None:
        owner = max(self._shelves, key=lambda each: size(self._shelves[each]))
        self.remove(owner, next(iter(self._shelves[owner].kept)))

    def _forget_old(self, owner: str) -> None:
        oldest_s = self._clock() - self._limits.response_ttl_s
        while (shelf := self._shelves.get(owner)) is not None:
            first = next(iter(shelf.kept.values()))
            if first.used_s >= oldest_s:
                return
            self.remove(owner, first.response_id)

    # --- on disk --------------------------------------------------------------------------------

    def restore(self, saved: Mapping[Key, KeptResponse]) -> None:
        """Add responses that an earlier process saved, least recently used first."""
        for (owner, _), kept in saved.items():
            self._put(owner, kept)
        self._changed = set()
        self._make_room()

    def take_changes(self) -> dict[Key, KeptResponse | None]:
        """Responses that changed since the last call; None: the response was removed."""
        for owner in list(self._shelves):
            self._forget_old(owner)
        changes = {(owner, name): self._at(owner, name) for owner, name in self._changed}
        self._changed = set()
        return changes

    def put_back(self, changes: Iterable[Key]) -> None:
        """Mark responses as changed again, because they could not be saved."""
        self._changed.update(changes)

    def _at(self, owner: str, response_id: str) -> KeptResponse | None:
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.kept.get(response_id)

    def check(self) -> None:
        """Raise if a count or the order is wrong."""
        for shelf in self._shelves.values():
            used_s = [kept.used_s for kept in shelf.kept.values()]
            assert used_s == sorted(used_s), "the least recently used is not the first"
            assert shelf.num_bytes == sum(kept.num_bytes for kept in shelf.kept.values())
        assert self._count == sum(len(shelf.kept) for shelf in self._shelves.values())
        assert self._num_bytes == sum(shelf.num_bytes for shelf in self._shelves.values())


def response_file(path: Path) -> KeptFile[KeptResponse]:
    """A file of responses."""
    return KeptFile(path, _TABLE)


def _columns(kept: KeptResponse) -> tuple[object, ...]:
    return (kept.response_id, kept.previous_id, kept.session_id, kept.data, kept.used_s)


_TABLE = KeptTable("responses", "response_id", (_STATEMENT,), KeptResponse, _columns)
