"""LLM.score with the real embedded model and with a fake one: its results and its errors."""

import asyncio
from collections.abc import Iterator
from math import exp
from pathlib import Path

import pytest

from mainstem import LLM, AnswerFailed, ChoiceScore, InvalidRequest, SamplingParams
from mainstem.core.step import Step
from mainstem.text.prompts import Context
from tests.fake_engines import FakeEngines, a_tokenizer
from tests.fake_llm import a_fake_async_llm, a_fake_llm
from tests.fakes import fake_logprob

CONTEXT = "Question: What is the capital of France, and what is it known for?\nAnswer:"
CHOICES = [" Paris", " the city of London", " Berlin, which is large", " Paris is the capital"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> Iterator[LLM]:
    made = LLM("smollm2", kv_tokens=8192, dtype="float32")
    yield made
    made.close()


def plain_scores(llm: LLM, context_ids: list[int], score: ChoiceScore) -> list[float]:
    """The same scores, from the logprobs of a whole prompt without cached tokens."""
    llm.text_engine.engine.clear_cache()
    ids = [*context_ids, *score.token_ids]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (answer,) = llm.generate([ids], sampling, use_tqdm=False)
    assert answer.prompt_logprobs is not None
    places = zip(ids, answer.prompt_logprobs, strict=True)
    found = [place[token].logprob for token, place in places if place is not None]
    return found[len(context_ids) - 1 :]


def test_scores_are_those_of_the_whole_prompts(llm: LLM) -> None:
    (cold,) = llm.score(CONTEXT, CHOICES, use_tqdm=False)
    (warm,) = llm.score(CONTEXT, CHOICES, use_tqdm=False)
    assert warm.num_cached_tokens == len(warm.context_token_ids) - 1
    assert cold.best == warm.best
    for first, again in zip(cold.choices, warm.choices, strict=True):
        expected = pytest.approx(plain_scores(llm, cold.context_token_ids, first), abs=1e-3)
        assert first.token_logprobs == expected
        assert again.token_logprobs == expected
    sums = [choice.logprob for choice in cold.choices]
    assert cold.choices[cold.best].logprob == max(sums)
    weights = [exp(each) for each in sums]
    shares = [choice.probability for choice in cold.choices]
    assert shares == pytest.approx([each / sum(weights) for each in weights])
    one = cold.choices[3]
    assert one.mean_logprob == pytest.approx(one.logprob / len(one.token_ids))


def test_only_tokens_that_scores_need_are_computed(llm: LLM) -> None:
    llm.text_engine.engine.clear_cache()
    before = llm.counters.computed_tokens
    (result,) = llm.score(CONTEXT, [" A", " B", " C"], use_tqdm=False)
    assert [len(choice.token_ids) for choice in result.choices] == [1, 1, 1]
    assert llm.counters.computed_tokens - before == len(result.context_token_ids)
    before = llm.counters.computed_tokens
    (result,) = llm.score(CONTEXT, CHOICES, use_tqdm=False)
    heads = {tuple(choice.token_ids[:-1]) for choice in result.choices}
    assert llm.counters.computed_tokens - before == sum(len(head) + 1 for head in heads)


def test_a_greedy_choice_is_marked_as_greedy(llm: LLM) -> None:
    (answer,) = llm.generate(CONTEXT, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    (result,) = llm.score(CONTEXT, [answer.outputs[0].text, " xyzzy"], use_tqdm=False)
    assert [choice.is_greedy for choice in result.choices] == [True, False]
    assert result.best == 0


def test_spaces_at_the_end_of_a_context_belong_to_the_choices(llm: LLM) -> None:
    with_space, without = llm.score(
        [CONTEXT + " ", CONTEXT], [["Paris", "Rome"], [" Paris", " Rome"]], use_tqdm=False
    )
    assert with_space.context_token_ids == without.context_token_ids
    for one, other in zip(with_space.choices, without.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_contexts_may_be_ids_and_conversations(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CONTEXT)
    contexts: list[Context] = [MESSAGES, ids, CONTEXT]
    chat, given, text = llm.score(contexts, [" Paris", " Rome"], use_tqdm=False)
    assert chat.context_token_ids == llm.tokenizer.encode_chat(MESSAGES)
    assert given.context_token_ids == text.context_token_ids == ids
    assert [c.logprob for c in given.choices] == pytest.approx(
        [c.logprob for c in text.choices], abs=1e-4
    )
    (alone,) = llm.score(MESSAGES, [" Paris", " Rome"], use_tqdm=False)
    assert [c.logprob for c in alone.choices] == pytest.approx(
        [c.logprob for c in chat.choices], abs=1e-4
    )


def test_a_choice_that_continues_a_word_is_encoded_by_itself(llm: LLM) -> None:
    (result,) = llm.score("The cap", ["ital of France"], use_tqdm=False)
    assert llm.tokenizer.decode([*result.context_token_ids, *result.choices[0].token_ids]) == (
        "The capital of France"
    )


@pytest.mark.parametrize(
    ("contexts", "choices", "complaint"),
    [
        (CONTEXT, [], "choices: must be 1 to"),
        (CONTEXT, [""], "choices: must be texts"),
        (CONTEXT, " Paris", "choices: must be a list"),
        (CONTEXT, [[" A"], [" B"]], "2 lists given for 1 contexts"),
        (CONTEXT, [[1]], "choices: must be texts"),
        ("", [" A"], "at least one token"),
        ([CONTEXT, "one two " * 5000], [" A"], r"contexts\[1\]"),
    ],
)
def test_invalid_scoring_calls_are_refused(
    llm: LLM, contexts: list[str], choices: list[str], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        llm.score(contexts, choices, use_tqdm=False)
    assert not llm.text_engine.has_work


def test_errors_may_be_results(llm: LLM) -> None:
    bad, good = llm.score(["", CONTEXT], [" A", " B"], use_tqdm=False, errors="return")
    assert bad.error is not None
    assert "at least one token" in bad.error
    assert good.error is None
    assert len(good.choices) == 2


# --- over a fake model ---------------------------------------------------------------------------


def fake_scores(context: str, choice: str) -> list[float]:
    ids, found = a_tokenizer().encode(context), list[float]()
    for token_id in a_tokenizer().encode(choice):
        found.append(fake_logprob(ids, token_id, 0).logprob)
        ids = [*ids, token_id]
    return found


def test_scores_can_be_awaited_on_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with a_fake_async_llm(FakeEngines(), monkeypatch) as other:
            text, chat = await asyncio.gather(
                other.score(CONTEXT, CHOICES), other.score(MESSAGES, CHOICES)
            )
            wanted = [fake_scores(CONTEXT, choice) for choice in CHOICES]
            assert [choice.token_logprobs for choice in text.choices] == wanted
            assert [choice.text for choice in chat.choices] == CHOICES
            with pytest.raises(InvalidRequest, match="choices"):
                await other.score(CONTEXT, [])
            with pytest.raises(InvalidRequest, match="prompt"):
                await other.score("x" * 10_000, CHOICES)
        assert not other._listeners

    asyncio.run(asyncio.wait_for(ask(), 300))


def test_if_steps_fail_because_of_a_context_only_its_result_has_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = FakeEngines()
    llm = a_fake_llm(engines, monkeypatch)
    bad_ids = str(llm.tokenizer.encode("bad")).strip("[]")

    def fail(step: Step) -> None:
        if bad_ids in str(step.token_ids.tolist()):
            raise RuntimeError("no")

    engines.at_launch = fail
    with pytest.raises(AnswerFailed, match="1 of 2 contexts could not be scored; number 1"):
        llm.score(["good", "bad"], CHOICES, use_tqdm=False)
    good, bad = llm.score(["good", "bad"], CHOICES, use_tqdm=False, errors="return")
    assert [choice.token_logprobs for choice in good.choices] == [
        fake_scores("good", choice) for choice in CHOICES
    ]
    assert bad.error is not None
    assert not bad.choices
    llm.close()
