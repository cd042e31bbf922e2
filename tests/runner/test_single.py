"""SingleTokenPass computes the same as Decoder.forward, whatever unused slots contain."""

from pathlib import Path

import pytest
import torch

from mainstem import LLM, SamplingParams
from mainstem.core.config import CacheConfig, EngineConfig
from mainstem.runner import single
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from mainstem.runner.single import SingleTokenPass
from tests.models.checkpoints import VOCAB, make_checkpoint
from tests.runner.steps import Seq, Work, a_step, run, spoil_pages


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_lone_sequence_gives_the_same_logprobs_with_and_without_the_pass(
    smollm2_folder: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(100, 137))
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)

    def answer(poison: float) -> tuple[list[int], list[float]]:
        with LLM("smollm2", kv_tokens=512, page_size=page_size) as llm:
            runner = llm.text_engine.engine._runner
            assert isinstance(runner, CpuRunner)
            for layer in range(30):
                runner.pages.joint(layer).fill_(poison)
            (result,) = llm.generate([prompt], params, use_tqdm=False)
        token_ids, logprobs = result.outputs[0].token_ids, result.outputs[0].logprobs
        assert logprobs is not None
        places = zip(token_ids, logprobs, strict=True)
        return token_ids, [place[token_id].logprob for token_id, place in places]

    fast_ids, fast = answer(float("nan"))
    monkeypatch.setattr(SingleTokenPass, "make", lambda *_: None)
    ids, slow = answer(0.0)
    assert fast_ids == ids
    assert torch.tensor(fast) == pytest.approx(torch.tensor(slow), abs=1e-4)


@pytest.mark.parametrize("min_fused_keys", [13, 1000])
@pytest.mark.parametrize("pages", [[3, 4, 5, 6, 7], [9, 2, 5, 4, 0]])
def test_pages_may_lie_anywhere(
    pages: list[int], min_fused_keys: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring pages are read in place, others are gathered; few and many keys use different
    attention calls. Logprobs are the same as without this pass."""
    make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(single, "_MIN_FUSED_KEYS", min_fused_keys)

    def answer() -> list[float]:
        config = EngineConfig(cache=CacheConfig(page_size=4, kv_tokens=40))
        runner, _ = load_cpu_runner(folder_origin(tmp_path), config)
        spoil_pages(runner)
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        seq = Seq(0, list(range(5, 14)), pages=pages, sampling=sampling)
        logprobs = []
        for num_tokens in (9, *[1] * 9):
            work = Work(seq, num_tokens)
            result = run(runner, a_step([work], 4, VOCAB), [work])
            logprobs.append(result.logprobs[0].logprob)
        return logprobs

    fast = answer()
    monkeypatch.setattr(SingleTokenPass, "make", lambda *_: None)
    assert fast == pytest.approx(answer(), abs=1e-4)


@pytest.mark.parametrize("min_elements", [2_400, 4_000])
def test_rows_added_for_more_threads_change_nothing(
    min_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of zeros are added to the output product (48 x 48) and, in the second case, also to the
    down product (48 x 80)."""
    make_checkpoint("llama", tmp_path)
    config = EngineConfig(cache=CacheConfig(page_size=4, kv_tokens=40))

    def answer() -> tuple[list[float], int]:
        runner, _ = load_cpu_runner(folder_origin(tmp_path), config)
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        seq = Seq(0, list(range(5, 14)), pages=[1, 2, 3], sampling=sampling)
        logprobs = []
        for num_tokens in (9, 1, 1):
            work = Work(seq, num_tokens)
            result = run(runner, a_step([work], 4, VOCAB), [work])
            logprobs.append(result.logprobs[0].logprob)
        assert runner._single is not None
        return logprobs, len(runner._single._padded_x)

    plain, size = answer()
    assert size == 48
    monkeypatch.setattr(single, "_THREADED_ELEMENTS", min_elements)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.__config__, "show", lambda: "BLAS_INFO=open")
    padded, size = answer()
    assert size > 48
    assert padded == pytest.approx(plain, abs=1e-5)
