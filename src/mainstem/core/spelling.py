"""Guesses, for error messages, which name was meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like `name`; None if none is close."""
    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to append to an error, with a space before it; empty if no name is close."""
    meant = nearest(name, known)
    return "" if meant is None else f" Did you mean {meant}?"
