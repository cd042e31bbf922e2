"""SingleTokenPass is the same mathematics as Decoder.forward, whatever lies in unused slots."""

from pathlib import Path

import pytest
import torch

from mainstem import LLM, SamplingParams
from mainstem.runner.runner import CpuRunner
from mainstem.runner.single import SingleTokenPass


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_lone_sequence_gives_the_same_logprobs_either_way(
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
        logprobs = result.outputs[0].logprobs
        assert logprobs is not None
        return result.outputs[0].token_ids, [entry.logprob for entry in logprobs]

    fast_ids, fast = answer(float("nan"))
    monkeypatch.setattr(SingleTokenPass, "make", lambda *_: None)
    ids, slow = answer(0.0)
    assert fast_ids == ids
    assert torch.tensor(fast) == pytest.approx(torch.tensor(slow), abs=1e-4)
