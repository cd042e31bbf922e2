"""`mainstem batch` from file to file, over a fake model whose answers tests can compute."""

import gzip
import io
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mainstem.batch import windows
from mainstem.batch.summary import Summary
from mainstem.cli.batch import main
from mainstem.core.config import EngineConfig, Share
from mainstem.core.errors import ConfigError, InvalidRequest, ModelNotFound
from mainstem.core.events import PagesLost, RequestSubmitted, StepFinished, StoreOpened
from mainstem.core.metrics import Counters
from mainstem.core.request import Request
from mainstem.text.text_engine import TextEngine
from tests.builders import BEYOND
from tests.fake_engines import FakeEngines, a_tokenizer, expected_text
from tests.fakes import fake_logprob
from tests.text.test_tools import HERMES, WEATHER

Row = dict[str, Any]


class Folder:
    """A place for one job's files, and a way to run it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.input, self.output = path / "in.jsonl", path / "out.jsonl"
        self.engines = FakeEngines()

    def write(self, rows: Sequence[Row | str]) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.input.write_text("".join(line + "\n" for line in lines))

    def run(self, *flags: str, output: Path | None = None) -> int:
        target = output or self.output
        argv = [str(self.input), "-o", str(target), "--no-progress", *flags]
        return main(argv, self.engines)

    def rows(self) -> dict[str | None, Row]:
        found = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({(row["custom_id"], row["error"] is None) for row in found}) == len(found)
        return {row["custom_id"]: row for row in found}

    def texts(self) -> dict[str | None, str]:
        """Answer texts by custom_id."""
        answers = {}
        for name, row in self.rows().items():
            if row["response"] is not None:
                choice = row["response"]["body"]["choices"][0]
                answers[name] = choice["text"] if "text" in choice else choice["message"]["content"]
        return answers

    def summary(self) -> Row:
        summary: Row = json.loads((self.path / "summary.json").read_text())
        return summary

    def run_with_summary(self, *flags: str) -> Row:
        self.run("--summary-json", str(self.path / "summary.json"), *flags)
        return self.summary()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def prompts(count: int, **fields: object) -> list[Row | str]:
    """Questions about a few documents; those of one document are not neighbours."""
    rows: list[Row | str] = []
    for index in range(count):
        prompt = f"document number {index % 4}, which is long; question {index}"
        rows.append({"custom_id": f"q{index}", "prompt": prompt, "temperature": 0, **fields})
    return rows


# --- the store ------------------------------------------------------------------------------------


def test_the_summary_reports_a_store_that_lost_pages(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    make = folder.engines

    def engines(config: EngineConfig) -> TextEngine:
        engine = make(config)
        engine.engine.bus.publish(StoreOpened("/store", 7, "index damaged", {"index": 5}))
        return engine

    folder.engines = engines  # type: ignore[assignment]
    make.at_step = lambda _: make.engine.engine.bus.publish(  # type: ignore[union-attr]
        PagesLost(1, "disk", "checksum")
    )
    folder.write(prompts(1, max_tokens=1))
    found = folder.run_with_summary()
    assert found["store_fault"].startswith("the KV store in /store has lost 5 pages: index damaged")
    assert found["lost_pages"] == {"index": 5, "checksum": 1}
    told = capsys.readouterr().err.splitlines()
    assert found["store_fault"] in told
    assert "stored pages that were lost and computed again: index 5, checksum 1" in told


def test_the_summary_does_not_mention_an_undamaged_store(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(prompts(1, max_tokens=1))
    found = folder.run_with_summary()
    assert (found["store_fault"], found["lost_pages"]) == (None, {})
    assert "store" not in capsys.readouterr().err


def test_the_summary_says_what_siblings_did_not_read_again() -> None:
    counters = Counters(states_read=25, states_saved=75, rows_folded=4)
    text = Summary("in", "out", "m", counters=counters).to_text()
    assert re.search(r"reads of states saved +75 \(75.0%\)", text)
    assert "states" not in Summary("in", "out", "m").to_text()


# --- fields that rows leave out ------------------------------------------------------------------


def test_rows_override_flags_and_flags_override_generation_config(folder: Folder) -> None:
    advice: dict[str, object] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    folder.engines = FakeEngines(sampling_defaults=advice)
    folder.write([{"prompt": "x", "max_tokens": 2, "temperature": 0.1}])
    folder.run("--top-p", "0.5")
    (sampling,) = folder.engines.samplings.values()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.1, 0.5, 20)


def test_generation_config_can_be_ignored(folder: Folder) -> None:
    folder.engines = FakeEngines(sampling_defaults={"temperature": 0.6})
    folder.write([{"prompt": "x", "max_tokens": 2}])
    folder.run("--generation-config", "none")
    (sampling,) = folder.engines.samplings.values()
    assert sampling.temperature == 1.0


def test_an_invalid_generation_config_is_refused_with_its_file_name(folder: Folder) -> None:
    folder.engines = FakeEngines(sampling_defaults={"top_p": 7})
    folder.write([{"prompt": "x", "max_tokens": 2}])
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p: .*, got 7"):
        folder.run()
    assert folder.run("--generation-config", "none") == 0


# --- apps and tools ------------------------------------------------------------------------------


def test_a_row_that_names_an_app_gets_the_prompt_of_the_app(folder: Folder) -> None:
    app = folder.path / "polite.txt"
    app.write_text("Be polite. ")
    row = {"prompt": "why?", "temperature": 0, "max_tokens": 6}
    folder.write(
        [
            row | {"custom_id": "by model", "model": "m:polite"},
            row | {"custom_id": "by name", "app": "polite"},
            row | {"custom_id": "plain", "model": "llama3:8b"},
            row | {"custom_id": "missing", "app": "rude"},
        ]
    )
    assert folder.run("--app", f"polite={app}") == 1
    texts = folder.texts()
    assert texts["by model"] == texts["by name"] == expected_text("Be polite. why?", 6)
    assert texts["plain"] == expected_text("why?", 6)
    assert folder.rows()["missing"]["error"]["code"] == "app_not_found"


def test_a_row_may_require_a_tool_call(folder: Folder) -> None:
    folder.engines = FakeEngines(template=HERMES)
    messages = [{"role": "user", "content": "Will it rain?"}]
    row = {"messages": messages, "tools": [WEATHER], "tool_choice": "required"}
    folder.write([row | {"custom_id": "a"}])
    assert folder.run() == 0
    (choice,) = folder.rows()["a"]["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_tools_for_a_model_without_tool_support_are_an_error_row(folder: Folder) -> None:
    folder.write([{"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}])
    assert folder.run() == 1
    assert folder.rows()["line-1"]["error"]["param"] == "tools"


# --- answers -------------------------------------------------------------------------------------


def test_an_openai_batch_is_answered_in_openais_format(folder: Folder) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = {"model": "m", "messages": messages, "max_tokens": 6, "temperature": 0}
    completion = {"prompt": "once upon", "max_tokens": 5, "temperature": 0}
    folder.write(
        [
            {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": completion},
        ]
    )
    assert folder.run("--model", "fake") == 0
    rows = folder.rows()
    row = rows["c"]
    assert set(row) == {"id", "custom_id", "response", "error", "mainstem"}
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    assert row["response"]["request_id"]
    body = row["response"]["body"]
    text = expected_text("<user>hello\n<assistant>", 6)
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": text,
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 6,
        "total_tokens": 29,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    body = rows["p"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == expected_text("once upon", 5)


def test_plain_rows_and_token_ids_are_answered(folder: Folder) -> None:
    ids = [ord(letter) - 32 for letter in "abc"]
    folder.write(
        [
            {"prompt": "abc", "temperature": 0, "max_tokens": 7},
            {"prompt": ids, "temperature": 0, "max_tokens": 7},
            {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 3},
        ]
    )
    assert folder.run() == 0
    texts = folder.texts()
    assert texts["line-1"] == texts["line-2"] == expected_text("abc", 7)
    assert texts["line-3"] == expected_text("<user>x\n<assistant>", 3)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--no-plan",),
        ("--share", "none"),
        ("--share", "storage", "--levels", "1"),
        ("--share", "none", "--no-plan", "--no-dedupe"),
    ],
)
def test_answers_do_not_depend_on_sharing_or_planning(
    folder: Folder, flags: tuple[str, ...]
) -> None:
    rows = prompts(30, max_tokens=6)
    folder.write(rows)
    assert folder.run(*flags) == 0
    expected = {
        row["custom_id"]: expected_text(row["prompt"], 6) for row in rows if isinstance(row, dict)
    }
    assert folder.texts() == expected
    share = Share(flags[flags.index("--share") + 1]) if "--share" in flags else Share.READS
    assert folder.engines.config is not None
    assert folder.engines.config.sched.share is share


def test_planning_and_sharing_save_prompt_tokens(folder: Folder) -> None:
    folder.write(prompts(40, max_tokens=2))
    shared = folder.run_with_summary()
    alone = folder.run_with_summary("--overwrite", "--share", "none", "--no-plan")
    assert shared["saving_ratio"] > 0.6
    assert alone["saving_ratio"] == 0
    assert alone["computed_prompt_tokens"] == alone["prompt_tokens"] == shared["prompt_tokens"]
    assert shared["computed_prompt_tokens"] < 0.4 * alone["computed_prompt_tokens"]


def test_rows_are_submitted_in_planned_order(folder: Folder) -> None:
    folder.write(prompts(40, max_tokens=2))
    order: list[int] = []
    load = folder.engines

    def watched(config: Any) -> Any:
        engine = load(config)
        engine.engine.bus.subscribe(
            RequestSubmitted, lambda event: order.append(int(event.request_id))
        )
        return engine

    folder.engines = watched  # type: ignore[assignment]  # called in the same way
    folder.run()
    docs = [(line - 1) % 4 for line in order]
    assert len(order) == 40
    assert sum(a != b for a, b in pairwise(docs)) == 3
    order.clear()
    folder.run("--overwrite", "--no-plan")
    assert order == list(range(1, 41))


def test_flags_set_fields_that_rows_leave_out(folder: Folder) -> None:
    folder.write([{"prompt": "abc"}, {"prompt": "abc", "max_tokens": 2}])
    assert folder.run("--max-tokens", "9", "--temperature", "0", "--ignore-eos") == 0
    usage = [row["response"]["body"]["usage"] for row in folder.rows().values()]
    assert sorted(entry["completion_tokens"] for entry in usage) == [2, 9]


def test_rows_may_ask_for_n_answers_logprobs_and_stops(folder: Folder) -> None:
    text = expected_text("abc", 12)
    ask = {"temperature": 0, "max_tokens": 12}
    chat = [{"role": "user", "content": "x"}]
    folder.write(
        [
            {"custom_id": "n", "prompt": "abc", "n": 3, **ask},
            {"custom_id": "l", "prompt": "abc", "logprobs": 1, **ask},
            {"custom_id": "c", "messages": chat, "logprobs": True, **ask},
            {"custom_id": "s", "prompt": "abc", "stop": text[4:6], **ask},
            {"custom_id": "p", "prompt": "abc", "prompt_logprobs": 1, **ask},
        ]
    )
    assert folder.run() == 0
    bodies = {name: row["response"]["body"] for name, row in folder.rows().items()}
    assert [choice["index"] for choice in bodies["n"]["choices"]] == [0, 1, 2]
    assert bodies["n"]["usage"]["completion_tokens"] == 36
    logprobs = bodies["l"]["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(12))
    assert logprobs["token_logprobs"] == [-1.0] * 12
    places = bodies["c"]["choices"][0]["logprobs"]["content"]
    assert bytes(places[0]["bytes"]).decode() == places[0]["token"]
    stopped = bodies["s"]["choices"][0]
    assert stopped["text"] == text[:4]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", text[4:6])
    assert bodies["p"]["choices"][0]["prompt_logprobs"][0] is None
    assert len(bodies["p"]["choices"][0]["prompt_logprobs"]) == 3


def test_rows_may_ask_for_a_grammar(folder: Folder) -> None:
    form = {"prompt": "x", "temperature": 0, "max_tokens": 20}
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}
    folder.write(
        [
            form | {"custom_id": "a", "guided_choice": ["left", "right"]},
            form | {"custom_id": "b", "guided_regex": "[0-9]{4}"},
            form | {"custom_id": "c", "response_format": bad},
            form | {"custom_id": "d", "guided_json": BEYOND, "max_tokens": 100},
        ]
    )
    assert folder.run() == 1
    texts = folder.texts()
    assert texts["a"] in ("left", "right")
    assert texts["b"].isdecimal()
    assert folder.rows()["c"]["error"]["param"] == "response_format"
    assert "thing" in folder.rows()["c"]["error"]["message"]
    assert folder.rows()["d"]["error"]["code"] == "form_limit_reached"


def test_equal_greedy_rows_are_answered_once(folder: Folder) -> None:
    same = {"prompt": "the same", "temperature": 0, "max_tokens": 5}
    other = {"prompt": "another", "temperature": 0, "max_tokens": 5}
    folder.write([same, other, same, same])
    summary = folder.run_with_summary()
    assert (summary["answered"], summary["deduplicated"]) == (4, 2)
    assert summary["deduplicated_prompt_tokens"] == 16
    texts = folder.texts()
    assert texts["line-1"] == texts["line-3"] == texts["line-4"] == expected_text("the same", 5)
    summary = folder.run_with_summary("--overwrite", "--no-dedupe")
    assert (summary["answered"], summary["deduplicated"]) == (4, 0)


def test_the_seed_of_a_sampled_row_comes_from_its_custom_id(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed comes from custom_id, so neither the order nor other rows change an answer."""
    seen: dict[str, set[int | None]] = {}
    load = folder.engines

    def watched(config: Any) -> Any:
        engine = load(config)
        submit = engine.submit

        def noted(request: Request) -> None:
            prompt = bytes(letter + 32 for letter in request.prompt_ids.tolist()).decode()
            seen.setdefault(prompt, set()).add(request.sampling.seed)
            submit(request)

        monkeypatch.setattr(engine, "submit", noted)
        return engine

    folder.engines = watched  # type: ignore[assignment]
    rows = [{"custom_id": f"id {i}", "prompt": f"prompt {i}", "max_tokens": 2} for i in range(4)]
    folder.write(list(rows))
    folder.run()
    folder.write(list(rows[::-1]))
    folder.run("--overwrite", "--no-plan")
    assert all(len(seeds) == 1 for seeds in seen.values())
    assert len(set.union(*seen.values())) == 4
    folder.run("--overwrite", "--seed", "1")
    assert all(len(seeds) == 2 for seeds in seen.values())


# --- rows that fail ------------------------------------------------------------------------------


def test_a_bad_line_becomes_an_error_row_and_other_lines_are_answered(folder: Folder) -> None:
    folder.write(
        [
            {"custom_id": "a", "prompt": "fine", "max_tokens": 2},
            "{not json",
            {"custom_id": "a", "prompt": "twice"},
            {"custom_id": "b", "prompt": "x", "frobnicate": 1},
            {"custom_id": "c", "prompt": "x" * 500},
            {"custom_id": "d", "prompt": "x", "temperature": 1e9},
            {"custom_id": "e", "prompt": "\u00e9", "max_tokens": 2},  # outside the vocabulary
            {"custom_id": "f", "prompt": ""},
            {"custom_id": "g", "prompt": "\ud800"},
            "",
            {"custom_id": "z", "prompt": "fine too", "max_tokens": 2},
            {"custom_id": "h", "prompt": "x" * 5000},
            {"custom_id": "i", "messages": [{"role": "user", "content": "x" * 5000}]},
            {"custom_id": "j", "messages": [{"role": "narrator", "content": "x"}]},
        ]
    )
    summary_file = folder.path / "summary.json"
    assert folder.run("--summary-json", str(summary_file)) == 1
    rows = [json.loads(line) for line in folder.output.read_text().splitlines()]
    failed = {row["error"]["line"]: row for row in rows if row["error"] is not None}
    assert {line: row["error"]["code"] for line, row in failed.items()} == {
        2: "invalid_json",
        3: "duplicate_custom_id",
        4: "unknown_field",
        5: "prompt_too_long",
        6: "invalid_value",
        7: "invalid_value",
        8: "invalid_value",
        9: "invalid_value",
        12: "prompt_too_long",
        13: "prompt_too_long",
        14: "invalid_value",
    }
    assert failed[2]["custom_id"] is None
    assert failed[3]["custom_id"] == "a"
    assert all(row["response"] is None for row in failed.values())
    assert "frobnicate" in failed[4]["error"]["message"]
    assert "500 tokens" in failed[5]["error"]["message"]
    for line in (12, 13):  # refused before encoding: no token has more than 7 bytes
        assert "prompt has at least 7" in failed[line]["error"]["message"]
    assert "messages[0].role" in failed[14]["error"]["message"]
    assert sorted(row["custom_id"] for row in rows if row["error"] is None) == ["a", "z"]
    summary = folder.summary()
    assert (summary["rows"], summary["answered"], summary["failed"]) == (13, 2, 11)
    assert summary["complete"] is True
    assert summary["errors"]["invalid_value"] == 5


def test_a_line_that_is_not_utf8_is_an_error_row_with_its_line(folder: Folder) -> None:
    """An earlier parser did not report invalid bytes within a text, and the job ended."""
    lines = [b'{"prompt": "a"}', b'{"prompt": "\xe9t\xe9"}', b"\xff\xfe", b'{"prompt": "b"}']
    folder.input.write_bytes(b"\n".join(lines) + b"\n")
    assert folder.run("--max-tokens", "2") == 1
    rows = [json.loads(line) for line in folder.output.read_text().splitlines()]
    failed = {row["error"]["line"]: row["error"] for row in rows if row["error"] is not None}
    assert {line: error["code"] for line, error in failed.items()} == dict.fromkeys(
        (2, 3), "invalid_json"
    )
    assert "not UTF-8: invalid continuation byte at byte 13" in failed[2]["message"]
    assert len(rows) == 4


def test_an_empty_input_is_an_empty_output(folder: Folder) -> None:
    folder.write([])
    assert folder.run() == 0
    assert folder.output.read_bytes() == b""


def test_rows_that_name_another_model_are_answered_with_a_warning(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write([{"prompt": "a", "model": "gpt-9", "max_tokens": 1}])
    assert folder.run("--model", "fake") == 0
    assert "1 row names another model ('gpt-9'); fake answered" in capsys.readouterr().err


# --- wrong calls ---------------------------------------------------------------------------------


def test_wrong_calls_are_refused_before_a_model_is_loaded(folder: Folder) -> None:
    folder.write([{"prompt": "a"}])
    with pytest.raises(InvalidRequest, match="does not exist"):
        folder.run(output=folder.path / "no" / "out.jsonl")
    with pytest.raises(InvalidRequest, match="the input itself"):
        folder.run("--overwrite", output=folder.input)
    with pytest.raises(InvalidRequest, match="temperature"):
        folder.run("--temperature", "-3")
    with pytest.raises(ConfigError, match="window"):
        folder.run("--window-mib", "0")
    with pytest.raises(InvalidRequest, match="does not exist"):
        folder.run("--summary-json", str(folder.path / "no" / "summary.json"))
    with pytest.raises(InvalidRequest, match="cannot be written"):
        folder.run("--summary-json", str(folder.path))
    with pytest.raises(SystemExit):
        folder.run("--resume", "--overwrite")
    assert not folder.output.exists()
    folder.output.write_text('{"custom_id": "a", "response": {}, "error": null}\n')
    with pytest.raises(InvalidRequest, match="--resume or --overwrite"):
        folder.run()
    folder.input.unlink()
    with pytest.raises(InvalidRequest, match=r"in\.jsonl"):
        folder.run("--resume")
    assert folder.engines.config is None


def test_a_model_that_cannot_be_loaded_leaves_the_output_unchanged(folder: Folder) -> None:
    def missing(config: EngineConfig) -> TextEngine:
        raise ModelNotFound("no such model")

    folder.write([{"prompt": "a"}])
    argv = [str(folder.input), "-o", str(folder.output), "--overwrite"]
    with pytest.raises(ModelNotFound):
        main(argv, missing)
    assert not folder.output.exists()
    folder.output.write_text("mine\n")
    with pytest.raises(ModelNotFound):
        main(argv, missing)
    assert folder.output.read_text() == "mine\n"


# --- resuming ------------------------------------------------------------------------------------


def test_resume_answers_what_is_missing_and_nothing_twice(folder: Folder) -> None:
    rows = [*prompts(20, max_tokens=4), "broken", {"custom_id": "q3", "prompt": "again"}]
    folder.write(rows)
    assert folder.run() == 1
    whole = folder.output.read_text().splitlines(keepends=True)
    kept = whole[:9]
    folder.output.write_text("".join(kept) + whole[9][:25])
    summary = folder.run_with_summary("--resume")
    lines = folder.output.read_text().splitlines(keepends=True)
    assert lines[:9] == kept
    assert sorted(map(essence, lines)) == sorted(map(essence, whole))
    assert (summary["skipped"], summary["answered"] + summary["failed"]) == (9, 13)
    assert folder.run("--resume") == 1, "the broken line still counts as failed"
    assert folder.output.read_text().splitlines(keepends=True) == lines


def essence(line: str) -> str:
    """A row without fields that may differ between runs: times and cached tokens."""
    row = json.loads(line)
    if row["response"] is not None:
        del row["response"]["body"]["created"]
        del row["response"]["body"]["usage"]["prompt_tokens_details"]
    return json.dumps(row, sort_keys=True)


def test_resume_without_an_output_is_a_first_run(folder: Folder) -> None:
    folder.write(prompts(3, max_tokens=2))
    assert folder.run("--resume") == 0
    assert len(folder.texts()) == 3


def test_ctrl_c_stops_between_steps_and_can_be_resumed(folder: Folder) -> None:
    folder.write(prompts(60, max_tokens=6))
    folder.engines = FakeEngines(num_pages=40)  # few rows run at a time
    before = signal.getsignal(signal.SIGINT)  # SIG_IGN if a shell runs this in the background

    def press(event: StepFinished) -> None:
        if folder.output.read_bytes().count(b"\n") >= 10:
            folder.engines.at_step = None
            os.kill(os.getpid(), signal.SIGINT)

    folder.engines.at_step = press
    assert folder.run("--summary-json", str(folder.path / "summary.json")) == 130
    assert folder.summary()["complete"] is False
    done = len(folder.texts())
    assert 10 <= done < 60
    assert signal.getsignal(signal.SIGINT) is before
    assert folder.run("--resume") == 0
    assert len(folder.texts()) == 60


# --- rows that changed, and other models ----------------------------------------------------------


def check_exactly_once(folder: Folder, rows: Sequence[Row]) -> None:
    """Every row has one line, with the answer to the row as it is now."""
    lines = [json.loads(line) for line in folder.output.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(row["custom_id"] for row in rows)
    assert folder.texts() == {
        row["custom_id"]: expected_text(row["prompt"], row["max_tokens"]) for row in rows
    }


def greedy(count: int) -> list[Row]:
    return [row for row in prompts(count, max_tokens=4) if isinstance(row, dict)]


def test_rows_that_changed_are_counted_and_redone_when_asked(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = greedy(10)
    folder.write(rows)
    folder.run()
    before = folder.output.read_text()
    rows[3] |= {"prompt": "something else"}
    rows[6] |= {"max_tokens": 7}
    folder.write(rows[::-1])  # the order of rows does not matter
    summary = folder.run_with_summary("--resume")
    assert (summary["skipped"], summary["changed"], summary["answered"]) == (10, 2, 0)
    assert "2 rows changed" in capsys.readouterr().err
    assert folder.output.read_text() == before
    summary = folder.run_with_summary("--resume", "changed")
    assert (summary["redone"], summary["answered"], summary["changed"]) == (2, 2, 0)
    assert folder.run_with_summary("--resume=changed")["answered"] == 0
    check_exactly_once(folder, rows)
    assert not list(folder.path.glob("*.fresh"))


def test_answers_of_another_model_are_counted_and_redone_when_asked(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = greedy(6)
    folder.write(rows[:4])
    folder.run("--model", "one")
    folder.write(rows)
    summary = folder.run_with_summary("--resume", "--model", "two")
    assert (summary["of_other_model"], summary["changed"], summary["answered"]) == (4, 0, 2)
    assert "4 lines of" in capsys.readouterr().err
    summary = folder.run_with_summary("--resume=changed", "--model", "two")
    assert (summary["redone"], summary["answered"]) == (4, 4)
    check_exactly_once(folder, rows)
    models = {row["response"]["body"]["model"] for row in folder.rows().values()}
    assert models == {"two"}


def test_a_flag_changes_only_rows_that_leave_its_field_out(folder: Folder) -> None:
    row = {"prompt": "x", "temperature": 0}
    folder.write([row | {"custom_id": "own", "max_tokens": 2}, row | {"custom_id": "open"}])
    folder.run("--max-tokens", "3")
    assert folder.run_with_summary("--resume", "--max-tokens", "3", "--seed", "9")["changed"] == 0
    assert folder.run_with_summary("--resume=changed", "--max-tokens", "5")["redone"] == 1
    usage = {name: row["response"]["body"]["usage"] for name, row in folder.rows().items()}
    assert {name: count["completion_tokens"] for name, count in usage.items()} == {
        "own": 2, "open": 5,
    }  # fmt: skip


def test_the_answer_of_a_corrected_row_replaces_its_error_row(folder: Folder) -> None:
    rows: list[Row | str] = [*greedy(3), "broken", {"custom_id": "bad", "prompt": "x", "nope": 1}]
    folder.write(rows)
    assert folder.run() == 1
    mended = {"custom_id": "mended", "prompt": "y", "temperature": 0, "max_tokens": 4}
    folder.write([*rows[:3], mended, rows[4]])
    assert folder.run_with_summary("--resume")["changed"] == 1
    assert folder.run("--resume=changed") == 1, "the row with an unknown field still fails"
    lines = [json.loads(line) for line in folder.output.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == ["bad", "mended", "q0", "q1", "q2"]


def test_a_changed_row_is_redone_if_another_row_failed_on_its_line_before(folder: Folder) -> None:
    row = {"custom_id": "a", "prompt": "one", "temperature": 0, "max_tokens": 4}
    folder.write([{"custom_id": "bad", "prompt": "x", "n": -1}, row])
    folder.run()
    folder.write([row | {"prompt": "another"}])
    assert folder.run("--resume=changed") == 0
    assert folder.texts() == {"a": expected_text("another", 4)}


def test_changed_rows_need_an_input_that_can_be_read_twice(folder: Folder) -> None:
    folder.write([{"custom_id": "a", "prompt": "one", "max_tokens": 2}])
    folder.run()
    before = folder.output.read_bytes()
    folder.input.unlink()
    os.mkfifo(folder.input)
    with pytest.raises(InvalidRequest, match="read twice"):
        folder.run("--resume=changed")
    assert folder.output.read_bytes() == before


def test_a_row_whose_app_was_missing_is_tried_again(folder: Folder) -> None:
    app = folder.path / "polite.txt"
    app.write_text("Be polite. ")
    row = {"custom_id": "a", "prompt": "why?", "temperature": 0, "max_tokens": 6}
    folder.write([row | {"app": "polite"}, row | {"custom_id": "b", "model": "polite"}])
    assert folder.run() == 1
    assert folder.run("--resume", "--app", f"polite={app}") == 0
    texts = folder.texts()
    assert texts["a"] == expected_text("Be polite. why?", 6)
    assert texts["b"] == expected_text("why?", 6)  # a model's name, not an app's


def test_a_linked_output_stays_a_link(folder: Folder) -> None:
    row = {"custom_id": "a", "prompt": "one", "temperature": 0, "max_tokens": 4}
    target = folder.path / "kept.jsonl"
    target.touch()
    folder.output.symlink_to(target)
    folder.write([row])
    folder.run()
    folder.write([row | {"prompt": "another"}])
    assert folder.run("--resume=changed") == 0
    assert folder.output.is_symlink()
    assert folder.texts() == {"a": expected_text("another", 4)}


def test_an_output_of_an_older_version_is_resumed_without_a_warning(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row | str] = [*prompts(6, max_tokens=4), "broken"]
    folder.write(rows)
    folder.run()
    lines = [json.loads(line) for line in folder.output.read_text().splitlines()]
    for line in lines:
        del line["mainstem"]
    folder.output.write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    capsys.readouterr()
    summary = folder.run_with_summary("--resume", "--model", "another")
    assert (summary["skipped"], summary["changed"], summary["of_other_model"]) == (5, 0, 0)
    shown = capsys.readouterr().err
    assert "changed" not in shown
    assert "another model" not in shown
    # only the two rows that this version wrote tell which model answered
    assert folder.run_with_summary("--resume=changed")["redone"] == 2


def test_changed_rows_cannot_be_found_in_standard_input(folder: Folder) -> None:
    with pytest.raises(InvalidRequest, match="read twice"):
        main(["-", "-o", str(folder.output), "--resume=changed"], folder.engines)


def test_the_resume_flag_may_come_before_the_input(folder: Folder) -> None:
    folder.write(greedy(2))
    assert main(["--resume", str(folder.input), "-o", str(folder.output)], folder.engines) == 0


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_rows_that_failed_because_a_package_was_missing_are_tried_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    form = {"temperature": 0, "max_tokens": 9, "guided_choice": ["left", "right"]}
    rows = [*greedy(3), {"custom_id": "form", "prompt": "x", **form}, {"custom_id": "bad"}]
    folder.write(rows)
    output = folder.path / name
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        assert folder.run(output=output) == 1
    assert b"missing_package" in read_output(output)
    assert folder.run("--resume", output=output) == 1
    lines = [json.loads(line) for line in read_output(output).splitlines()]
    assert len(lines) == 5
    errors = [line["error"]["code"] for line in lines if line["error"] is not None]
    assert errors == ["invalid_row"]


def read_output(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def test_rows_that_failed_because_steps_failed_are_tried_again(folder: Folder) -> None:
    folder.write(greedy(2))
    folder.run()
    lines = folder.output.read_text().splitlines(keepends=True)
    error = {"code": "engine_failed", "message": "steps failed", "param": None, "line": 2}
    failed = {"id": "x", "custom_id": "q1", "response": None, "error": error}
    folder.output.write_text(lines[0] + json.dumps(failed) + "\n")
    assert folder.run("--resume") == 0
    check_exactly_once(folder, greedy(2))


# --- files that fail -----------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_job_with_a_reason(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(prompts(3, max_tokens=2))
    assert folder.run(output=Path("/dev/full")) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_truncated_input_is_answered_up_to_its_end(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in prompts(40, max_tokens=2))
    folder.input = folder.path / "in.jsonl.gz"
    folder.input.write_bytes(gzip.compress(lines.encode())[:-60])
    summary_file = folder.path / "summary.json"
    assert folder.run("--summary-json", str(summary_file)) == 1
    assert "is cut off" in capsys.readouterr().err
    texts = folder.texts()
    assert 0 < len(texts) < 40
    assert folder.summary()["complete"] is False
    folder.input.write_bytes(gzip.compress(lines.encode()))
    assert folder.run("--resume") == 0
    assert len(folder.texts()) == 40


# --- streams -------------------------------------------------------------------------------------


def test_rows_are_read_in_windows_of_bounded_memory(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of several windows gives the same answers."""
    monkeypatch.setattr(windows, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(windows, "ROW_BYTES", 1 << 17)
    rows = prompts(50, max_tokens=3)
    folder.write(rows)
    summary = folder.run_with_summary("--window-mib", "1")
    assert summary["windows"] == 7
    assert folder.texts() == {
        row["custom_id"]: expected_text(row["prompt"], 3) for row in rows if isinstance(row, dict)
    }


def test_gzip_files_are_read_written_and_resumed(folder: Folder) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in prompts(12, max_tokens=3))
    folder.input = folder.path / "in.jsonl.gz"
    folder.input.write_bytes(gzip.compress(lines.encode()))
    packed = folder.path / "out.jsonl.gz"
    assert folder.run(output=packed) == 0
    whole = gzip.decompress(packed.read_bytes()).decode().splitlines()
    assert len(whole) == 12
    packed.write_bytes(packed.read_bytes()[:-200])
    assert folder.run("--resume", output=packed) == 0
    again = gzip.decompress(packed.read_bytes()).decode().splitlines()
    assert sorted(map(essence, again)) == sorted(map(essence, whole))


def test_a_job_runs_from_standard_input_to_standard_output(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.write(prompts(3, max_tokens=2))
    with folder.input.open("rb") as source:
        saved = os.dup(0)
        os.dup2(source.fileno(), 0)
        try:
            status = main(["-", "-o", "-", "--no-progress"], folder.engines)
        finally:
            os.dup2(saved, 0)
            os.close(saved)
    assert status == 0
    captured = capfd.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == ["q0", "q1", "q2"]
    assert "requests/s" in captured.err


def test_the_progress_bar_shows_speed_saving_and_total(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(prompts(12, max_tokens=2))
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    assert main([str(folder.input), "-o", str(folder.output)], folder.engines) == 0
    assert "reading" in shown.getvalue().split("\r")[1]
    last = shown.getvalue().split("\r")[-1]
    assert "running 100%" in last
    assert "12/12 rows" in last
    assert "prompt tokens" in last
    assert "req/s" in last or "s/req" in last
    assert "tok/s" in last
    assert "of prompts saved" in last


def test_choices_of_rows_are_scored(folder: Folder) -> None:
    context, choices = "which letter is it that I think of? it is", [" a", " b or c", " b or d"]
    body = {"prompt": context, "choices": choices}
    chat = {"messages": [{"role": "user", "content": context}], "choices": choices}
    folder.write(
        [
            {"custom_id": "plain", **body},
            {"custom_id": "ids", **body, "prompt": a_tokenizer().encode(context)},
            {"custom_id": "chat", **chat},
            {"custom_id": "openai", "url": "/v1/score", "method": "POST", "body": body},
            {"custom_id": "answer", "prompt": context, "max_tokens": 3, "temperature": 0},
            {"custom_id": "none", "prompt": context, "choices": []},
            {"custom_id": "empty", "prompt": context, "choices": [""]},
            {"custom_id": "hot", **body, "temperature": 1},
            {"custom_id": "labels", "url": "/v1/score", "method": "POST",
             "body": {"query": context, "items": ["a"], "label_token_ids": [1]}},
            {"custom_id": "long", "prompt": context * 1000, "choices": choices},
        ]
    )  # fmt: skip
    summary = folder.run_with_summary("--no-dedupe")
    rows = folder.rows()
    wanted = []
    for choice in choices:
        ids, found = a_tokenizer().encode(context), list[float]()
        for token_id in a_tokenizer().encode(choice):
            found.append(fake_logprob(ids, token_id, 0).logprob)
            ids = [*ids, token_id]
        wanted.append(found)
    for name in ("plain", "ids", "openai"):
        scores = rows[name]["response"]["body"]
        assert scores["object"] == "score"
        assert [each["token_logprobs"] for each in scores["choices"]] == wanted
        assert [each["text"] for each in scores["choices"]] == choices
    assert rows["chat"]["response"]["body"]["choices"] != scores["choices"]
    assert folder.texts()["answer"] == expected_text(context, 3)
    params = {name: row["error"]["param"] for name, row in rows.items() if row["error"]}
    assert params == {
        "none": "choices", "empty": "choices", "hot": "temperature", "labels": "items",
        "long": "prompt",
    }  # fmt: skip
    assert summary["answered"] == 5
    folder.run("--resume", "--no-dedupe")
    assert folder.rows() == rows
