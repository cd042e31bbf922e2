"""Searches a text for any of many others, in a time that hardly depends on their number.

The texts become one regular expression in which a common beginning occurs once:

    <s>, <unused1>, <unused12>   ->   <(?:s>|unused1(?:2>|>))
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from os.path import commonprefix

SLICE_CHARS = 1 << 14  # characters searched in one call; other threads run in between
MAX_BRANCHES = 256  # branches that are tried one after another, 1 to 2 ns each
NUM_SETS = 4  # if there are more branches, they are divided into this many sets
MAX_NESTED = 64  # depth of groups; the regular expression compiler recurses


class AnyOf:
    """Finds the leftmost of some texts; if several begin at the same place, the longest."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted({text for text in texts if text})
        self._longest = max(map(len, ordered), default=0)
        # without texts: a pattern that never matches
        self.pattern = re.compile(_pattern(ordered) if ordered else "(?!)")
        begins = [
            (first, f"{re.escape(first)}(?={_pattern(tails)})")
            for first, tails in _by_first(ordered)
        ]
        self._begins = re.compile(_any_branch(begins) if begins else "(?!)")

    def first(self, text: str) -> str | None:
        """Return the first match in `text`."""
        found = next(self.matches(text, 0, len(text)), None)
        return None if found is None else found[0]

    def matches(self, text: str, start: int, end: int) -> Iterator[re.Match[str]]:
        """Yield the matches within text[start:end]; they do not overlap."""
        while start < end and self._longest:
            stop = min(end, start + SLICE_CHARS + self._longest)
            found = self.pattern.search(text, start, stop)
            if found is not None and stop < end:  # a longer match may be cut off
                is_whole = found.start() <= start + SLICE_CHARS
                found = self.pattern.match(text, found.start(), end) if is_whole else None
            if found is not None:
                yield found
            start = found.end() if found is not None else start + SLICE_CHARS

    def marked(self, text: str, mark: str) -> str:
        """Put `mark` after the first character of each match in `text`; matches may overlap."""
        pieces: list[str] = []
        before = 0
        for start in range(0, len(text), SLICE_CHARS):
            stop = start + SLICE_CHARS
            for found in self._begins.finditer(text, start, stop + self._longest):
                place = found.end()
                if place > stop:
                    break  # the next slice will find it
                pieces += (text[before:place], mark)
                before = place
        return "".join([*pieces, text[before:]])


def _pattern(texts: Sequence[str], num_nested: int = 0) -> str:
    """Return a pattern that matches the longest of some texts, which are sorted and all
    different."""
    if num_nested == MAX_NESTED:  # list them: a longer text comes before its prefixes
        return f"(?:{'|'.join(map(re.escape, reversed(texts)))})"
    head = commonprefix([texts[0], texts[-1]])  # noqa: RUF071
    tails = [text[len(head) :] for text in texts]
    branches = [
        (first, re.escape(first) + _pattern(rest, num_nested + 1))
        for first, rest in _by_first(filter(None, tails))
    ]
    if not branches:
        return re.escape(head)
    return f"{re.escape(head)}(?:{_any_branch(branches)}{'' if tails[0] else '|'})"


def _by_first(texts: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Group sorted texts by first character; returns this character, and the rest of each text."""
    groups = groupby(texts, key=lambda text: text[0])
    return [(first, [text[1:] for text in group]) for first, group in groups]


def _any_branch(branches: Sequence[tuple[str, str]]) -> str:
    """Return a choice between patterns, which are given with their first characters. These all
    differ."""
    if len(branches) <= MAX_BRANCHES:
        return "|".join(pattern for _, pattern in branches)
    size = -(-len(branches) // NUM_SETS)
    parts = [branches[start : start + size] for start in range(0, len(branches), size)]
    return "|".join(f"(?={_set(part)})(?:{_any_branch(part)})" for part in parts)


def _set(branches: Sequence[tuple[str, str]]) -> str:
    return f"[{re.escape(''.join(first for first, _ in branches))}]"
