"""`mainstem plan` reads every kind of row, reports bad lines, and writes its report and files."""

import gzip
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from mainstem.batch.files import InputFile
from mainstem.batch.windows import RowReader
from mainstem.cli.plan import ReadPrompts, main, read_prompts
from mainstem.core.errors import ConfigError, MainstemError
from mainstem.text.parsers.formats import AnswerFormats, ToolFormat
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.chat.parsing import CallParser
from tests.batch.test_progress import Terminal
from tests.fake_engines import a_tokenizer
from tests.plan.reading import group_of, read_plan
from tests.text.test_tools import HERMES


def no_tokenizer(model: str, template: str | None) -> Tokenizer:
    raise AssertionError(f"the tokenizer of {model} is not needed")


def fake_tokenizer(model: str, template: str | None) -> Tokenizer:
    return a_tokenizer()


def write(path: Path, rows: Sequence[object]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def batch_row(url: str, body: object, custom_id: str = "a") -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


DOCS = [[doc] * 50 + [question] for question in range(3) for doc in (7, 8, 9)]


def read(path: Path) -> ReadPrompts:
    parser = CallParser(find_formats=lambda: AnswerFormats(ToolFormat.HERMES))
    with closing(InputFile(str(path))) as source:
        return read_prompts(source, RowReader(parser, lambda: a_tokenizer(HERMES)))


def test_rows_are_read_as_batch_reads_them(tmp_path: Path) -> None:
    """Tools are accepted, and the expected answer lengths are those of batch."""
    tool = {"type": "function", "function": {"name": "f"}}
    question = [{"role": "user", "content": "q"}]
    rows = [
        {"prompt": "ab"},
        {"prompt": [1, 2, 3]},
        {"messages": question},
        batch_row("/v1/completions", {"prompt": "xy", "max_tokens": 5}, "b"),
        batch_row("/v1/chat/completions", {"messages": question, "max_completion_tokens": 9}, "c"),
        {"messages": question, "tools": [tool]},
    ]
    path = write(tmp_path / "in.jsonl", rows)
    path.write_text("\n" + path.read_text())
    found = read(path)
    encode = a_tokenizer(HERMES).encode
    assert found.prompts[0].tolist() == encode("ab")
    assert found.prompts[1].tolist() == [1, 2, 3]
    assert found.prompts[3].tolist() == encode("xy")
    assert len(found.prompts[5]) > len(found.prompts[2])  # the tools are part of the prompt
    assert found.max_tokens.tolist() == [16, 16, 512, 5, 9, 512]
    assert found.lines == [2, 3, 4, 5, 6, 7]


def test_prompts_keep_their_order_across_tokenizer_batches(tmp_path: Path) -> None:
    rows = [{"prompt": str(n) if n % 3 else [n]} for n in range(2500)]
    found = read(write(tmp_path / "in.jsonl", rows))
    encode = a_tokenizer().encode
    wanted = [encode(str(n)) if n % 3 else [n] for n in range(2500)]
    assert [found.prompts[n].tolist() for n in range(2500)] == wanted


BAD_LINES = [
    ("{", "not JSON"),
    ("[1]", "must be a JSON object"),
    ('{"text": "a"}', "a prompt or messages"),
    ('{"prompt": 5}', "prompt"),
    ('{"prompt": ["a", "b"]}', "token ids"),
    ('{"prompt": [1.5]}', "prompt"),
    ('{"prompt": [3000000000]}', "token ids"),
    ('{"prompt": "\\ud800"}', "prompt"),
    ('{"prompt": "a", "max_tokens": -3}', "max_tokens"),
    ('{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
    ('{"messages": "hi"}', "messages"),
    ('{"messages": []}', "messages"),
    ('{"messages": [{"role": "user"}], "tools": {}}', "tools"),
    ('{"body": {"prompt": "a"}}', "url"),
    ('{"url": "/v1/embeddings", "body": {"input": "a"}}', "url"),
    ('{"url": "/v1/completions", "body": {"messages": []}}', "prompt"),
    ('{"url": "/v1/completions", "body": 3}', "body"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_reported_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n{{"prompt": "fine"}}\n')
    found = read(path)
    assert found.lines == [1, 3]
    (failure,) = found.failures
    assert failure.line == 2
    assert reason in failure.error.message


def test_bad_lines_are_counted_and_emitted_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": [7, 7, 1]}, {"prompt": "a", "tempreature": 1}, {"prompt": [7, 7, 2]}]
    path, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert main([str(path), "--json", "--emit-order", str(target)], no_tokenizer) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["failed_lines"] == 1
    assert "line 2 cannot be answered: the field 'tempreature'" in shown.err
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        rows[0], rows[2], rows[1],
    ]  # fmt: skip


def test_the_prompt_of_an_app_precedes_rows_that_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "polite.txt"
    prompt.write_text("Be polite. ")
    rows = [{"prompt": "x", "model": "m:polite"}, {"prompt": "x", "model": "llama3:8b"}]
    path = write(tmp_path / "in.jsonl", rows)
    assert main([str(path), "--json", "--app", f"polite={prompt}"], fake_tokenizer) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len("Be polite. ") + 2


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_json_has_counts_times_and_savings(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / name, [{"prompt": prompt} for prompt in DOCS])
    arguments = [str(path), "--json", "--lru-tokens", "60", "--page-size", "1"]
    assert main(arguments, no_tokenizer) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 9
    assert report["prompt_tokens"] == 9 * 51
    assert report["groups"] == 3
    assert report["plan_seconds"] >= 0
    saved = 6 * 50 / (9 * 51)
    assert report["saving"] == {
        "first_level": pytest.approx(saved),
        "first_level_enlarged": pytest.approx(saved),
        "multi_level": pytest.approx(saved),
        "upper_bound": pytest.approx(saved),
        "lru": 0.0,  # the prompts of a document come three apart, and the cache holds one
    }


def test_text_is_read_with_the_given_model_and_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str | None]] = []

    def load(model: str, template: str | None) -> Tokenizer:
        asked.append((model, template))
        return a_tokenizer()

    path = write(tmp_path / "in.jsonl", [{"prompt": "hello"}, {"prompt": "help"}])
    named = ["--model", "some/model", "--chat-template", "t.jinja"]
    assert main([str(path), *named, "--json"], load) == 0
    assert asked == [("some/model", "t.jinja")]
    assert json.loads(capsys.readouterr().out)["saving"]["upper_bound"] == pytest.approx(3 / 9)


def test_the_report_shows_savings_and_the_biggest_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in DOCS])
    assert main([str(path)], no_tokenizer) == 0
    shown = capsys.readouterr().out
    assert "9 requests, 459 prompt tokens, 3 groups" in shown
    assert "65.36 %" in shown
    assert "the 3 biggest groups" in shown


def test_emitted_order_holds_every_line_once_group_by_group(tmp_path: Path) -> None:
    rows = [{"custom_id": str(index), "prompt": prompt} for index, prompt in enumerate(DOCS)]
    source = write(tmp_path / "in.jsonl", rows)
    source.write_text("\n" + source.read_text().rstrip("\n"))  # a blank line, no last newline
    for name in ("out.jsonl", "out.jsonl.gz"):
        target = tmp_path / name
        assert main([str(source), "--json", "--emit-order", str(target)], no_tokenizer) == 0
        content = target.read_bytes()
        text = gzip.decompress(content) if name.endswith(".gz") else content
        emitted = [json.loads(line) for line in text.decode().splitlines()]
        assert {row["custom_id"] for row in emitted} == {row["custom_id"] for row in rows}
        assert len(emitted) == len(rows)
        assert [row["prompt"][0] for row in emitted] == [7, 7, 7, 8, 8, 8, 9, 9, 9]
    assert not list(tmp_path.glob("*.fresh"))


def test_order_on_standard_output_leaves_the_report_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in DOCS])
    assert main([str(path), "--emit-order", "-", "--json"], no_tokenizer) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 9
    assert json.loads(shown.err)["groups"] == 3


def test_an_emitted_plan_can_be_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in DOCS])
    target = tmp_path / "plan.jsonl"
    assert main([str(path), "--json", "--emit-plan", str(target)], no_tokenizer) == 0
    plan = read_plan(target.read_text().splitlines())
    assert group_of(plan, 0).prefix_tokens == 50
    assert group_of(plan, 0).members == (0, 3, 6)


def test_a_plan_of_one_level_still_reports_the_saving_of_many_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[1] * 40 + [doc] * 60 + [q] for doc in (7, 8) for q in (2, 3, 4)]
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    assert main([str(path), "--json", "--levels", "1"], no_tokenizer) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["groups"] == 2
    saving = report["saving"]
    assert saving["first_level"] < saving["first_level_enlarged"] < saving["multi_level"]
    assert saving["multi_level"] == saving["upper_bound"]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in DOCS])
    target = tmp_path / "groups.png"
    assert main([str(path), "--json", "--plot", str(target)], no_tokenizer) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in DOCS])
    with pytest.raises(ConfigError, match="pip install"):
        main([str(path), "--plot", str(tmp_path / "groups.png")], no_tokenizer)


@pytest.mark.parametrize(
    "flags",
    [
        ["--levels", "0"],
        ["--group-tokens", "0"],
        ["--lru-tokens", "-1"],
        ["--page-size", "0"],
        ["--plot", "missing-folder/out.png"],
        ["--emit-order", "missing-folder/out.jsonl"],
    ],
)
def test_impossible_flags_are_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in DOCS])
    with pytest.raises(MainstemError):
        main([str(path), *flags], no_tokenizer)


def test_the_error_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    broken, cut = (tmp_path / name for name in ("a.jsonl.gz", "c.jsonl.gz"))
    broken.write_bytes(b"not gzip")
    cut.write_bytes(gzip.compress(b'{"prompt": [1]}\n' * 1000)[:40])
    for path in (tmp_path / "missing.jsonl", broken, cut):
        with pytest.raises(MainstemError, match=path.name):
            main([str(path)], no_tokenizer)


def test_an_empty_file_is_an_empty_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in.jsonl", [])
    assert main([str(path), "--json"], no_tokenizer) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 0
    assert main([str(path), "--plot", str(tmp_path / "x.png")], no_tokenizer) == 0


def test_phases_are_shown_while_a_plan_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": [7, 7, n]} for n in range(300)])
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    assert main([str(path), "--json"], no_tokenizer) == 0
    phases = ["reading 64 rows", "planning 300 prompts of 900 tokens", "comparing"]
    places = [shown.getvalue().find(phase) for phase in phases]
    assert -1 not in places
    assert places == sorted(places)
    shown.truncate(0)
    assert main([str(path), "--json", "--no-progress"], no_tokenizer) == 0
    assert shown.getvalue() == ""


@pytest.mark.parametrize("line", [b'{"prompt": "\xff"}', b"\xff\xfe"])
def test_a_line_that_is_not_utf8_is_named_and_the_others_are_planned(
    tmp_path: Path, line: bytes
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b'\n{"prompt": "fine"}\n')
    found = read(path)
    assert found.lines == [1, 3]
    assert (found.failures[0].line, found.failures[0].error.code) == (2, "invalid_json")


def test_the_split_over_workers_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": prompt, "max_tokens": 8} for prompt in DOCS])
    assert main([str(source), "--workers", "3"], no_tokenizer) == 0
    shown = capsys.readouterr().out
    assert "cut for 3 workers" in shown
    assert "balance 1.000" in shown
    assert "0.00 points lost to the cut" in shown
    assert main([str(source), "--workers", "3", "--json"], no_tokenizer) == 0
    cut = json.loads(capsys.readouterr().out)["cut"]
    assert (cut["workers"], cut["balance"], cut["saving_lost"]) == (3, 1.0, 0.0)
    with pytest.raises(ConfigError, match="--workers must be at least 1"):
        main([str(source), "--workers", "0"], no_tokenizer)
