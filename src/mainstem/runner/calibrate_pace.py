"""Fits the costs that the planner of attention uses (`Pace`) to the times of a few dozen steps.

Each step has equal units of one kind, uncut, so that its time is linear in the unknowns:

    time = launch + rounds * (unit_us + key_us * keys)

Units over 1,024 to 8,192 keys on a few programs give key_us, since nothing else uses the memory.
One to eight rounds of units on all programs, over the same few keys, give unit_us. `yields`,
`late_us`, `beside`, `least_speed` and `apart` do not affect such steps; they keep their built-in
values.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mainstem.core.step import Spans
from mainstem.kernels.attention.shape import Shape, UnitKind
from mainstem.kernels.attention.tuning import Pace

LONG_KEYS = (1024, 2048, 3072, 4096, 6144, 8192)
ROUNDS = (1, 2, 3, 4, 6, 8)
READ_ROUNDS, READ_KEYS = 2, 1024  # rounds and keys of the step that reads at full bandwidth
MERGED_TOKENS, MERGED_KEYS = 2048, 16
LEAST_US = 1e-5  # lower limit, since noise could give a time below zero
StepUs = Callable[[Spans], float]  # runs a step without cutting spans; returns microseconds


class _FittedLine(NamedTuple):
    launch_us: float
    unit_us: float
    key_us: float


def fit_pace(step_us: StepUs, shape: Shape) -> Pace:
    """The tiles' pace with the numbers that were fitted."""
    small = _fit_line(step_us, shape.small, tokens=1)
    large = _fit_line(step_us, shape.large, tokens=max(shape.large.rows // shape.group, 1))
    num_spans = max(READ_ROUNDS * shape.small.slots // shape.small.units, 1)
    read_us = step_us(spans_of(num_spans, 1, READ_KEYS)) - small.launch_us
    merged = step_us(spans_of(2 * MERGED_TOKENS, 1, MERGED_KEYS, spans_of_token=2))
    merge_us = merged - step_us(spans_of(2 * MERGED_TOKENS, 1, MERGED_KEYS))
    rows = 2 * MERGED_TOKENS * shape.group * shape.kv_heads
    has_launch = shape.tiles.is_split
    return replace(
        shape.tiles.pace,
        large_us=large.unit_us,
        large_key_us=large.key_us,
        small_us=small.unit_us,
        small_key_us=small.key_us / shape.fold,
        reads=num_spans * READ_KEYS * shape.kv_heads / max(read_us, LEAST_US),
        merge_us=max(merge_us, 0.0) / rows,
        launch_us=max(large.launch_us - small.launch_us, 0.0) if has_launch else 0.0,
    )


def _fit_line(step_us: StepUs, kind: UnitKind, tokens: int) -> _FittedLine:
    """Fit by least squares of relative errors. Each unit has the rows of `tokens` tokens."""
    steps = [(1, keys) for keys in LONG_KEYS]
    steps += [(max(rounds * kind.slots // kind.units, 1), kind.stretch) for rounds in ROUNDS]
    rows, times = [], []
    for num_spans, keys in steps:
        rounds = -(-num_spans * kind.units // kind.slots)
        rows.append((1.0, float(rounds), float(rounds * keys)))
        times.append(step_us(_over_the_same_keys(spans_of(num_spans, tokens, keys))))
    us = np.array(times)
    fitted = np.linalg.lstsq(np.array(rows) / us[:, None], np.ones(len(us)), rcond=None)[0]
    return _FittedLine(*np.maximum(fitted, LEAST_US).tolist())


def _over_the_same_keys(spans: Spans) -> Spans:
    """Let all spans read the pages of the first span, so that memory is no limit."""
    return replace(spans, page_ids=np.tile(spans.page_ids[: spans.page_starts[1]], len(spans)))


def spans_of(num_spans: int, tokens: int, keys: int, spans_of_token: int = 1) -> Spans:
    """Return spans of `tokens` query tokens, each over its own `keys` keys. Each token lies in
    `spans_of_token` spans.
    """
    page_size = 16
    num_pages, rows = -(-keys // page_size), num_spans // spans_of_token * tokens
    return Spans(
        query_starts=np.arange(num_spans + 1, dtype=np.int32) * tokens,
        query_rows=np.tile(np.arange(rows, dtype=np.int32), spans_of_token),
        page_starts=np.arange(num_spans + 1, dtype=np.int32) * num_pages,
        page_ids=np.arange(num_spans * num_pages, dtype=np.int32),
        key_tokens=np.full(num_spans, keys, np.int32),
        is_causal=np.zeros(num_spans, np.bool_),
        key_positions=np.zeros(num_spans, np.int32),
    )
