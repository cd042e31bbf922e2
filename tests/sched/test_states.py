"""States of recurrent layers are kept where prompts part, and sequences start exactly there."""

from dataclasses import replace

import numpy as np
import pytest

from mainstem.core.config import SchedConfig
from mainstem.core.request import Request, SamplingParams
from mainstem.engine.engine import Engine
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import FakeRunner, fake_answer

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def an_engine_with_states(
    num_states: int = 200, chunk_tokens: int = 512, num_pages: int = 4096
) -> Engine:
    config = SchedConfig(chunk_tokens=chunk_tokens)
    return an_engine(num_pages, 16, config, can_overlap=True, num_states=num_states)


def starts(engine: Engine, requests: list[Request]) -> list[int]:
    """Where each request starts, by its name; answers must be right."""
    found = run_all(engine, requests)
    cached: dict[str, int] = {}
    for output in found.outputs:
        cached.setdefault(str(output.request_id), output.num_cached_tokens)
    for request in requests:
        wanted = fake_answer(request.prompt_ids.tolist(), 4, VOCAB)
        assert found.tokens[str(request.request_id), 0] == wanted
    return [cached[str(request.request_id)] for request in requests]


@pytest.mark.parametrize("chunk_tokens", [512, 8192])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_prompts_that_part_in_a_page_start_where_they_part(chunk_tokens: int, seed: int) -> None:
    """64 prompts in 8 groups, each with 1,500 shared and 700 own tokens, in any order: 1,500 is in
    the middle of a page."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(8):
        shared = rng.integers(0, VOCAB, 1500).tolist()
        firsts = rng.choice(VOCAB, 8, replace=False).tolist()  # so that they part exactly there
        prompts += [[*shared, first, *rng.integers(0, VOCAB, 699).tolist()] for first in firsts]
    rng.shuffle(prompts)
    requests = [a_request(p, name=str(i), sampling=GREEDY) for i, p in enumerate(prompts)]
    found = starts(an_engine_with_states(chunk_tokens=chunk_tokens), requests)
    assert sorted(found) == [0] * 8 + [1500] * 56


def test_requests_one_by_one_start_after_their_system_prompt() -> None:
    rng = np.random.default_rng(1)
    system = rng.integers(0, VOCAB, 1500).tolist()
    engine = an_engine_with_states()
    found = []
    for index in range(4):
        prompt = system + rng.integers(0, VOCAB, 90).tolist()
        found += starts(
            engine, [a_request(prompt, name=str(index), sampling=GREEDY, keep_tokens=1500)]
        )
    assert found == [0, 1500, 1500, 1500]


def test_a_shared_beginning_that_nobody_named_is_kept_at_its_second_sight() -> None:
    rng = np.random.default_rng(2)
    document = rng.integers(0, VOCAB, 908).tolist()
    engine = an_engine_with_states()
    found = []
    for index in range(4):
        prompt = document + rng.integers(0, VOCAB, 60).tolist()
        found += starts(engine, [a_request(prompt, name=str(index), sampling=GREEDY)])
    assert found == [0, 0, 908, 908]


def test_a_turn_starts_where_the_last_one_ended() -> None:
    rng = np.random.default_rng(3)
    engine, said, found = an_engine_with_states(), rng.integers(0, VOCAB, 333).tolist(), []
    for turn in range(6):
        found += starts(engine, [a_request(said, name=str(turn), sampling=GREEDY)])
        said = said + fake_answer(said, 4, VOCAB) + rng.integers(0, VOCAB, 21).tolist()
    lengths = [333 + 25 * turn for turn in range(6)]
    # all tokens of the last turn but, perhaps, its last one, which nothing has read yet
    assert found[0] == 0
    for turn in range(1, 6):
        assert lengths[turn - 1] + 3 <= found[turn] <= lengths[turn - 1] + 4


def test_several_answers_start_from_the_last_page_of_the_prompt() -> None:
    engine = an_engine_with_states()
    prompt = list(range(50))
    sampling = SamplingParams(n=4, temperature=0.0, max_tokens=4)
    found = run_all(engine, [a_request(prompt, name="r", sampling=sampling)])
    assert {output.num_cached_tokens for output in found.outputs} == {0, 48}
    for index in range(4):
        assert found.tokens["r", index] == fake_answer(prompt, 4, VOCAB)


@pytest.mark.parametrize(("is_planned", "num_segments"), [(True, 11), (False, 21)])
def test_prompts_of_a_plan_are_cut_at_their_forks_only(is_planned: bool, num_segments: int) -> None:
    """All that they share is known. Of others somebody may continue, so their ends are kept."""
    runner = FakeRunner(4096, 16, VOCAB, True, 50)
    engine = an_engine(4096, 16, SchedConfig(chunk_tokens=4096), runner=runner, num_states=50)
    prompts = [[*range(72), 80 + index, *range(1, 21)] for index in range(10)]
    first = engine.expect(np.array([72] * 9 + [0], np.int32)) if is_planned else None
    requests = [
        a_request(p, 4, name=str(i), plan_place=None if first is None else first + i)
        for i, p in enumerate(prompts)
    ]
    found = run_all(engine, requests)
    for index, prompt in enumerate(prompts):
        assert found.tokens[str(index), 0] == fake_answer(prompt, 4, VOCAB)
    uses = [(step.states, step.num_decodes) for step in runner.steps]
    assert sum(len(use.writes) - num for use, num in uses if use is not None) == num_segments


@pytest.mark.parametrize(("is_planned", "num_kept"), [(True, 1), (False, 21)])
def test_ends_of_planned_answers_are_not_kept(is_planned: bool, num_kept: int) -> None:
    """Nobody continues them. Of others the end and the last page of the prompt are kept, too."""
    engine = an_engine(4096, 16, SchedConfig(chunk_tokens=4096), num_states=50)
    prompts = [[*range(80), 80 + index, *range(1, 25)] for index in range(10)]
    first = engine.expect(np.array([80] * 9 + [0], np.int32)) if is_planned else None
    requests = [
        a_request(p, 4, name=str(i), plan_place=None if first is None else first + i)
        for i, p in enumerate(prompts)
    ]
    run_all(engine, requests)
    states = engine._store.states
    assert states is not None
    assert states.num_kept == num_kept


@pytest.mark.parametrize("num_trees", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_trees_compute_little_more_than_the_plan_allows(num_trees: int) -> None:
    """Of each prompt, what no earlier prompt has in common with it must be computed, and the
    prompt's last token."""
    rng = np.random.default_rng(4)
    computed, possible = 0, 0
    for _tree in range(num_trees):
        stems = [rng.integers(0, VOCAB, rng.integers(20, 200)).tolist()]
        for _ in range(6):
            stem = stems[rng.integers(len(stems))]
            kept = int(rng.integers(10, len(stem) + 1))
            stems.append(stem[:kept] + rng.integers(0, VOCAB, rng.integers(20, 200)).tolist())
        prompts = [
            stems[rng.integers(len(stems))] + rng.integers(0, VOCAB, 40).tolist() for _ in range(12)
        ]
        requests = [a_request(p, name=str(i), sampling=GREEDY) for i, p in enumerate(prompts)]
        engine = an_engine_with_states(chunk_tokens=int(rng.choice([64, 512, 4096])))
        found = starts(engine, requests)
        computed += sum(len(p) - start for p, start in zip(prompts, found, strict=True))
        possible += sum(len(p) for p in prompts) - sum(_most_shared(prompts))
    assert computed <= 1.02 * possible, computed / possible


def _most_shared(prompts: list[list[int]]) -> list[int]:
    """For each prompt but the first of those that share: the tokens that a tree shares with it."""
    seen: set[tuple[int, ...]] = set()
    shared = []
    for prompt in prompts:
        most = 0
        while most < len(prompt) - 1 and tuple(prompt[: most + 1]) in seen:
            most += 1
        seen.update(tuple(prompt[:length]) for length in range(1, len(prompt) + 1))
        shared.append(most)
    return shared


@pytest.mark.parametrize("num_states", [1, 2, 3])
def test_few_states_limit_the_sequences_that_run_and_lose_no_answer(num_states: int) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 3, rng.integers(20, 90)).tolist() for _ in range(20)]
    requests = [a_request(p, name=str(i), sampling=GREEDY) for i, p in enumerate(prompts)]
    starts(an_engine_with_states(num_states=num_states, chunk_tokens=64), requests)


def of_tenants(public: int, prompt: list[int], names: str) -> list[Request]:
    """One request of each tenant, which begin with the same public tokens and end differently."""
    return [
        replace(
            a_request([*prompt, ord(name) - 90, *range(30)], name=name, sampling=GREEDY),
            salt=name.encode(),
            public_tokens=public,
        )
        for name in names
    ]


@pytest.mark.parametrize(("public", "found_later"), [(160, 160), (166, 160)])
def test_tenants_share_the_state_after_public_pages(public: int, found_later: int) -> None:
    """A state inside a page has the name that the page has."""
    prompt = np.random.default_rng(6).integers(0, VOCAB, public).tolist()
    engine = an_engine_with_states()
    found = [starts(engine, [request])[0] for request in of_tenants(public, prompt, "abc")]
    assert found == [0, found_later, found_later]


def test_tenants_who_come_at_once_share_the_state_after_public_pages() -> None:
    prompt = np.random.default_rng(7).integers(0, VOCAB, 166).tolist()
    assert starts(an_engine_with_states(), of_tenants(166, prompt, "abc")) == [0, 160, 160]


@pytest.mark.parametrize("public", [160, 166])
def test_tenants_start_from_the_state_of_an_app(public: int) -> None:
    prompt = np.random.default_rng(8).integers(0, VOCAB, public).tolist()
    engine = an_engine_with_states()
    run_all(engine, [a_request(prompt, 1)])
    assert starts(engine, of_tenants(public, prompt, "ab")) == [160, 160]


def test_private_tokens_are_computed_for_each_tenant() -> None:
    prompt = np.random.default_rng(9).integers(0, VOCAB, 166).tolist()
    engine = an_engine_with_states()
    found = [starts(engine, [request])[0] for request in of_tenants(0, prompt, "ab")]
    assert found == [0, 0]
