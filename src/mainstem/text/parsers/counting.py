"""Counts the tokens of reasoning in an answer, including the marks around it."""

from collections.abc import Sequence

from mainstem.text.parsers import harmony
from mainstem.text.parsers.formats import THINK_MARKS, ReasoningFormat
from mainstem.text.tokenizer import Tokenizer


def count_reasoning(
    reasoning: ReasoningFormat, text: str, token_ids: Sequence[int], tokenizer: Tokenizer
) -> int | None:
    """Return the number of reasoning tokens in an answer; None if the vocabulary has no tokens for
    the marks."""
    if reasoning not in THINK_MARKS:
        return _count_analysis(token_ids, tokenizer)
    begin, end = THINK_MARKS[reasoning]
    end_id = tokenizer.token_id(end)
    if end_id is None:
        return None
    if not text.lstrip().startswith(begin):
        return 0
    return token_ids.index(end_id) + 1 if end_id in token_ids else len(token_ids)


def _count_analysis(token_ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    found = {mark: tokenizer.token_id(mark) for mark in harmony.MARKS}
    if None in found.values():
        return None
    ends = {found[mark] for mark in (harmony.START, harmony.END, harmony.CALL, harmony.RETURN)}
    count = begin = 0  # `begin`: where a message begins, with its header
    is_analysis = False
    for place, token_id in enumerate(token_ids):
        if token_id == found[harmony.MESSAGE]:
            is_analysis = harmony.is_analysis(tokenizer.decode_all(token_ids[begin:place]))
        if token_id in ends or place == len(token_ids) - 1:
            count += place + 1 - begin if is_analysis else 0
            begin, is_analysis = place + 1, False
    return count
