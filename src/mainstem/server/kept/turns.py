"""One turn of a session: its prompt extends the ids of earlier turns, and its answer is kept."""

from collections.abc import Sequence

import numpy as np

from mainstem.core.ids import SessionId
from mainstem.text.encoding import BegunPrompt
from mainstem.text.sessions import Sessions, spoken_chat, spoken_text
from mainstem.text.tokenizer import Tokenizer


class SessionTurn:
    """A turn. It is made and ended on the event loop; `begin` may run on any thread."""

    def __init__(
        self, sessions: Sessions, owner: str, session_id: str, tokenizer: Tokenizer
    ) -> None:
        self._sessions = sessions
        self._owner = owner
        self._session_id = session_id
        self.session = sessions.find(owner, session_id)
        self._tokenizer = tokenizer
        self._spoken = spoken_text
        self._text = ""
        self._prompt_ids: list[int] = []

    @property
    def engine_id(self) -> SessionId:
        """The session's name for the engine, which no session of another tenant has."""
        return SessionId(f"{self._owner} {self._session_id}")

    def begin(self, prompt: BegunPrompt, prompt_ids: list[int]) -> None:
        """Record the prompt of this turn, and its ids."""
        text = prompt.text
        self._text = self._tokenizer.decode_all(prompt_ids) if text is None else text
        self._spoken = spoken_chat if prompt.is_chat else spoken_text
        self._prompt_ids = prompt_ids

    def end(self, output_ids: Sequence[int]) -> None:
        """Keep the conversation, after the answer is complete."""
        token_ids = np.array([*self._prompt_ids, *output_ids], np.int32)
        text = self._spoken(self._text, output_ids, self._tokenizer)
        self._sessions.keep(self._owner, self._session_id, token_ids, text)
