"""Encodes texts part by part: splits them at added tokens, and looks up or encodes the parts
between these tokens.

A tokenizer first cuts a text at its added tokens, and the ids between two of them do not depend on
the rest. So a system prompt, or an earlier turn, has the same ids as in the last request that
contained it. For tokenizers where this is not true, `PartEncoder` encodes texts as a whole.
"""

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import tokenizers

from mainstem.text.any_of import AnyOf
from mainstem.text.control_tokens import MARK, cannot_be_text, without_marks
from mainstem.text.part_cache import PartCache

# the characters that \s matches in Rust
_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACES = re.compile(f"[{_SPACE}]*")
_A_SPACE = re.compile(f"[{_SPACE}]")

Backend = tokenizers.Tokenizer


@dataclass(frozen=True, slots=True)
class Pending:
    """The ids of a text, some of which are known; `finish` encodes the rest and returns all."""

    num_new_chars: int  # characters that must be encoded
    finish: Callable[[], list[int]]

    def after(self, ids: Sequence[int]) -> "Pending":
        """Return the same text with `ids` before its own."""
        return Pending(self.num_new_chars, lambda: [*ids, *self.finish()])


class PartEncoder:
    """Encodes marked texts (text/control_tokens.py): a control token with a mark is read as
    text."""

    def __init__(self, backend: Backend, control: frozenset[str]) -> None:
        self._backend = backend
        self._control = control
        self._added = {
            token.content: (token_id, token.lstrip, token.rstrip)
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._patterns = _patterns(backend, control)
        self.can_split = self._patterns is not None and all(len(text) > 1 for text in control)
        self._cache = PartCache()

    def look_up(self, text: str, salt: bytes) -> Pending:
        """Look up the ids of a text. Parts that were encoded before with this salt are not encoded
        again."""
        if not self.can_split:
            return Pending(len(text), lambda: self._encode_fenced(text))
        known: list[array[int] | None] = []
        missing: list[tuple[int, bool, str]] = []  # (place in `known`, is at the beginning, part)
        for part, token_id, is_first in self._split(text):
            if token_id is not None:
                known.append(array("i", (token_id,)))
                continue
            ids = self._cache.find((salt, is_first, part))
            if ids is None:
                missing.append((len(known), is_first, part))
            known.append(ids)

        def finish() -> list[int]:
            for (place, is_first, part), ids in zip(missing, self._encode(missing), strict=True):
                self._cache.add((salt, is_first, part), ids)
                known[place] = ids
            whole: list[int] = []
            for found in known:
                assert found is not None
                whole.extend(found)
            return whole

        return Pending(sum(len(part) for _, _, part in missing), finish)

    def prepare(self) -> None:
        """Do work for which the first request would otherwise wait."""
        if self.can_split:
            _ = self._plain_later, self._plain_first

    def check(self) -> None:
        self._cache.check()

    # --- parts ----------------------------------------------------------------------------------

    def _split(self, text: str) -> Iterator[tuple[str, int | None, bool]]:
        """Yield parts and added tokens in order, each as its text, the token's id (None for a
        part), and whether it is a part that begins the whole text."""
        assert self._patterns is not None
        first, second = self._patterns
        for start, end, token_id in self._cut(text, 0, len(text), first):
            if token_id is not None:
                yield text[start:end], token_id, False
                continue
            for inner, stop, inner_id in self._cut(text, start, end, second):
                yield text[inner:stop], inner_id, inner == 0

    def _cut(
        self, text: str, start: int, end: int, pattern: AnyOf
    ) -> Iterator[tuple[int, int, int | None]]:
        """Yield pieces of text[start:end] as (start, end, token id), cut as in the tokenizers
        library."""
        for match in pattern.matches(text, start, end):
            token_id, strips_left, strips_right = self._added[match[0]]
            begin, stop = match.span()
            while strips_left and begin > start and _A_SPACE.match(text, begin - 1):
                begin -= 1
            if strips_right:
                spaces = _SPACES.match(text, stop, end)
                assert spaces is not None
                stop = spaces.end()
            if begin > start:
                yield start, begin, None
            yield begin, stop, token_id
            start = stop
        if end > start:
            yield start, end, None

    def _encode(self, missing: Sequence[tuple[int, bool, str]]) -> list["array[int]"]:
        """Return the ids of each part. The interpreter lock is released while they are encoded."""
        by_backend: dict[int, tuple[Backend, list[int]]] = {}
        for place, (_, is_first, part) in enumerate(missing):
            backend = self._backend_for(is_first, MARK in part)
            by_backend.setdefault(id(backend), (backend, []))[1].append(place)
        found: list[array[int]] = [array("i")] * len(missing)
        for backend, places in by_backend.values():
            texts = [without_marks(missing[place][2]) for place in places]
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            for place, encoding in zip(places, encodings, strict=True):
                found[place] = array("i", encoding.ids)
        return found

    def _encode_fenced(self, text: str) -> list[int]:
        """Return the ids of a text that is not split; raises InvalidRequest if a control token
        extends over a mark."""
        plain = without_marks(text)
        if MARK not in text:
            return encode_whole(self._backend, plain)
        sizes = map(len, text.split(MARK)[:-1])
        edges = list(accumulate(sizes))
        [encoding] = self._backend.encode_batch([plain], add_special_tokens=False)
        ids: list[int] = encoding.ids
        acting = {self._added[token][0]: token for token in self._control}
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token_id in acting and bisect_right(edges, start) < bisect_left(edges, end):
                raise cannot_be_text(acting[token_id])
        return ids

    # --- tokenizers -----------------------------------------------------------------------------

    def _backend_for(self, is_first: bool, is_marked: bool) -> Backend:
        if is_first or not self._begins_differently:
            if not is_marked:
                return self._backend
            return self._plain_first
        return self._plain_later

    @cached_property
    def _begins_differently(self) -> bool:
        """Whether the tokenizer puts a space before the first part of a text, but not before the
        others."""
        pre_tokenizers = steps(self._backend.pre_tokenizer, "pretokenizers")
        return any(step.get("prepend_scheme") == "first" for step in pre_tokenizers)

    @cached_property
    def _plain_first(self) -> Backend:
        """The tokenizer that reads control tokens as text."""
        state = json.loads(self._backend.to_str())
        for token in state["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._control
        return _plain(state)

    @cached_property
    def _plain_later(self) -> Backend:
        """The same, for parts that do not begin a text."""
        if not self._begins_differently:
            return self._plain_first
        state = json.loads(self._plain_first.to_str())
        for step in _flat(state["pre_tokenizer"], "pretokenizers"):
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        return _plain(state)


def encode_whole(backend: Backend, text: str, add_special_tokens: bool = False) -> list[int]:
    """Return the ids of one text. `encode` would hold the interpreter lock all the time: 9 s for
    7.5 MB."""
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _plain(state: dict[str, object]) -> Backend:
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    return backend


def _patterns(backend: Backend, control: frozenset[str]) -> tuple[AnyOf, AnyOf] | None:
    """Return the patterns that find added tokens, first in the text and then in the normalized
    text; None if parts of a text cannot be encoded separately."""
    added = list(backend.get_added_tokens_decoder().values())
    normalized = [token.content for token in added if token.normalized]
    strips = any(token.lstrip or token.rstrip for token in added)
    is_random = getattr(backend.model, "dropout", None) not in (None, 0.0)
    if is_random or any(token.single_word for token in added):
        return None
    if strips and any(token.content != token.content.strip() for token in added):
        return None
    if steps(backend.normalizer, "normalizers"):
        if not control.isdisjoint(normalized):
            return None  # the tokenizer searches for them in normalized text, which is not split
        normalized = []  # the tokenizer finds these when it encodes their part
    plain = [token.content for token in added if not token.normalized]
    return AnyOf(plain), AnyOf(normalized)


def steps(component: object, inner: str) -> list[dict[str, object]]:
    """Return the steps of a normalizer or pre-tokenizer. A nested sequence is flattened; the list
    is empty if there is none."""
    if component is None:
        return []
    state = component.__getstate__()  # the library's own JSON
    assert isinstance(state, bytes)
    return _flat(json.loads(state), inner)


def _flat(state: dict[str, object], inner: str) -> list[dict[str, object]]:
    if state.get("type") != "Sequence":
        return [state]
    listed = state[inner]
    assert isinstance(listed, list)
    return [step for each in listed for step in _flat(each, inner)]
