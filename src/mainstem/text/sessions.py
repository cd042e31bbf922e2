"""Conversations with several turns: a session keeps the token ids of all turns so far.

A client sends its whole conversation each turn, as text. Encoding the model's own answer again may
give other ids than the model produced, and the cached pages would not be found. So a session
remembers the ids and the text they stand for: a turn that begins with this text extends the ids.

Sessions hold no pages: the store does. If pages were evicted, a turn is computed like any other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import time

from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s
from mainstem.text.kept_file import Key
from mainstem.text.tokenizer import Tokenizer

MAX_SESSION_TOKENS = 1 << 20  # a longer conversation is not kept


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation so far. Times are seconds since 1970."""

    session_id: str
    token_ids: Int32s
    text: str  # the text of the ids, with special tokens written out
    num_turns: int
    created_s: float
    used_s: float


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much is kept. Above these limits, the least recently used sessions are dropped."""

    ttl_s: float = 86_400.0
    max_sessions: int = 10_000
    max_tokens: int = 1 << 26  # of all sessions

    def __post_init__(self) -> None:
        if self.ttl_s <= 0 or self.max_sessions < 1 or self.max_tokens < 1:
            raise ConfigError("the limits of sessions must be above 0")


class Sessions:
    """All sessions, by owner. One thread at a time uses it.

    An owner is a secret that identifies a tenant; no owner finds another's session.
    """

    def __init__(self, limits: SessionLimits, clock: Callable[[], float] = time) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: dict[Key, Session] = {}  # least recently used first
        self.num_tokens = 0
        self._changed: set[Key] = set()  # changed since the last `take_changes`

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, owner: str, session_id: str) -> Session | None:
        self._forget_old()
        return self._sessions.get((owner, session_id))

    def listed(self, owner: str) -> list[Session]:
        """An owner's sessions, the latest used first."""
        self._forget_old()
        own = [session for key, session in self._sessions.items() if key[0] == owner]
        return own[::-1]

    def keep(self, owner: str, session_id: str, token_ids: Int32s, text: str) -> None:
        """Keep the whole conversation after a turn has ended."""
        before = self.remove(owner, session_id)
        if len(token_ids) > MAX_SESSION_TOKENS:
            return
        now_s = self._clock()
        num_turns = 1 if before is None else before.num_turns + 1
        created_s = now_s if before is None else before.created_s
        session = Session(session_id, token_ids, text, num_turns, created_s, now_s)
        self._changed.add((owner, session_id))
        self._add((owner, session_id), session)

    def remove(self, owner: str, session_id: str) -> Session | None:
        """Forget a session; returns it if there was one."""
        session = self._sessions.pop((owner, session_id), None)
        if session is not None:
            self.num_tokens -= len(session.token_ids)
            self._changed.add((owner, session_id))
        return session

    def _add(self, key: Key, session: Session) -> None:
        self._sessions[key] = session
        self.num_tokens += len(session.token_ids)
        limits = self._limits
        while len(self._sessions) > limits.max_sessions or self.num_tokens > limits.max_tokens:
            self.remove(*next(iter(self._sessions)))

    def _forget_old(self) -> None:
        oldest_s = self._clock() - self._limits.ttl_s
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.used_s >= oldest_s:
                return
            self.remove(*key)

    # --- on disk --------------------------------------------------------------------------------

    def restore(self, saved: Mapping[Key, Session]) -> None:
        """Add sessions that an earlier process saved, least recently used first."""
        for key, session in saved.items():
            self._add(key, session)
        self._forget_old()

    def take_changes(self) -> dict[Key, Session | None]:
        """Sessions that changed since the last call; None: the session was removed."""
        self._forget_old()
        changes = {key: self._sessions.get(key) for key in self._changed}
        self._changed = set()
        return changes

    def put_back(self, changes: Iterable[Key]) -> None:
        """Mark sessions as changed again, because they could not be saved."""
        self._changed.update(changes)

    def check(self) -> None:
        """Raise if tokens are counted wrong or the order is wrong."""
        sessions = list(self._sessions.values())
        assert self.num_tokens == sum(len(session.token_ids) for session in sessions)
        used_s = [session.used_s for session in sessions]
        assert used_s == sorted(used_s), "the least recently used is not the first"


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return a hash; tokenizers with the same hash give the same ids."""
    return sha256(tokenizer.to_json().encode()).hexdigest()


def said_before(session: Session | None, text: str, tokenizer: Tokenizer) -> Int32s | None:
    """Return the session's ids if `text` begins with `session.text` and the tokenizer can continue
    a text; otherwise None."""
    if session is None or not tokenizer.can_continue or not text.startswith(session.text):
        return None
    return session.token_ids


def spoken_text(prompt_text: str, output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a turn: its prompt and the whole answer, with special tokens written
    out."""
    decoder = tokenizer.incremental_decoder(())
    pieces = [decoder.push(token_id) for token_id in output_ids]
    return "".join([prompt_text, *pieces, decoder.finish()])


def spoken_chat(prompt_text: str, output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Like `spoken_text`, for a chat. Special tokens that the model spelled out are marked in the
    same way as when the client sends the answer back."""
    ends = [place for place, token in enumerate(output_ids) if tokenizer.is_control(token)]
    said = [prompt_text]
    start = 0
    for end in [*ends, len(output_ids)]:
        said.append(tokenizer.mark(spoken_text("", output_ids[start:end], tokenizer)))
        said.append(spoken_text("", output_ids[end : end + 1], tokenizer))
        start = end + 1
    return "".join(said)
