"""`mainstem plan`: every form of row in, clear errors, the report and the files out."""

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mainstem.cli.plan import DEFAULT_MAX_TOKENS, main, parse_row, read_batch
from mainstem.core.errors import ConfigError, InvalidRequest, MainstemError
from tests.plan.reading import group_of, read_plan


class ByteTokenizer:
    """Bytes as ids; a chat is its contents, each after one byte for the role."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            if "\ud800" in text:
                raise InvalidRequest("prompt", "is not Unicode text")
        return [list(text.encode()) for text in texts]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        if messages[0].get("role") == "alien":
            raise InvalidRequest("messages", "unknown role")
        said = "".join(f"{str(m['role'])[0]}{m['content']}" for m in messages)
        return list((json.dumps(tools) if tools else "").encode()) + list(said.encode())


def no_tokenizer(model: str, template: str | None) -> ByteTokenizer:
    raise AssertionError(f"the tokenizer of {model} is not needed")


def byte_tokenizer(model: str, template: str | None) -> ByteTokenizer:
    return ByteTokenizer()


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


def test_every_form_of_row_becomes_token_ids() -> None:
    rows = [
        {"prompt": "ab"},
        {"prompt": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "hi"}]},
        batch_row("/v1/completions", {"prompt": "xy", "max_tokens": 5}),
        batch_row("/v1/completions", {"prompt": []}),
        batch_row(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "q"}], "max_completion_tokens": 9},
        ),
        {"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function"}]},
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    lines.insert(2, "\n")
    batch = read_batch(lines, ByteTokenizer)
    found = [batch.prompts[index].tolist() for index in range(len(batch.prompts))]
    assert found[:6] == [[97, 98], [1, 2, 3], list(b"uhi"), [120, 121], [], list(b"uq")]
    assert found[6] == list(b'[{"type": "function"}]uq')
    limit = DEFAULT_MAX_TOKENS
    assert batch.max_tokens.tolist() == [limit, limit, limit, 5, limit, 9, limit]


def test_prompts_keep_their_order_across_tokenizer_batches() -> None:
    lines = [json.dumps({"prompt": str(n) if n % 3 else [n]}) for n in range(2500)]
    batch = read_batch(lines, ByteTokenizer)
    wanted = [list(str(n).encode()) if n % 3 else [n] for n in range(2500)]
    assert [batch.prompts[n].tolist() for n in range(2500)] == wanted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"text": "a"}', "neither"),
        ('{"prompt": 5}', "token ids"),
        ('{"prompt": ["a", "b"]}', "token ids"),
        ('{"prompt": [1.5]}', "token ids"),
        ('{"prompt": [-1]}', "token ids"),
        ('{"prompt": [3000000000]}', "token ids"),
        ('{"prompt": "a", "max_tokens": -3}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "max_completion_tokens": true}', "max_completion_tokens"),
        ('{"messages": "hi"}', "list of objects"),
        ('{"messages": []}', "empty"),
        ('{"messages": [{"role": "user"}], "tools": {}}', "tools"),
        ('{"body": {"prompt": "a"}}', "url"),
        ('{"url": "/v1/embeddings", "body": {"input": "a"}}', "url"),
        ('{"url": "/v1/completions", "body": {"messages": []}}', '"prompt"'),
        ('{"url": "/v1/completions", "body": 3}', '"prompt"'),
    ],
)
def test_a_bad_line_is_named_with_the_reason(line: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="line 12") as caught:
        parse_row(line, 12)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "row", [{"prompt": "\ud800"}, {"messages": [{"role": "alien", "content": "a"}]}]
)
def test_what_the_tokenizer_refuses_is_named_by_its_line(row: object) -> None:
    lines = [json.dumps({"prompt": "fine"}), json.dumps(row), json.dumps({"prompt": "fine"})]
    with pytest.raises(InvalidRequest, match="line 2"):
        read_batch(lines, ByteTokenizer)


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_json_tells_counts_times_and_savings(
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


def test_text_is_read_with_the_model_and_the_template_that_were_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str | None]] = []

    def load(model: str, template: str | None) -> ByteTokenizer:
        asked.append((model, template))
        return ByteTokenizer()

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
    assert not list(tmp_path.glob("*.part"))


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


def test_one_level_plans_by_algorithm_1_and_still_reports_many(
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


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken, binary, cut = (tmp_path / name for name in ("a.jsonl.gz", "b.jsonl", "c.jsonl.gz"))
    broken.write_bytes(b"not gzip")
    binary.write_bytes(b"\xff\xfe{}\n")
    cut.write_bytes(gzip.compress(b'{"prompt": [1]}\n' * 1000)[:40])
    for path in (tmp_path / "missing.jsonl", broken, binary, cut):
        with pytest.raises(InvalidRequest, match=path.name):
            main([str(path)], no_tokenizer)


def test_an_empty_file_is_an_empty_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in.jsonl", [])
    assert main([str(path), "--json"], no_tokenizer) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 0
    assert main([str(path), "--plot", str(tmp_path / "x.png")], no_tokenizer) == 0
