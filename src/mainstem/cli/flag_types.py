"""Types of command-line flags: the value, or an error that argparse shows with the flag's name."""

import argparse
import math
from collections.abc import Callable, Collection
from enum import Enum
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


def positive(text: str) -> float:
    """A finite number above zero."""
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """A finite number of zero or more."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def not_negative_count(text: str) -> int:
    """A whole number of zero or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def positive_count(text: str) -> int:
    """A whole number of one or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def member_of(kind: type[E]) -> Callable[[str], E]:
    """One of an enum, by its value."""

    def parse(text: str) -> E:
        try:
            return kind(text)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise argparse.ArgumentTypeError(f"must be one of {known}, got {text!r}") from None

    return parse


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """One of these names."""

    def parse(text: str) -> str:
        if text not in known:
            listed = ", ".join(known)
            raise argparse.ArgumentTypeError(f"must be one of {listed}, got {text!r}")
        return text

    return parse


def comma_list(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """One or more values with commas between them."""

    def parse_list(text: str) -> list[T]:
        return [_parsed(parse, part) for part in text.split(",")]

    return parse_list


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError:  # argparse would name the function of the whole list
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
