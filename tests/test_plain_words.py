"""The check of `make lint` for phrases that make a reader stop."""

from pathlib import Path

import pytest

from tests.plain_words import find, python_prose

PAGE = Path("page.md")


@pytest.mark.parametrize(
    "text",
    [
        "for so many tokens",
        "So many wait.",
        "a run of so\n# many tokens",
        "whoever comes next",
        "a sequence who waits",
        "Who fails again is tried alone.",
        "whom a step failed with",
        "of equals, the oldest go",
        "on a rank of several",
        "What came of it.",
    ],
)
def test_bad_phrases_are_reported_once(text: str) -> None:
    assert len(list(find(PAGE, text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "up to 16 tokens",
        "somebody who reads it",
        "those who ask",
        "for the user\nwho asked",
        "Who are you?",
        "a page whose key is known",
        "one of several ranks",
        "the sum of equal parts",
    ],
)
def test_good_phrases_are_not_reported(text: str) -> None:
    assert not list(find(PAGE, text))


def test_only_comments_and_strings_of_python_are_checked() -> None:
    source = 'who = whoever(so_many)  # who waits\ntext = f"so many of {x}"\n'
    found = [(finding.line, finding.phrase) for finding in find(PAGE, python_prose(source))]
    assert sorted(found) == [(1, "who"), (2, "so many")]


def test_the_reported_line_is_that_of_the_first_word() -> None:
    assert [finding.line for finding in find(PAGE, "one\ntwo so\nmany")] == [2]
