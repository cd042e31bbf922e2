"""The runner on real (tiny) models, compared with Hugging Face transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mainstem.core.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Quantize,
    SchedConfig,
)
from mainstem.core.errors import ConfigError
from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.families import read_spec
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.origin import folder_origin
from mainstem.runner.pages import DevicePages
from tests.models.checkpoints import CONFIGS, VOCAB, make_checkpoint
from tests.runner.steps import Seq, Work, a_step, run, spoil_pages

TOLERANCE = 1e-4
PAGE = 4


def logprobs_by_transformers(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def tokens(count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, count)]


def load_runner(
    folder: Path, model: ModelConfig, cache: CacheConfig, max_model_len: int | None
) -> tuple[CpuRunner, RunnerFacts]:
    sched = SchedConfig(max_model_len=max_model_len)
    return load_cpu_runner(folder_origin(folder), EngineConfig(model, cache, sched))


def loaded(folder: Path, page_size: int = PAGE, kv_tokens: int = 1024) -> CpuRunner:
    cache = CacheConfig(page_size=page_size, kv_tokens=kv_tokens)
    runner, _ = load_runner(folder, ModelConfig(), cache, None)
    spoil_pages(runner)
    return runner


def prompt_logprobs(runner: CpuRunner, seq: Seq, chunk: int, page_size: int = PAGE) -> list[float]:
    """Logprob of every prompt token after the first; the prompt runs in chunks."""
    found: list[float] = []
    prompt = len(seq.token_ids)
    while seq.num_done < prompt:
        work = Work(seq, min(chunk, prompt - seq.num_done), has_sample=False)
        step = a_step([work], page_size, VOCAB, prompt_logprobs=0)
        found += [record.logprob for record in run(runner, step, [work]).prompt_logprobs]
    return found[:-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(name, tmp_path)
    runner = loaded(tmp_path)
    prompt = tokens(77, seed=1)
    seq = Seq(0, prompt, pages=list(range(40, 0, -1)))
    ours = prompt_logprobs(runner, seq, chunk=20)
    table = logprobs_by_transformers(model, prompt)
    theirs = table[torch.arange(76), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(name, tmp_path)
    runner = loaded(tmp_path)
    prompts = [tokens(count, seed=count) for count in (5, 1, 23)]
    seqs = [
        Seq(slot, list(prompt), pages=list(range(20 * slot, 20 * slot + 20)))
        for slot, prompt in enumerate(prompts)
    ]
    works = [Work(seq, len(seq.token_ids)) for seq in seqs]
    for _ in range(12):
        run(runner, a_step(works, PAGE, VOCAB), works)
        works = [Work(seq, 1) for seq in seqs]
    for seq, prompt in zip(seqs, prompts, strict=True):
        table = logprobs_by_transformers(model, seq.token_ids[:-1])
        assert seq.token_ids[len(prompt) :] == table.argmax(-1)[len(prompt) - 1 :].tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_logits_do_not_depend_on_pages_and_chunks(
    page_size: int, chunk: int, tmp_path: Path
) -> None:
    model = make_checkpoint("llama", tmp_path)
    prompt = tokens(50, seed=5)
    runner = loaded(tmp_path, page_size)
    seq = Seq(0, prompt, pages=list(range(60))[:: max(1, page_size // 16)])
    ours = prompt_logprobs(runner, seq, chunk, page_size)
    theirs = logprobs_by_transformers(model, prompt)[torch.arange(49), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_sixteen_bits_are_close_to_fp32(dtype: DType, tmp_path: Path) -> None:
    """8 (bf16) or 11 (fp16) bits in three layers of large random weights change logits of size 10
    by about 0.1. The mean error over 40 logprobs must stay below twice that."""
    model = make_checkpoint("qwen3", tmp_path)
    cache = CacheConfig(page_size=PAGE, kv_tokens=256)
    runner, facts = load_runner(tmp_path, ModelConfig(dtype=dtype), cache, None)
    assert facts.dtype is dtype
    prompt = tokens(41, seed=6)
    first = Seq(0, prompt, pages=list(range(20)))
    ours = torch.tensor(prompt_logprobs(runner, first, chunk=16))
    theirs = logprobs_by_transformers(model, prompt)[torch.arange(40), torch.tensor(prompt[1:])]
    assert float((ours - theirs).abs().mean()) < 0.2


def test_a_step_may_mix_decodes_over_a_shared_prefix_with_a_prefill(tmp_path: Path) -> None:
    """Decodes over a shared run of pages and a chunk of another prompt, in one step."""
    model = make_checkpoint("llama", tmp_path)
    runner = loaded(tmp_path)
    prefix = tokens(16, seed=8)
    shared = [0, 1, 2, 3]
    first = Seq(0, prefix + tokens(3, seed=9), [*shared, *range(10, 20)])
    works = [Work(first, 19)]
    run(runner, a_step(works, PAGE, VOCAB), works)
    others = [
        Seq(slot, prefix + tokens(4 + slot, seed=slot), [*shared, *range(20 * slot, 20 * slot + 9)])
        for slot in (1, 2, 3)
    ]
    for seq in (first, *others):
        seq.num_shared_pages = 4
    for seq in others:
        seq.num_done = 16  # its prefix is already in the pages
    for _ in range(4):
        works = [Work(first, 1), *(Work(s, len(s.token_ids) - s.num_done) for s in others)]
        run(runner, a_step(works, PAGE, VOCAB), works)
    for seq, start in ((first, 19), *((s, 20 + s.slot) for s in others)):
        table = logprobs_by_transformers(model, seq.token_ids[:-1])
        assert seq.token_ids[start:] == table.argmax(-1)[start - 1 :].tolist()


def test_carried_tokens_are_the_samples_of_the_previous_step(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    answers = []
    for carry in (False, True):
        runner = loaded(tmp_path)
        seqs = [
            Seq(slot, tokens(6, seed=slot), list(range(9 * slot, 9 * slot + 9))) for slot in (0, 1)
        ]
        works = [Work(seq, 6) for seq in seqs]
        run(runner, a_step(works, PAGE, VOCAB), works)
        for _ in range(5):
            works = [Work(seq, 1) for seq in seqs]
            step = a_step(works, PAGE, VOCAB, carry=carry)
            if carry:
                step.token_ids[:] = 0
            run(runner, step, works)
        answers.append([seq.token_ids for seq in seqs])
    assert answers[0] == answers[1]


def test_logprobs_equal_those_of_transformers(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    runner = loaded(tmp_path)
    seq = Seq(0, tokens(9, seed=4), list(range(9)))
    work = Work(seq, 9)
    step = a_step([work], PAGE, VOCAB, prompt_logprobs=3)
    step.sampling.wants_logprobs[0] = True
    step.sampling.num_logprobs[0] = 5
    result = run(runner, step, [work])
    table = logprobs_by_transformers(model, seq.token_ids[:-1])
    record = result.logprobs[0]
    assert record.token_id == seq.token_ids[-1] == record.top_ids[0]
    assert record.rank == 1
    expected = table[-1].topk(5)
    assert list(record.top_ids) == expected.indices.tolist()
    np.testing.assert_allclose(record.top_logprobs, expected.values, atol=TOLERANCE)
    third = result.prompt_logprobs[2]
    assert third.token_id == seq.token_ids[3]
    assert third.rank == 1 + int((table[2] > table[2, seq.token_ids[3]]).sum())
    assert len(third.top_ids) == 3


def test_facts_describe_the_loaded_model(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    cache = CacheConfig(page_size=8, kv_tokens=100)
    _, facts = load_runner(tmp_path, ModelConfig(), cache, 128)
    assert (facts.num_pages, facts.page_size) == (13, 8)
    assert facts.max_model_len == 13 * 8  # there is no room for 128
    assert facts.vocab_size == VOCAB
    _, other = load_runner(tmp_path, ModelConfig(quantize=Quantize.INT8), cache, None)
    assert other.identity != facts.identity
    assert other.max_model_len == 13 * 8
    _, again = load_runner(tmp_path, ModelConfig(), cache, None)
    assert again.identity == facts.identity


def test_pages_take_their_share_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path)
    # before loading, for packing, after loading, and to check that the pages fit
    readings = iter([8 << 20, 7 << 20, 6 << 20, 6 << 20])
    monkeypatch.setattr("mainstem.runner.cpu_load.available_bytes", lambda: next(readings))
    _, facts = load_runner(tmp_path, ModelConfig(), CacheConfig(memory_share=0.5), None)
    kv_bytes_per_token = 3 * 2 * 2 * 8 * 4
    assert facts.num_pages == (2 << 20) // (kv_bytes_per_token * 16)
    readings = iter([8 << 20, 7 << 20, 6 << 20])
    with pytest.raises(ConfigError, match="leaves no room"):
        load_runner(tmp_path, ModelConfig(), CacheConfig(memory_share=0.25), None)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    cache = CacheConfig(kv_tokens=64)
    with pytest.raises(ConfigError, match="max_model_len=513"):
        load_runner(tmp_path, ModelConfig(), cache, 513)
    settings = ModelConfig(quantize=Quantize.INT8, dtype=DType.BF16)
    with pytest.raises(ConfigError, match="int8"):
        load_runner(tmp_path, settings, cache, None)


def test_the_gate_is_called_before_every_layer(tmp_path: Path) -> None:
    class Log:
        def __init__(self) -> None:
            self.layers: list[int] = []

        def before(self, layer: int) -> None:
            self.layers.append(layer)

    make_checkpoint("llama", tmp_path)
    spec = read_spec(tmp_path)
    gate = Log()
    pages = DevicePages(spec, 4, PAGE, torch.float32)
    runner = CpuRunner(load_decoder(tmp_path, spec, torch.float32), pages, 64, gate)
    work = Work(Seq(0, tokens(3, seed=1), [0]), 3)
    run(runner, a_step([work], PAGE, VOCAB), [work])
    assert gate.layers == [0, 1, 2]
