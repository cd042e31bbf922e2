"""One turn of a session: its prompt extends the ids of the turns before, its answer is kept."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from mainstem.core.ids import SessionId
from mainstem.server.auth import Tenant
from mainstem.text.encoding import App, Prompt, encode_prompt, prompt_text
from mainstem.text.sessions import Sessions, continued_ids, spoken_text
from mainstem.text.tokenizer import Tokenizer


def owner_of(tenant: Tenant) -> str:
    """Whose sessions a tenant finds; derived from its key, so another key finds others."""
    return sha256(b"mainstem sessions\0" + tenant.salt).hexdigest()


class Turn:
    """Made and ended on the event loop; `encode` may run on any thread."""

    def __init__(
        self, sessions: Sessions, tenant: Tenant, session_id: str, tokenizer: Tokenizer
    ) -> None:
        self._sessions = sessions
        self._owner = owner_of(tenant)
        self._session_id = session_id
        self._session = sessions.find(self._owner, session_id)
        self._tokenizer = tokenizer
        self._text = ""
        self._prompt_ids: list[int] = []

    @property
    def engine_id(self) -> SessionId:
        """The session's name for the engine: no other tenant's session has the same."""
        return SessionId(f"{self._owner} {self._session_id}")

    def encode(self, prompt: Prompt, app: App | None) -> list[int]:
        """Ids of the prompt; raises InvalidRequest when the chat template refuses it."""
        text = prompt_text(self._tokenizer, prompt, app)
        ids = None
        if text is not None:
            ids = continued_ids(self._session, text, self._tokenizer)
        if ids is None:
            ids = encode_prompt(self._tokenizer, prompt, app)
        self._text = self._tokenizer.decode_all(ids) if text is None else text
        self._prompt_ids = ids
        return ids

    def end(self, output_ids: Sequence[int]) -> None:
        """The answer is complete: keep the conversation."""
        token_ids = np.array([*self._prompt_ids, *output_ids], np.int32)
        text = spoken_text(self._text, list(output_ids), self._tokenizer)
        self._sessions.keep(self._owner, self._session_id, token_ids, text)
