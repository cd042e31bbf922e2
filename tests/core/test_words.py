"""Words for counts and numbers."""

import pytest

from mainstem.core.words import counted, with_prefix


def test_one_thing_has_no_plural() -> None:
    assert [counted(n, "request") for n in (0, 1, 2000)] == [
        *("0 requests", "1 request", "2,000 requests")
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3.35e12, "3.35 T"),
        (20e9, "20 G"),
        (999.9e9, "1 T"),
        (12.345, "12.3"),
        (7e-6, "7 \u00b5"),
        (0.0, "0"),
        (-2e-3, "-2 m"),
    ],
)
def test_numbers_have_prefixes_not_exponents(value: float, words: str) -> None:
    assert with_prefix(value) == words
