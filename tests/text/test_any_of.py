"""Search for any of many texts: finds the leftmost and longest, at a cost that hardly depends on
their number."""

import re
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.text import any_of
from mainstem.text.any_of import AnyOf
from mainstem.text.control_tokens import MARK, ControlTokens, without_marks

LETTERS = st.text("<|ab.", max_size=6)


def spans(texts: AnyOf, text: str) -> list[tuple[int, int]]:
    return [match.span() for match in texts.matches(text, 0, len(text))]


def one_by_one(texts: set[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


@settings(max_examples=200, deadline=None)
@given(st.sets(LETTERS, max_size=12), st.text("<|ab.", max_size=40), st.sampled_from([1, 7, 99]))
def test_the_search_finds_what_a_search_for_each_text_finds(
    texts: set[str], text: str, slice_chars: int
) -> None:
    texts = texts - {""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_of, "SLICE_CHARS", slice_chars)
        found = AnyOf(texts)
        expected = re.finditer(one_by_one(texts), text)
        assert spans(found, text) == [match.span() for match in expected]
        marked = re.sub(f"(?={one_by_one(texts)})(.)", r"\1!", text)
        assert found.marked(text, "!") == marked


def test_texts_that_contain_each_other_are_found() -> None:
    runs = AnyOf("\n" * size for size in range(1, 200))
    assert spans(runs, "\n" * 150 + "x" + "\n" * 250) == [(0, 150), (151, 350), (350, 401)]
    words = [chr(0x4E00 + place) + end for place in range(1000) for end in ("a", "ab", "c")]
    many = AnyOf(words)
    text = "b".join(words)
    assert [text[start:end] for start, end in spans(many, text)] == [
        match[0] for match in re.finditer(one_by_one(set(words)), text)
    ]
    assert AnyOf([]).first("x") is None


@pytest.mark.parametrize(
    ("shape", "number", "said"),
    [
        ("<|reserved_special_token_{}|>", 256, "<|r"),
        ("<SPECIAL_{}>", 1000, "<S"),
        ("<unused{}>", 6242, "<unused"),
        ("<unused{}>", 6242, "<unused624"),
        ("<unused{}>", 6242, "<"),
    ],
)
def test_a_text_full_of_partial_matches_costs_little(shape: str, number: int, said: str) -> None:
    """This takes about 1 ms; a search for each of the 6,242 texts took 6 s."""
    control = ControlTokens(frozenset(shape.format(place) for place in range(number)))
    found = AnyOf(control.texts)
    text = (said * 60_000)[:60_000]
    began_s = process_time()
    marked = control.mark(text)
    assert spans(found, marked) == []
    assert process_time() - began_s < 1.0
    assert without_marks(marked) == text


def test_many_short_texts_cost_little() -> None:
    control = ControlTokens(frozenset(f"<unused{place}>" for place in range(6242)))
    texts = [f"d{place}>" for place in range(2000)]
    began_s = process_time()
    assert {control.mark(text) for text in texts} == {f"{MARK}{text}{MARK}" for text in texts}
    assert process_time() - began_s < 1.0
