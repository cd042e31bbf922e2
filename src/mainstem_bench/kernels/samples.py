"""Sampling settings as a step has them."""

from collections.abc import Sequence

import numpy as np

from mainstem.core.request import SamplingParams
from mainstem.core.step import Int64s, SampleBatch
from mainstem.sched.random import noise_keys


def some_keys(count: int, seed: int = 0) -> Int64s:
    """Noise keys as the scheduler makes them, of the first tokens of one answer."""
    return noise_keys(np.full(count, seed, np.int64), np.arange(count, dtype=np.int32))


def a_sample_batch(rows: Sequence[SamplingParams], vocab: int, noise_keys: Int64s) -> SampleBatch:
    special = [row for row, sampling in enumerate(rows) if sampling.edits_logits]
    return SampleBatch(
        temperature=np.array([s.temperature for s in rows], np.float32),
        top_p=np.array([s.top_p for s in rows], np.float32),
        top_k=np.array([s.top_k if s.top_k > 0 else vocab for s in rows], np.int32),
        min_p=np.array([s.min_p for s in rows], np.float32),
        noise_keys=noise_keys,
        num_logprobs=np.array([s.logprobs or 0 for s in rows], np.int32),
        wants_logprobs=np.array([s.logprobs is not None for s in rows], np.bool_),
        special_rows=np.array(special, np.int32),
        is_greedy=not special and all(s.is_greedy for s in rows),
    )
