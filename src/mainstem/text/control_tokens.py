"""Control tokens that a request spells out are read as text, not as control tokens.

A chat template mixes its own special tokens with the request's text:

    <|im_start|>user\nWhat does <|im_end|> do?<|im_end|>\n
    the template's            the user's       the template's

So before rendering, a MARK is put into each control token that the request spells out. After
rendering, the text is split at the control tokens without a mark. The text between them, without
its marks, is encoded as text (text/parts.py).

The user's text and the template's text together must not form a control token, either ("|im_end|"
between "<" and ">"). So text that could be a piece of a control token gets a mark at its edge.

Some tokenizers cannot read a control token as text (text/parts.py says which). With these, a
request that spells one out is refused, even if its text becomes a control token only when the
tokenizer normalizes it ("<|IM_END|>", with a tokenizer that ignores case). Other text gets marks at
both edges (`fence`), and a request is refused if a control token extends over a mark.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

import tokenizers

from mainstem.core.errors import InvalidRequest
from mainstem.text.any_of import AnyOf

MARK = "\ufdd0"  # a Unicode noncharacter; removed from requests that contain it
ESCAPED_MARK = "\\ufdd0"  # how Python lists and ASCII JSON print it
SHORT_CHARS = 1 << 8
_BARRED = re.compile(r"<[|｜].*[|｜]>")  # noqa: RUF001  # DeepSeek's bars
_WORD = re.compile(r"\w*")


def without_marks(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "") if MARK in text else text


def control_texts(backend: tokenizers.Tokenizer, others: Iterable[str]) -> frozenset[str]:
    """Return the added tokens that control a model: special tokens, `others`, and tokens written
    `<|...|>`, since some models do not declare their turn markers as special."""
    added = backend.get_added_tokens_decoder().values()
    named = {token.content for token in added}
    control = {token.content for token in added if token.special or _BARRED.match(token.content)}
    return frozenset((control | (named & set(others))) - {""})


class ControlTokens:
    """Puts marks into the texts of a request."""

    def __init__(
        self, texts: frozenset[str], normalize: Callable[[str], str] = lambda text: text
    ) -> None:
        """`normalize` is the tokenizer's own normalization, applied before the search; see
        `refuse`."""
        self.texts = texts
        self._normalize = normalize
        self._any = AnyOf(texts)
        forms = texts | set(map(normalize, texts))
        self._any_form = AnyOf(forms) if forms != texts else self._any
        signs = sorted(
            {sign for text in forms for sign in text if not _WORD.fullmatch(sign)} | {MARK}
        )
        has_words = any(_WORD.fullmatch(text) for text in texts)
        self._suspect = re.compile("" if has_words else f"[{re.escape(''.join(signs))}]")
        self._longest = max(map(len, texts), default=0)
        self._firsts = frozenset(text[0] for text in texts)
        self._lasts = frozenset(text[-1] for text in texts)
        self._heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in texts for size in range(1, len(text)))
        self._ends = sorted(self._tails | texts)

    def mark(self, text: str) -> str:
        """Put a mark into `text` wherever it has a control token, or could form one at its edges.

        White space at both ends is ignored, since templates trim it. A text that is one word
        is not changed, since templates compare such texts with constants (role == "user").
        """
        if len(text) < SHORT_CHARS and self._suspect.search(text) is None:
            return text  # most names and short texts of tools are returned here
        text = without_marks(text)
        bare = text.strip()
        if self._is_within(bare):
            if _WORD.fullmatch(bare):
                return text
            bare = MARK + self._any.marked(bare, MARK) + MARK
        else:
            begin = MARK if self._begins_as_tail(bare) else ""
            end = MARK if self._ends_as_head(bare) else ""
            bare = f"{begin}{self._any.marked(bare, MARK)}{end}"
        return _within_space(text, bare)

    def refuse(self, text: str) -> str:
        """Apply `fence` to a text without control tokens; raises InvalidRequest("messages") for a
        text with one."""
        text = without_marks(text)
        found = self._any_form.first(text) or self._any_form.first(self._normalize(text))
        if found is not None:
            raise cannot_be_text(found)
        return self.fence(text)

    def fence(self, text: str) -> str:
        """Put marks at both edges of `text`, inside the white space around it. A single word, or
        text without any of the characters that begin control tokens ("<"), is not changed."""
        text = without_marks(text)
        bare = text.strip()
        has_signs = any(map(self._suspect.search, (bare, self._normalize(bare))))
        if _WORD.fullmatch(bare) or not has_signs:
            return text
        return _within_space(text, f"{MARK}{bare}{MARK}")

    def _is_within(self, bare: str) -> bool:
        """Whether a text is a piece of a control token."""
        place = bisect_left(self._ends, bare)
        return place < len(self._ends) and self._ends[place].startswith(bare)

    def _ends_as_head(self, bare: str) -> bool:
        """Whether a text ends with the beginning of a control token."""
        end = bare[-self._longest :]
        return any(
            end[place:] in self._heads and not _WORD.fullmatch(end[place:])
            for place, character in enumerate(end)
            if character in self._firsts
        )

    def _begins_as_tail(self, bare: str) -> bool:
        """Whether a text begins with the end of a control token."""
        begin = bare[: self._longest]
        return any(
            begin[: place + 1] in self._tails and not _WORD.fullmatch(begin[: place + 1])
            for place, character in enumerate(begin)
            if character in self._lasts
        )


def cannot_be_text(token: str) -> InvalidRequest:
    """The error for a control token that a request spells out."""
    reason = (
        f"contain the special token {token!r}, which this model's tokenizer cannot read as text; "
        "--allow-special-tokens makes it a control token"
    )
    return InvalidRequest("messages", reason)


def _within_space(text: str, bare: str) -> str:
    """Return `bare` with the white space that surrounds `text`."""
    start = len(text) - len(text.lstrip())
    return f"{text[:start]}{bare}{text[len(text.rstrip()) :]}"


def map_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON value in which every text is changed, including names of fields."""
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
    """Whether a text in a JSON value contains `wanted`."""
    if isinstance(value, Mapping):
        return any(has_text(each, wanted) for item in value.items() for each in item)
    if isinstance(value, list | tuple):
        return any(has_text(item, wanted) for item in value)
    return isinstance(value, str) and wanted in value
