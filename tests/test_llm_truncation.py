"""Conversations longer than the window, through LLM and the chat command, on the real model."""

import io
from pathlib import Path

import pytest

from mainstem import LLM, SamplingParams
from mainstem.cli import chat
from mainstem.core.errors import InvalidRequest

pytestmark = pytest.mark.torch

WINDOW = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> LLM:
    return LLM(smollm2_folder, max_model_len=WINDOW, kv_tokens=4 * WINDOW, threads=1)


@pytest.fixture(scope="module")
def text_ids(llm: LLM) -> list[int]:
    path = Path(__file__).parent / "data" / "wikitext2_head.txt"
    return llm.tokenizer.encode(path.read_text(encoding="utf-8")[:2000])


def test_a_session_continues_beyond_the_window(llm: LLM, text_ids: list[int]) -> None:
    first = llm.generate(text_ids[:80], GREEDY, use_tqdm=False, sessions=["a"])[0]
    assert first.num_dropped_tokens == 0
    second = llm.generate(text_ids[:110], GREEDY, use_tqdm=False, sessions=["a"])[0]
    assert second.num_dropped_tokens == 32
    assert second.num_cached_tokens == 48, "the sink and two moved pages"
    assert len(second.outputs[0].token_ids) == 4
    assert llm.counters.moved_pages == 2
    llm.text_engine.engine.check()


def test_recompute_needs_no_session(llm: LLM, text_ids: list[int]) -> None:
    got = llm.generate(text_ids[:110], GREEDY, use_tqdm=False, overflow="recompute")[0]
    assert got.num_dropped_tokens == 32
    kept = text_ids[:16] + text_ids[48:110]
    plain = llm.generate(kept, GREEDY, use_tqdm=False)[0]
    assert got.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_cut_by_attention_moves_pages_and_is_repeated(llm: LLM, text_ids: list[int]) -> None:
    llm.generate(text_ids[:80], GREEDY, use_tqdm=False, sessions=["b"])
    asked = {"use_tqdm": False, "sessions": ["b"], "overflow": "important"}
    got = llm.generate(text_ids[:110], GREEDY, **asked)[0]  # type: ignore[arg-type]
    assert got.num_dropped_tokens == 32
    assert got.num_cached_tokens == 48, "the sink and two moved pages"
    assert len(got.outputs[0].token_ids) == 4
    again = llm.generate(text_ids[:110], GREEDY, **asked)[0]  # type: ignore[arg-type]
    assert again.outputs[0].token_ids == got.outputs[0].token_ids
    llm.text_engine.engine.check()


@pytest.mark.parametrize(
    ("sessions", "overflow", "field"),
    [
        (None, None, "prompt"),
        (None, "kv", "overflow"),
        (None, "important", "overflow"),
        (["a"], "error", "prompt"),
        (["a", "b"], None, "sessions"),
        (["a"], "drop", "overflow"),
    ],
)
def test_the_error_names_the_setting_that_cannot_be_used(
    llm: LLM,
    text_ids: list[int],
    sessions: list[str] | None,
    overflow: str | None,
    field: str,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(text_ids[:110], GREEDY, use_tqdm=False, sessions=sessions, overflow=overflow)
    assert caught.value.field == field
    assert not llm.text_engine.has_work


@pytest.mark.parametrize("policy", ["kv", pytest.param("important", marks=pytest.mark.slow)])
def test_chat_reports_dropped_tokens(
    policy: str,
    smollm2_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [f"My number {i} is {i * 37}. Say ok." for i in range(6)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    flags = ["--model", str(smollm2_folder), "--max-model-len", "128", "--kv-tokens", "1024"]
    flags += ["--context-overflow", policy]
    assert chat.main([*flags, "--threads", "1", "--max-tokens", "6", "--system", "Be brief."]) == 0
    said = capsys.readouterr().out
    assert "out of the window" in said
    assert ("the first part" in said) is (policy == "kv")
