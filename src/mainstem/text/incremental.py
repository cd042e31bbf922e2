"""Turns ids into text one by one: knows how a vocabulary writes bytes, and when a character is
complete."""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import tokenizers


class TokenAlphabet:
    """How a vocabulary writes bytes: byte-level BPE, or sentencepiece with byte tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        steps = _decoder_steps(backend)
        self.is_byte_level = steps == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in steps
        self._byte_of = byte_level_characters() if self.is_byte_level else {}

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte, which may be part of a character."""
        token = self._backend.id_to_token(token_id) if self._has_byte_tokens else None
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def token_bytes(self, token_id: int) -> bytes:
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._spell(self._backend.id_to_token(token_id) or "")
        return known

    def _spell(self, token: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes(self._byte_of[character] for character in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the kinds of the decoder's steps: one, or all of a sequence; none if there is no
    decoder."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    inner = state.get("decoders", [state])
    return [str(step["type"]) for step in inner]


def byte_level_characters() -> dict[str, int]:
    """Return GPT-2's table: printable bytes are written as themselves, the others as characters
    from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class IncrementalDecoder(Protocol):
    """Turns ids into text. Text that a later id may still change is held back."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteDecoder:
    """For byte-level vocabularies: concatenate bytes, decode UTF-8 as it becomes complete."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For all other decoders: returns the text of (last token + new tokens) without the text of the
    last token.

    One token of context is enough: decoders treat only the first token of a text specially (its
    leading space is dropped). A run of byte tokens is decoded when it has ended, because one bad
    byte turns the whole run into replacement characters.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_byte: Callable[[int], bool],
        context: Sequence[int],
    ) -> None:
        self._decode = decode
        self._is_byte = is_byte
        self._last = [token_id for token_id in context if not is_byte(token_id)][-1:]
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        return "" if self._is_byte(token_id) else self.finish()

    def finish(self) -> str:
        if not self._pending:
            return ""
        known = self._decode(self._last)
        whole = self._decode([*self._last, *self._pending])
        self._last = [self._pending[-1]]
        self._pending = []
        return whole[len(known) :]
