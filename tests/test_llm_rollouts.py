"""Rollouts, logprobs as arrays and updates, through LLM and AsyncLLM, on a tiny model."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mainstem import LLM, SamplingParams
from mainstem.async_llm import AsyncLLM
from mainstem.core.errors import InvalidRequest
from mainstem.llm.rollouts import Rollout, RolloutGroup
from tests.engine.test_weights import varied
from tests.fake_engines import TEMPLATE, a_tokenizer
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.torch
PROMPTS = [list(range(3, 40)), list(range(50, 90)), [5, 6, 7]]
WARM = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    for name in ("a", "b"):
        model = make_checkpoint("llama", root / name, vocab_size=300)
        if name == "b":
            varied(model, root / name)
        (root / name / "tokenizer.json").write_text(a_tokenizer().to_json())
        config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
        (root / name / "tokenizer_config.json").write_text(json.dumps(config))
    return root / "a", root / "b"


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(folders[0], device="cpu", kv_tokens=4096) as made:
        yield made


@pytest.fixture
def model(folders: tuple[Path, Path]) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    return loaded


def logits_of(model: PreTrainedModel, prompt: list[int], answer: Rollout) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer.token_ids.tolist()]])
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits


def test_groups_have_logprobs_equal_to_transformers(llm: LLM, model: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0.7, top_k=20, max_tokens=12, ignore_eos=True)
    groups = list(llm.rollouts(PROMPTS, 4, params))
    assert sorted(group.index for group in groups) == [0, 1, 2]
    for group in groups:
        assert group.is_whole
        assert group.prompt_token_ids == PROMPTS[group.index]
        assert len({tuple(answer.token_ids.tolist()) for answer in group.answers}) > 1
        for answer in group.answers:
            logits = logits_of(model, PROMPTS[group.index], answer)
            places = range(len(answer.token_ids)), answer.token_ids.tolist()
            raw = logits.log_softmax(-1)[places]
            assert np.abs(answer.raw_logprobs - raw.numpy()).max() < 1e-4
            cut = (logits / 0.7).masked_fill(logits < logits.topk(20).values[:, -1:], -np.inf)
            drawn = cut.log_softmax(-1)[places]
            assert np.abs(answer.drawn_logprobs - drawn.numpy()).max() < 1e-4
            assert answer.weights == (llm.weights_version,)


def test_generate_has_the_same_arrays(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=6, logprobs=0, ignore_eos=True, stop="zz")
    (result,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    answer = result.outputs[0]
    assert answer.logprobs is not None
    listed = [place[i].logprob for place, i in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.raw_logprobs.tolist() == np.array(listed, np.float32).tolist()
    assert len(answer.drawn_logprobs) == 6
    assert (answer.drawn_logprobs != answer.raw_logprobs).all()
    assert answer.weights == (llm.weights_version,)


def test_a_prompt_is_computed_once_for_its_group(llm: LLM) -> None:
    llm.text_engine.engine.clear_cache()
    before = llm.counters.computed_tokens
    (_,) = llm.rollouts([PROMPTS[1]], 16, WARM)
    # the whole prompt once; all others at most its last, partial page
    assert llm.counters.computed_tokens - before <= len(PROMPTS[1]) + 15 * 16


def test_unfinished_answers_continue_from_cached_pages(llm: LLM, model: PreTrainedModel) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    (group,) = llm.rollouts([PROMPTS[0]], 3, params, budget=25)
    assert not group.is_whole
    assert [len(answer.token_ids) for answer in group.answers] == [25, 25, 25]
    first = [answer.token_ids.tolist() for answer in group.answers]
    before = llm.counters.computed_tokens
    (again,) = llm.rollouts([group], 3, params, budget=25)
    assert again is group
    assert again.is_whole
    assert [answer.finish_reason for answer in group.answers] == ["length"] * 3
    for answer, start in zip(group.answers, first, strict=True):
        assert len(answer.token_ids) == len(answer.raw_logprobs) == 40
        assert answer.token_ids.tolist()[:25] == start
        logits = logits_of(model, PROMPTS[0], answer)
        raw = logits.log_softmax(-1)[range(40), answer.token_ids.tolist()]
        assert np.abs(answer.raw_logprobs - raw.numpy()).max() < 1e-4
    # of each answer: at most a page that was not full
    assert llm.counters.computed_tokens - before <= 3 * 16
    with pytest.raises(InvalidRequest, match="whole already"):
        list(llm.rollouts([group], 3, params))


def test_a_seed_gives_the_same_parts_again(llm: LLM) -> None:
    def answers() -> list[list[int]]:
        (group,) = llm.rollouts([PROMPTS[2]], 2, WARM, budget=5)
        while not group.is_whole:
            (group,) = llm.rollouts([group], 2, WARM, budget=5)
        return [answer.token_ids.tolist() for answer in group.answers]

    assert answers() == answers()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(max_tokens=9, stop="x"), "stop: cannot be combined with a budget"),
        (SamplingParams(max_tokens=9, presence_penalty=0.5), "presence_penalty: cannot be"),
        (SamplingParams(max_tokens=None), "max_tokens: must be set"),
    ],
)
def test_what_cannot_continue_is_refused(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.rollouts([PROMPTS[0]], 2, params, budget=4)


def test_update_weights_and_sleep(folders: tuple[Path, Path], model: PreTrainedModel) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM(folders[1], device="cpu", kv_tokens=1024) as other:
        (expected,) = other.generate([PROMPTS[0]], greedy, use_tqdm=False)
        version = other.weights_version
    with LLM(folders[0], device="cpu", kv_tokens=1024) as llm:
        assert llm.update_weights(folders[1]) == version
        stream = llm.stream(PROMPTS[0], greedy)
        pieces = [next(stream)]
        llm.update_weights(model.state_dict(), mode="continue")
        pieces += stream
        assert len(pieces[-1].weights) == 2
        llm.update_weights(str(folders[1]))
        llm.sleep(level=1)
        assert llm.is_sleeping
        with pytest.raises(InvalidRequest, match="it sleeps; call wake_up"):
            llm.generate([PROMPTS[0]], greedy, use_tqdm=False)
        llm.wake_up(tags=["weights"])
        llm.wake_up(["kv_cache"])
        (found,) = llm.generate([PROMPTS[0]], greedy, use_tqdm=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].weights == (version,)
        assert llm.reset_prefix_cache()
        with pytest.raises(InvalidRequest, match="mode: must be one of"):
            llm.update_weights(folders[0], mode="soon")
        with pytest.raises(InvalidRequest, match="is not a folder"):
            llm.update_weights(folders[0] / "nowhere")
        with pytest.raises(InvalidRequest, match="tags: must be one of"):
            llm.wake_up(["everything"])


def test_the_calls_of_a_trainer_beside_its_engine(
    folders: tuple[Path, Path], model: PreTrainedModel
) -> None:
    """The order of TRL's colocated mode: asleep while it trains, then weights, then pages."""
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(
        folders[0],
        device="cpu",
        kv_tokens=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_sleep_mode=True,
    ) as llm:
        expected = llm.generate(prompts, sampling_params=greedy, use_tqdm=False)
        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.update_weights(model.named_parameters())
            llm.reset_prefix_cache()
            llm.wake_up(tags=["weights"])
            llm.wake_up(tags=["kv_cache"])
            found = llm.generate(prompts, sampling_params=greedy, use_tqdm=False)
            assert [each.outputs[0].token_ids for each in found] == [
                each.outputs[0].token_ids for each in expected
            ]
            logprobs = found[0].outputs[0].logprobs
            assert logprobs is not None
            (drawn,) = logprobs[0].values()
            assert drawn.rank == 1


def test_callers_that_leave_do_not_stop_the_engine(
    folders: tuple[Path, Path], model: PreTrainedModel
) -> None:
    """One leaves while its update runs, and one before the engine has seen what it asked."""
    is_begun, may_end = Event(), Event()

    def held() -> Iterator[tuple[str, torch.Tensor]]:
        is_begun.set()
        assert may_end.wait(60)
        yield from model.named_parameters()

    async def run() -> None:
        async with AsyncLLM(folders[1], device="cpu", kv_tokens=1024) as llm:
            first = llm.weights_version
            update = asyncio.create_task(llm.update_weights(held()))
            await asyncio.to_thread(is_begun.wait, 60)
            refused = asyncio.create_task(llm.sleep(3))
            await asyncio.sleep(0)  # it is queued
            update.cancel()
            refused.cancel()
            await asyncio.gather(update, refused, return_exceptions=True)
            may_end.set()
            found = await llm.generate(PROMPTS[0], WARM)
            assert found.outputs[0].weights == (llm.weights_version,) != (first,)

    asyncio.run(run())


def test_async_rollouts_and_updates(folders: tuple[Path, Path]) -> None:
    async def run() -> list[RolloutGroup]:
        async with AsyncLLM(folders[0], device="cpu", kv_tokens=4096) as llm:
            first = llm.weights_version
            groups: list[RolloutGroup] = []
            async for group in llm.rollouts(PROMPTS, 3, WARM):
                groups.append(group)
                if len(groups) == 1:
                    second = await llm.update_weights(folders[1])
            assert second != first == groups[0].answers[0].weights[0]
            later = [group async for group in llm.rollouts(PROMPTS[:1], 2, WARM, budget=4)]
            later = [group async for group in llm.rollouts(later, 2, WARM)]
            assert later[0].is_whole
            assert later[0].answers[0].weights == (second,)
            await llm.sleep()
            await llm.wake_up()
            with pytest.raises(InvalidRequest, match="level"):
                await llm.sleep(3)
            return groups

    groups = asyncio.run(run())
    assert sorted(group.index for group in groups) == [0, 1, 2]
    assert all(len(answer.token_ids) == 12 for group in groups for answer in group.answers)
