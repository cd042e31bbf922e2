"""What each token reads where full pages are rounded: its own page as it was computed, every
earlier page rounded, each key once."""

from collections import Counter

import numpy as np
import pytest

from mainstem.core.step import Spans, Step
from mainstem.kernels.attention.window import clip_spans
from mainstem.runner.rounded_spans import OpenPages, open_pages, split_spans
from tests.runner.steps import Seq, Work, a_step

PAGE, PAGES = 4, 100
Key = tuple[int, int]  # page and offset; open pages have numbers from PAGES on


def keys_read(spans: Spans, num_tokens: int) -> list[Counter[Key]]:
    found: list[Counter[Key]] = [Counter() for _ in range(num_tokens)]
    for i in range(len(spans)):
        rows = range(spans.query_starts[i], spans.query_starts[i + 1])
        for place, entry in enumerate(rows):
            end = int(spans.key_tokens[i])
            if spans.is_causal[i]:
                end -= len(rows) - 1 - place
            first = 0 if spans.first_keys is None else int(spans.first_keys[entry])
            for key in range(first, end):
                page = int(spans.page_ids[spans.page_starts[i] + key // PAGE])
                found[spans.query_rows[entry]][page, key % PAGE] += 1
    return found


def split(step: Step) -> tuple[Spans, OpenPages]:
    opened = open_pages(step.write_slots, step.seq_slots, step.seq_starts, PAGE)
    return split_spans(step.spans, step.positions, opened, PAGE, PAGES), opened


def works() -> list[Work]:
    """A decode, one at a page's start, a chunk inside a page, long chunks with and without shared
    pages before them."""
    rng = np.random.default_rng(2)
    shared = [50, 51, 52]
    return [
        Work(Seq(0, rng.integers(3, 9, 30).tolist(), [*shared, 1, 2, 3], 21, 3), 1),
        Work(Seq(1, rng.integers(3, 9, 30).tolist(), [*shared, 4, 5], 16, 3), 1),
        Work(Seq(2, rng.integers(3, 9, 30).tolist(), [*shared, 6, 7, 8, 9], 13, 3), 2),
        Work(Seq(3, rng.integers(3, 9, 60).tolist(), list(range(10, 25)), 0), 55),
        Work(Seq(4, rng.integers(3, 9, 60).tolist(), [*shared, *range(25, 37)], 14, 3), 41),
        Work(Seq(5, rng.integers(3, 9, 60).tolist(), list(range(40, 50)), 8), 8),
    ]


@pytest.mark.parametrize("window", [None, 3, 9, 30])
def test_a_token_reads_its_own_page_open_and_earlier_pages_rounded(window: int | None) -> None:
    step = a_step(works(), PAGE, 9)
    spans, opened = split(step)
    if window is not None:
        spans = clip_spans(spans, step.positions, window, PAGE)
    found = keys_read(spans, step.num_tokens)
    row = 0
    for work in works():
        seq = work.seq
        for position in range(seq.num_done, seq.num_done + work.num_tokens):
            own = position // PAGE
            wanted = Counter({(PAGES + int(opened.of_token[row]), position % PAGE): 1})
            for key in range(max(0, position + 1 - (window or position + 1)), position):
                is_own = key // PAGE == own
                page = PAGES + int(opened.of_token[row]) if is_own else seq.pages[key // PAGE]
                wanted[page, key % PAGE] += 1
            assert found[row] == wanted, (seq.slot, position)
            assert opened.pages[opened.of_token[row]] == seq.pages[own]
            row += 1


def test_open_pages_say_which_tokens_are_there_and_which_are_new() -> None:
    _, opened = split(a_step(works()[:3], PAGE, 9))
    assert opened.pages.tolist() == [3, 5, 6]
    assert opened.seq_slots.tolist() == [0, 1, 2]
    assert opened.first_offsets.tolist() == [1, 0, 1]
    assert opened.end_offsets.tolist() == [2, 1, 3]


def test_a_long_chunk_is_read_in_few_spans_of_equal_sizes() -> None:
    """64 pages: squares of 32, 16, ... 1 pages, and 64 open pages."""
    seq = Seq(0, list(range(256)), list(range(64)))
    spans, _ = split(a_step([Work(seq, 256)], PAGE, 300))
    sizes = Counter(
        zip(np.diff(spans.query_starts).tolist(), spans.key_tokens.tolist(), strict=True)
    )
    assert sizes == {(4, 4): 64 + 32} | {(4 << k, 4 << k): 32 >> k for k in range(1, 6)}
