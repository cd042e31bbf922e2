"""LLM, answers and the command line over the real embedded model."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mainstem import LLM, InvalidRequest, SamplingParams
from mainstem.cli import chat, demo
from mainstem.cli import main as cli
from mainstem.core.errors import ConfigError
from mainstem.core.request import Output

STORY = "Once upon a time, in a small village by the sea, there lived a fisherman. " * 3


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> Iterator[LLM]:
    made = LLM("smollm2", kv_tokens=8192)
    yield made
    made.close()


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [STORY + "One day", "The capital of France is", STORY + "His wife"]
    results = llm.generate(prompts, greedy(4), use_tqdm=False)
    assert [result.prompt for result in results] == prompts
    assert all(result.finished for result in results)
    assert results[1].outputs[0].text.startswith(" Paris")
    assert max(result.num_cached_tokens for result in results) >= 48


def test_prompts_may_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    (by_text,) = llm.generate("The capital of France is", greedy(), use_tqdm=False)
    (by_ids,) = llm.generate(ids, greedy(), use_tqdm=False)
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.prompt is None


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    one, two = llm.chat([messages, messages], greedy(16), use_tqdm=False)
    assert "Paris" in one.outputs[0].text
    assert one.outputs[0].text == two.outputs[0].text
    assert one.outputs[0].finish_reason == "stop"


def test_a_turn_of_a_session_extends_the_ids_that_were_sampled(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Invent some words."}]
    sampling = SamplingParams(temperature=1.5, seed=3, max_tokens=24)
    (first,) = llm.chat(messages, sampling, use_tqdm=False, sessions=["a"])
    answer = first.outputs[0]
    said = [*first.prompt_token_ids, *answer.token_ids]
    messages.append({"role": "assistant", "content": answer.text})
    messages.append({"role": "user", "content": "And more?"})
    encoded = llm.tokenizer.encode_chat(messages)
    assert encoded[: len(said)] != said, "encoding the answer's text must give other ids"
    (with_session,) = llm.chat(messages, greedy(1), use_tqdm=False, sessions=["a"])
    (without,) = llm.chat(messages, greedy(1), use_tqdm=False)
    assert with_session.prompt_token_ids[: len(said)] == said
    assert without.prompt_token_ids == encoded
    assert with_session.num_cached_tokens > without.num_cached_tokens


def test_stop_strings_cut_the_text_and_end_the_answer(llm: LLM) -> None:
    (whole,) = llm.generate(STORY, greedy(24), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[10:14]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, stop=[stop])
    (cut,) = llm.generate(STORY, sampling, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop
    assert len(cut.outputs[0].token_ids) < len(whole.outputs[0].token_ids)


def test_a_seed_gives_the_same_samples_whatever_else_runs(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=8, n=2)
    (alone,) = llm.generate(STORY, sampling, use_tqdm=False)
    others = SamplingParams(temperature=1.0, max_tokens=5)
    batch = llm.generate(["Hi", STORY, "The"], [others, sampling, others], use_tqdm=False)
    texts = [output.text for output in alone.outputs]
    assert [output.text for output in batch[1].outputs] == texts
    assert texts[0] != texts[1], "the two answers have different seeds"


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=0)
    (result,) = llm.generate("The capital of France is", sampling, use_tqdm=False)
    answer = result.outputs[0]
    assert answer.logprobs is not None
    assert [next(iter(place)) for place in answer.logprobs] == answer.token_ids
    assert all([found.rank for found in place.values()] == [1, 2] for place in answer.logprobs)
    chosen = [place[i] for i, place in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert "".join(str(found.decoded_token) for found in chosen) == answer.text
    assert answer.cumulative_logprob == pytest.approx(sum(found.logprob for found in chosen))
    assert result.prompt_logprobs is not None
    assert [place and list(place) for place in result.prompt_logprobs] == [
        None,
        *([token_id] for token_id in result.prompt_token_ids[1:]),
    ]


def test_calls_from_several_threads_get_their_own_answers(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon", "One day"]
    alone = [llm.generate(prompt, greedy(4), use_tqdm=False)[0].outputs[0] for prompt in prompts]
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(llm.generate, prompt, greedy(4), False) for prompt in prompts]
        found = [call.result()[0].outputs[0] for call in calls]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in alone]


def test_a_bad_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.generate([[1, 2, 3], [10**6]], greedy(), use_tqdm=False)
    assert not llm.text_engine.has_work
    llm.text_engine.engine.check()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"page_size": 3}, "power of two"), ({"max_model_len": 10**6}, "max_model_len")],
)
def test_impossible_settings_are_refused(settings: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM("smollm2", **settings)  # type: ignore[arg-type]  # one dict for all settings


def test_without_settings_generation_config_is_used(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = llm.tokenizer.sampling_defaults
    monkeypatch.setitem(advice, "temperature", 0.0)
    monkeypatch.setitem(advice, "max_tokens", 2)
    assert llm.get_default_sampling_params().is_greedy
    found, expected = (
        llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].token_ids
        for params in (None, greedy(2))
    )
    assert found == expected


def test_a_chat_template_is_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plain.jinja"
    path.write_text("{{ messages[0]['content'] }}")
    argv = ["generate", "--chat", "The capital of France is", "--max-tokens", "1", "--json"]
    assert cli.main([*argv, "--kv-tokens", "1024", "--chat-template", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["prompt_tokens"]) == (" Paris", 5)
    assert cli.main([*argv, "--chat-template", str(tmp_path / "none.jinja")]) == 2
    assert "none.jinja cannot be read" in capsys.readouterr().err


def test_generate_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "The capital of France is", "--max-tokens", "3", "--json"]
    assert cli.main([*argv, "--kv-tokens", "1024"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens"] == 3
    assert report["text"].startswith(" Paris")


def test_chat_answers_takes_commands_and_prints_statistics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["What is the capital of France?", "/reset", "Hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    assert chat.main(["--max-tokens", "12", "--stats", "--kv-tokens", "2048"]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "tokens/s" in out


def test_a_misspelt_command_in_a_chat_is_not_sent_to_the_model(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["/clear", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    monkeypatch.setattr(LLM, "from_config", lambda config: llm)
    monkeypatch.setattr(llm, "close", lambda: None)
    assert chat.main(["--stats"]) == 0
    out = capsys.readouterr().out
    assert "unknown command /clear" in out
    assert "tokens/s" not in out


def test_ctrl_c_in_a_chat_waits_for_the_step_and_the_history_stays_cached(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, num_ended = llm.text_engine.step, 0

    def interrupted() -> list[Output]:
        nonlocal num_ended
        if num_ended == 3:
            signal.raise_signal(signal.SIGINT)
        outputs = step()
        num_ended += 1
        return outputs

    monkeypatch.setattr(llm.text_engine, "step", interrupted)
    messages = [{"role": "user", "content": STORY}]
    chat.stream_answer(llm, messages, 0, greedy(64), shows_stats=True)
    assert 4 <= num_ended < 10
    assert "; 4 tokens" in capsys.readouterr().out
    chat.stream_answer(llm, messages, 0, greedy(4), shows_stats=True)
    found = re.search(r"(\d+) prompt tokens, (\d+) cached", capsys.readouterr().out)
    assert found is not None
    assert int(found[2]) > int(found[1]) // 2


def test_the_error_names_an_unknown_command_and_says_that_a_folder_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["sing"]) == 2
    assert "no command 'sing'" in capsys.readouterr().err
    assert cli.main(["generate", "x", "--model", "./nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert cli.main(["--version"]) == 0
    assert cli.main([]) == 2


def test_the_error_names_a_missing_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.setattr(cli, "import_module", missing)
    assert cli.main(["serve"]) == 2
    assert "mainstem[server]" in capsys.readouterr().err


def test_the_demo_answers_and_keeps_its_output_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs.jsonl"
    items = [{"q": "Where does the fisherman live?"}, {"q": "Who lives by the sea?"}]
    docs.write_text(json.dumps({"doc": STORY, "items": items}) + "\n")
    out = tmp_path / "deep" / "answers.jsonl"
    argv = ["--input", str(docs), "--out", str(out), "--max-tokens", "2", "--kv-tokens", "2048"]
    assert demo.main(argv) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["question"] for row in rows] == [item["q"] for item in items]
    shown = capsys.readouterr().out
    assert "2 of 2 answers are the same" in shown
    assert "prompt tokens computed" in shown


def test_the_demo_uses_the_store_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text(json.dumps({"doc": STORY, "items": [{"q": "Who lives by the sea?"}]}) + "\n")
    folder = tmp_path / "pages"
    argv = ["--input", str(docs), "--out", str(tmp_path / "out.jsonl"), "--max-tokens", "1"]
    argv += ["--kv-tokens", "1024", "--host-gb", "0.05", "--disk-gb", "0.5"]
    assert demo.main([*argv, "--disk-dir", str(folder)]) == 0
    assert any(folder.rglob("*"))
    capsys.readouterr()


@pytest.mark.parametrize("value", [["--limit", "0"], ["--limit", "-1"], ["--max-tokens", "0"]])
def test_a_demo_of_zero_questions_or_tokens_is_refused(value: list[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(value)


def test_errors_of_a_demo_are_reported_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "from_config", None)
    with pytest.raises(InvalidRequest, match="--out: cannot write"):
        demo.main(["--out", str(tmp_path)])
    with pytest.raises(InvalidRequest, match="--share"):
        demo.main(["--share", "none", "--out", str(tmp_path / "out.jsonl")])
    bad = tmp_path / "latin1.jsonl"
    bad.write_bytes(b"\xe9\n")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        demo.main(["--input", str(bad)])


def test_the_error_for_a_demo_file_names_the_bad_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"doc": "a", "items": [{"q": "b"}]}\nnonsense\n')
    with pytest.raises(InvalidRequest, match="line 2"):
        demo.load_questions(bad)
