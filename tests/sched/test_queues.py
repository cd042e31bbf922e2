"""The order of the three queues of BatchLLM's section 4.3.1 in a step: answers in progress, prompts
whose prefix is cached, prefixes. Also the limit on answers in progress."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.core.config import SchedConfig
from mainstem.core.errors import ConfigError
from mainstem.core.step import Step
from tests.builders import a_request, an_engine, run_all

PAGE = 4
OWN = 20  # smaller ids belong to prefixes


def a_job(groups: int, degree: int, prefix: int, own: int) -> list[list[int]]:
    """Prompts group by group: the prefix of group g repeats token g; after it, each prompt repeats
    a token of its own."""
    return [
        [group] * prefix + [OWN + 8 * group + member] * own
        for group in range(groups)
        for member in range(degree)
    ]


def prompt_tokens(step: Step) -> list[int]:
    """Ids of the prompt tokens of a step, in their order."""
    return [int(token) for token in step.token_ids[step.seq_starts[step.num_decodes] :]]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(2, 4),
    degree=st.integers(1, 4),
    prefix_pages=st.integers(1, 6),
    own=st.integers(1, 11),
    chunk_tokens=st.integers(1, 50),
)
def test_a_step_has_answers_then_own_parts_then_the_next_prefix(
    groups: int, degree: int, prefix_pages: int, own: int, chunk_tokens: int
) -> None:
    engine = an_engine(512, PAGE, SchedConfig(chunk_tokens=chunk_tokens))
    prompts = a_job(groups, degree, prefix_pages * PAGE, own)
    run_all(engine, [a_request(ids, max_tokens=5, name=str(at)) for at, ids in enumerate(prompts)])
    steps: list[Step] = engine._runner.steps  # type: ignore[attr-defined]
    seen: list[int] = []
    for step in steps:
        lengths = np.diff(step.seq_starts)
        assert (lengths[: step.num_decodes] == 1).all()
        decoded = step.seq_slots[: step.num_decodes].tolist()
        later = step.seq_slots[step.num_decodes :].tolist()
        assert not set(decoded) & set(later), "a sequence is both decoded and prefilled"
        seen += prompt_tokens(step)
    for group in range(groups):
        assert seen.count(group) == prefix_pages * PAGE, "a prefix is computed once"
        own_places = [at for at, token in enumerate(seen) if (token - OWN) // 8 == group]
        assert min(own_places) > seen.index(group) + prefix_pages * PAGE - 1
        if group + 1 < groups:  # every prompt of a group comes before the prefix of the next
            assert max(own_places) < seen.index(group + 1)


def test_every_answer_that_can_continue_is_in_the_step() -> None:
    """Decodes are subtracted from the step's token budget before any prompt."""
    engine = an_engine(512, PAGE, SchedConfig(chunk_tokens=16))
    prompts = a_job(3, 4, 24, 3)
    run_all(engine, [a_request(ids, max_tokens=30, name=str(at)) for at, ids in enumerate(prompts)])
    steps: list[Step] = engine._runner.steps  # type: ignore[attr-defined]
    sampled: set[int] = set()
    for step in steps[:20]:  # none has ended yet
        decoded = set(step.seq_slots[: step.num_decodes].tolist())
        assert decoded == sampled
        assert step.num_tokens <= 16
        sampled |= set(step.sample_slots.tolist())
    assert len(sampled) == 12


@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("max_seqs", [1, 3])
def test_no_more_answers_than_the_limit_are_in_progress(max_seqs: int, can_overlap: bool) -> None:
    prompts = a_job(2, 4, 8, 3)
    config = SchedConfig(chunk_tokens=64, max_seqs=max_seqs)
    engine = an_engine(512, PAGE, config, can_overlap=can_overlap)
    limited = run_all(engine, [a_request(ids, name=str(at)) for at, ids in enumerate(prompts)])
    steps: list[Step] = engine._runner.steps  # type: ignore[attr-defined]
    assert max(len(step.seq_slots) for step in steps) == max_seqs
    free = an_engine(512, PAGE, SchedConfig(chunk_tokens=64))
    all_at_once = run_all(free, [a_request(ids, name=str(at)) for at, ids in enumerate(prompts)])
    assert limited.tokens == all_at_once.tokens
    with pytest.raises(ConfigError, match="max_seqs"):
        SchedConfig(max_seqs=0)
