"""A model with recurrent layers, served: chats start where their system prompt ends."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3NextConfig

from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.llm.llm import LLM
from mainstem.text.boundaries import MessageStarts
from mainstem.text.tokenizer import Tokenizer
from tests.families.test_qwen_hybrid import EXPERTS, HYBRID
from tests.models.checkpoints import write_checkpoint
from tests.server.process import a_process

SYSTEM = "You answer questions of pupils about plants, and never about animals. " * 115

QUESTIONS = [first + " do the leaves of a tree turn yellow and fall? " * 4 for first in "ABC"]


@pytest.fixture(scope="module")
def folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid model with the tokenizer and chat template of SmolLM2."""
    folder = tmp_path_factory.mktemp("hybrid")
    changes = {"vocab_size": 49152, "max_position_embeddings": 4096}
    write_checkpoint(Qwen3NextConfig(**(HYBRID | EXPERTS | changes)), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (smollm2_folder / name).exists():
            shutil.copy(smollm2_folder / name, folder / name)
    return folder


def chat(question: str) -> list[dict[str, object]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def system_tokens(folder: Path) -> int:
    """The length of the system message; the rest begins like every other message."""
    tokenizer = Tokenizer.load(folder)
    first, second = (tokenizer.encode_chat(chat(text)) for text in ("Why?", "When?"))
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    starts = [i for i, token_id in enumerate(first) if token_id == first[0]]
    assert 1500 < starts[1] < shared < starts[1] + 5
    return starts[1]


def check_starts(folder: Path, found: list[int]) -> None:
    """The second request starts where the system message ends. The third may have in common with
    the others what templates put before each question."""
    end = system_tokens(folder)
    assert found[:2] == [0, end]
    assert end <= found[2] < end + 5


def test_served_one_by_one_each_chat_starts_after_the_system_prompt(folder: Path) -> None:
    flags = ["--model", str(folder), "--kv-tokens", "16384", "--states", "24"]
    found = []
    with a_process(flags, "real") as process:
        for question in QUESTIONS:
            body = {"messages": chat(question), "max_tokens": 3, "temperature": 0}
            reply = process.request("POST", "/v1/chat/completions", json=body).json()
            found.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert process.stop() == 0
    check_starts(folder, found)


def test_chats_of_llm_start_after_the_system_prompt(folder: Path) -> None:
    with LLM(str(folder), kv_tokens=16384, states=24) as llm:
        found = [
            llm.chat(chat(question), SamplingParams(max_tokens=3, temperature=0))[
                0
            ].num_cached_tokens
            for question in QUESTIONS
        ]
    check_starts(folder, found)


def test_boundaries_are_where_the_last_messages_begin(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_folder)
    turns: list[dict[str, object]] = [{"role": "system", "content": "Be brief."}]
    for _ in range(3):
        turns += [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    ids = tokenizer.encode_chat(turns[:-1])
    starts = MessageStarts(tokenizer)
    marked = starts.mark(Request(RequestId("r"), np.array(ids, np.int32)))
    start = tokenizer.special_id("<|im_start|>")
    places = [index for index, token_id in enumerate(ids) if token_id == start]
    assert len(places) == 7
    assert marked.boundaries == (places[1], places[-2], places[-1])
    plain = Request(RequestId("r"), np.arange(100, 200, dtype=np.int32))
    assert starts.mark(plain) is plain
    own = Request(RequestId("r"), np.array(ids, np.int32), boundaries=(5,))
    assert starts.mark(own) is own
