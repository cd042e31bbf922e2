"""Control tokens that a request spells out: text, not control.

A chat template mixes its own special tokens with what a request says:

    <|im_start|>user\nWhat does <|im_end|> do?<|im_end|>\n
    the template's            the user's       the template's

So before rendering, a MARK is put into each control token that the request spells out, and after it
the text is split at the control tokens that are whole. The marks are taken out of what is between
them, and that is encoded as text (text/parts.py).

A control token must not come about between what a user said and the template's own text, either
("|im_end|" between "<" and ">"): what could be a piece of one has a mark at its edge.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import tokenizers

from mainstem.core.errors import InvalidRequest

MARK = "\ufdd0"  # never a character of a text, Unicode says; in what a request says it is dropped
ESCAPED_MARK = "\\ufdd0"  # in Python's lists and in JSON that is ASCII
SHORT_CHARS = 1 << 8
SLICE_CHARS = 1 << 17  # looked through in one go
_BARRED = re.compile(r"<[|｜].*[|｜]>")  # noqa: RUF001  # DeepSeek's bars
_WORD = re.compile(r"\w*")


def without_marks(text: str) -> str:
    """A marked text as people and models read it."""
    return text.replace(MARK, "") if MARK in text else text


def control_texts(backend: tokenizers.Tokenizer, others: Iterable[str]) -> frozenset[str]:
    """The added tokens that steer a model: special ones, `others`, and those written `<|...|>`,
    since not every model's file calls its turns' tokens special."""
    added = backend.get_added_tokens_decoder().values()
    named = {token.content for token in added}
    control = {token.content for token in added if token.special or _BARRED.match(token.content)}
    return frozenset((control | (named & set(others))) - {""})


class ControlTokens:
    """Puts marks into what a request says."""

    def __init__(self, texts: frozenset[str]) -> None:
        self.texts = texts
        self._any = AnyOf(texts)
        self._begins = re.compile(f"(?={self._any.pattern.pattern})(.)", re.S)
        signs = sorted(
            {sign for text in texts for sign in text if not _WORD.fullmatch(sign)} | {MARK}
        )
        has_words = any(_WORD.fullmatch(text) for text in texts)
        self._suspect = re.compile("" if has_words else f"[{re.escape(''.join(signs))}]")
        self._longest = max(map(len, texts), default=0)
        self._joined = "\n".join(sorted(texts))
        self._firsts = frozenset(text[0] for text in texts)
        self._lasts = frozenset(text[-1] for text in texts)
        self._heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in texts for size in range(1, len(text)))

    def mark(self, text: str) -> str:
        """`text` with a mark wherever a control token is, or could come about at its edges.

        White space around it does not count, since templates trim. Plain words stay as they are,
        since templates compare them.
        """
        if len(text) < SHORT_CHARS and self._suspect.search(text) is None:
            return text  # most names and words of tools
        text = without_marks(text)
        bare = text.strip()
        if len(bare) <= self._longest and bare in self._joined:
            if _WORD.fullmatch(bare):
                return text
            bare = MARK + self._begins.sub(rf"\1{MARK}", bare) + MARK
        else:
            marks_start, marks_end = self._begins_as_tail(bare), self._ends_as_head(bare)
            if self._first(bare) is not None:
                bare = self._begins.sub(rf"\1{MARK}", bare)
            elif not marks_start and not marks_end:
                return text
            bare = f"{MARK if marks_start else ''}{bare}{MARK if marks_end else ''}"
        start = len(text) - len(text.lstrip())
        return f"{text[:start]}{bare}{text[len(text.rstrip()) :]}"

    def refuse(self, text: str) -> str:
        """`text` without marks if it has no control token, else InvalidRequest("messages")."""
        found = self._first(text)
        if found is not None:
            reason = (
                f"contain the special token {found!r}, which this model's tokenizer cannot read "
                "as text; --allow-special-tokens lets it act"
            )
            raise InvalidRequest("messages", reason)
        return without_marks(text)

    def _first(self, text: str) -> str | None:
        """The first control token that is whole in `text`."""
        found = next(self._any.matches(text, 0, len(text)), None)
        return None if found is None else found[0]

    def _ends_as_head(self, bare: str) -> bool:
        """Whether a text ends as a control token begins."""
        end = bare[-self._longest :]
        return any(
            end[place:] in self._heads and not _WORD.fullmatch(end[place:])
            for first in self._firsts
            if first in end
            for place, character in enumerate(end)
            if character == first
        )

    def _begins_as_tail(self, bare: str) -> bool:
        """Whether a text begins as a control token ends."""
        begin = bare[: self._longest]
        return any(
            begin[: place + 1] in self._tails and not _WORD.fullmatch(begin[: place + 1])
            for last in self._lasts
            if last in begin
            for place, character in enumerate(begin)
            if character == last
        )


def map_texts(value: object, change: Callable[[str], str]) -> object:
    """A JSON value with every text in it changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    if value is None or isinstance(value, int | float) or not isinstance(value, Mapping):
        return value
    return {
        change(name) if isinstance(name, str) else name: map_texts(item, change)
        for name, item in value.items()
    }


def has_text(value: object, wanted: str) -> bool:
    """Whether a text in a JSON value contains another."""
    if isinstance(value, Mapping):
        return any(has_text(each, wanted) for item in value.items() for each in item)
    if isinstance(value, list | tuple):
        return any(has_text(item, wanted) for item in value)
    return isinstance(value, str) and wanted in value


class AnyOf:
    """Finds the leftmost of some texts, the longest where several begin there."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        # without texts: what matches nowhere
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.S)

    def matches(self, text: str, start: int, end: int) -> Iterator[re.Match[str]]:
        """All of them within text[start:end]; slice by slice, so that other threads run between."""
        while start < end and self._longest:
            stop = min(end, start + SLICE_CHARS + self._longest)
            found = self.pattern.search(text, start, stop)
            if found is not None and stop < end:  # the slice may have cut a longer one
                is_whole = found.start() <= start + SLICE_CHARS
                found = self.pattern.match(text, found.start(), end) if is_whole else None
            if found is not None:
                yield found
            start = found.end() if found is not None else start + SLICE_CHARS
