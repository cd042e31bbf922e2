"""Finds stop strings, which end an answer, as its text arrives."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _State:
    """A prefix of some stop strings: where each character leads, and what ends here."""

    depth: int
    children: dict[str, "_State"]
    fallback: "_State | None" = None  # the longest proper suffix that is also a prefix
    found: str | None = None  # the longest stop string that ends here


class StopChecker:
    """Passes on text up to the first stop string (Aho-Corasick, one step per character).

    Text that may be the beginning of a stop string is held back. The stop string that ends first
    wins, on a tie the longest. So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._root = _automaton(stops)
        self._state = self._root
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns the text that is now certain. After a stop it returns nothing."""
        if self.found is not None:
            return ""
        if not self._root.children:
            return text
        text, start = self._held + text, len(self._held)
        for index in range(start, len(text)):
            self._state = _advance(self._root, self._state, text[index])
            if (stop := self._state.found) is not None:
                self.found, self._held = stop, ""
                return text[: index + 1 if self._include_stop else index + 1 - len(stop)]
        released = len(text) - self._state.depth
        self._held = text[released:]
        return text[:released]

    def finish(self) -> str:
        """Return what was held back; called when no more text will come."""
        held, self._held = self._held, ""
        return held


def _automaton(stops: Sequence[str]) -> _State:
    root = _State(depth=0, children={})
    for stop in stops:
        state = root
        for character in stop:
            fresh = _State(depth=state.depth + 1, children={})
            state = state.children.setdefault(character, fresh)
        if state is not root:
            state.found = stop
    queue = deque([root])
    while queue:  # by depth, so that a fallback is complete before it is used
        state = queue.popleft()
        for character, child in state.children.items():
            fallback = state.fallback
            child.fallback = root if fallback is None else _advance(root, fallback, character)
            child.found = child.found or child.fallback.found
            queue.append(child)
    return root


def _advance(root: _State, state: _State, character: str) -> _State:
    current: _State | None = state
    while current is not None:
        if (child := current.children.get(character)) is not None:
            return child
        current = current.fallback
    return root
