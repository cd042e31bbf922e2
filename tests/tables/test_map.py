"""`mainstem map` from table to table, over a fake model whose answers tests can compute."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mainstem.cli.map import main
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.step import Step
from mainstem.tables import fields
from tests.fake_engines import FakeEngines, a_tokenizer, expected_text
from tests.needs import is_here

Row = dict[str, Any]
HEADER = ["id", "review", "product"]


class Folder:
    """A place for one job's files, and a way to run it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.input, self.output = path / "in.csv", path / "out.csv"
        self.engines = FakeEngines()

    def write(self, rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> None:
        with self.input.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])

    def run(self, *flags: str, output: Path | None = None, prompt: str = "Is {review} ok?") -> int:
        """The exit status; answers have 8 tokens."""
        target = ["-o", str(output or self.output), "--no-progress", "--max-tokens", "8"]
        asked = [] if "--prompt-file" in flags else ["--prompt", prompt]
        argv = [str(self.input), *asked, *target, *flags]
        return main(argv, self.engines, lambda _: a_tokenizer())

    def rows(self, output: Path | None = None) -> list[Row]:
        with (output or self.output).open(newline="", errors="surrogateescape") as file:
            return list(csv.DictReader(file))

    @property
    def journal(self) -> Path:
        return self.path / "out.csv.answers.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def chat_answer(text: str, max_tokens: int = 8, system: str | None = None) -> str:
    """The fake model's answer to a chat."""
    before = "" if system is None else f"<system>{system}\n"
    return expected_text(f"{before}<user>{text}\n<assistant>", max_tokens)


def a_config(folder: Path) -> Path:
    """A folder with the config of a small Llama, and nothing else."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 97, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def some_rows(count: int) -> list[list[str]]:
    return [[str(n), f"text {n % 5}", f"thing {n % 3}"] for n in range(count)]


# --- the way through ------------------------------------------------------------------------------


def test_every_row_gets_its_answer_and_keeps_its_place(folder: Folder) -> None:
    folder.write(some_rows(20))
    assert folder.run() == 0
    found = folder.rows()
    assert [[row[name] for name in HEADER] for row in found] == some_rows(20)
    assert list(found[0]) == [*HEADER, "answer", "answer_error"]
    assert [row["answer"] for row in found] == [
        chat_answer(f"Is text {n % 5} ok?") for n in range(20)
    ]
    assert {row["answer_error"] for row in found} == {""}
    assert not folder.journal.exists()


def test_equal_prompts_are_computed_once(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(some_rows(20))
    assert folder.run("--summary-json", str(folder.path / "summary.json")) == 0
    assert json.loads((folder.path / "summary.json").read_text())["deduplicated"] == 15
    capsys.readouterr()


def test_the_system_message_and_the_name_of_the_answer(folder: Folder) -> None:
    folder.write([["1", "good", "pen"]])
    assert folder.run("--system", "Be brief.", "--answer", "verdict") == 0
    (row,) = folder.rows()
    assert row["verdict"] == chat_answer("Is good ok?", system="Be brief.")
    assert row["verdict_error"] == ""


def test_without_a_chat_the_prompt_is_continued(folder: Folder) -> None:
    folder.write([["1", "good", "pen"]])
    assert folder.run("--no-chat") == 0
    assert folder.rows()[0]["answer"] == expected_text("Is good ok?", 8)
    with pytest.raises(InvalidRequest, match="needs a chat"):
        folder.run("--no-chat", "--system", "Be brief.", "--overwrite")


def test_a_jinja_file_gets_columns_and_all_cells(folder: Folder) -> None:
    template = folder.path / "prompt.jinja"
    template.write_text(
        "{% if product == 'pen' %}{{ review | upper }}{% endif %} {{ cells['a b'] }}"
    )
    folder.write(
        [["good", "pen", "{{ 1 + 1 }}"], ["bad", "cup", "2"]], ["review", "product", "a b"]
    )
    assert folder.run("--prompt-file", str(template)) == 0
    answers = [row["answer"] for row in folder.rows()]
    assert answers == [chat_answer("GOOD {{ 1 + 1 }}"), chat_answer(" 2")]


def test_only_the_first_rows_with_a_limit(folder: Folder) -> None:
    folder.write(some_rows(20))
    assert folder.run("--limit", "3") == 0
    assert len(folder.rows()) == 3
    with pytest.raises(InvalidRequest, match="of fewer rows; use --overwrite"):
        folder.run("--resume")


def test_standard_input_to_standard_output(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    class Input:
        buffer = io.BytesIO(b"review\tproduct\ngood\tpen\n")

    monkeypatch.setattr(sys, "stdin", Input())
    argv = ["-", "--prompt", "Is {review} ok?", "-o", "-", "--format", "tsv"]
    flags = ["--no-progress", "--max-tokens", "8"]
    assert main([*argv, *flags], folder.engines) == 0
    answer = chat_answer("Is good ok?")
    lines = capfdbinary.readouterr().out.decode().splitlines()
    read = list(csv.reader(lines, delimiter="\t"))
    assert read == [["review", "product", "answer", "answer_error"], ["good", "pen", answer, ""]]
    Input.buffer.seek(0)
    with pytest.raises(InvalidRequest, match="standard output cannot be resumed"):
        main([*argv, "--resume"], folder.engines)


def test_json_lines_keep_types_and_missing_fields(folder: Folder) -> None:
    folder.input = folder.path / "in.jsonl"
    rows: list[Row] = [
        {"review": "good", "n": 1.0, "more": {"a": [None]}},
        {"review": "é", "n": None},
    ]
    folder.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder.path / "out.jsonl"
    assert folder.run("--system", "ok", output=out, prompt="Is {n} ok?") == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    answers = [chat_answer(f"Is {text} ok?", system="ok") for text in ("1.0", "")]
    expected = [
        {**row, "answer": text, "answer_error": None}
        for row, text in zip(rows, answers, strict=True)
    ]
    assert found == expected
    assert repr(found[0]["n"]) == "1.0"


def test_the_files_of_a_folder_are_one_table(folder: Folder) -> None:
    parts = folder.path / "parts"
    parts.mkdir()
    (parts / "b.csv").write_text("product,review\npen,two\n")
    (parts / "a.csv").write_text("review,product\none,cup\n")
    (parts / "notes.md").write_text("no table")
    folder.input = parts
    assert folder.run() == 0
    assert [row["review"] for row in folder.rows()] == ["one", "two"]
    assert [row["product"] for row in folder.rows()] == ["cup", "pen"]
    folder.input = parts / "*.csv"
    assert folder.run("--overwrite") == 0
    assert len(folder.rows()) == 2
    (parts / "c.csv").write_text("review\nthree\n")
    with pytest.raises(InvalidRequest, match=r"has other columns than .*a\.csv.*'product'"):
        folder.run("--overwrite")
    (parts / "d.jsonl").write_text("{}\n")
    with pytest.raises(InvalidRequest, match="several formats: csv, jsonl"):
        Folder.run(_at(folder, parts), "--overwrite")


def _at(folder: Folder, path: Path) -> Folder:
    folder.input = path
    return folder


# --- the order of fields --------------------------------------------------------------------------


def test_fields_are_listed_in_the_order_that_shares_most(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write([[str(n), f"review {n}", "a thing with a long name"] for n in range(6)])
    assert folder.run(prompt="{row}\nok?") == 0
    # all reviews begin alike
    asked = [f"product: a thing with a long name\nreview: review {n}\nid: {n}" for n in range(6)]
    assert [row["answer"] for row in folder.rows()] == [chat_answer(f"{a}\nok?") for a in asked]
    told = capsys.readouterr().err
    assert "fields: product, review, id (given: id, review, product)" in told
    assert "in the given order" in told


def test_the_order_can_be_given(folder: Folder) -> None:
    folder.write([["1", "good", "pen"], ["2", "bad", "pen"]])
    flags = ("--reorder", "none", "--fields", "review,product")
    assert folder.run(*flags, prompt="{row}?") == 0
    asked = [f"review: {text}\nproduct: pen?" for text in ("good", "bad")]
    assert [row["answer"] for row in folder.rows()] == [chat_answer(text) for text in asked]


def test_named_fields_follow_a_prompt_that_does_not_list_them(folder: Folder) -> None:
    folder.write([["1", "good", "pen"]])
    assert folder.run("--fields", "product", prompt="Say {id}") == 0
    assert folder.rows()[0]["answer"] == chat_answer("Say 1\n\nproduct: pen")


def test_rows_may_have_orders_of_their_own(folder: Folder) -> None:
    rows = [["x" * 60, f"{n}", "1"] for n in range(70)] + [
        [f"{n}", "y" * 60, "1"] for n in range(70)
    ]
    folder.write(rows, ["a", "b", "c"])
    assert folder.run("--reorder", "rows", "--limit", "140", prompt="{row}") == 0
    answers = [row["answer"] for row in folder.rows()]
    assert answers[0] in {
        chat_answer(f"a: {'x' * 60}\n{rest}") for rest in ("c: 1\nb: 0", "b: 0\nc: 1")
    }
    assert answers[-1] in {
        chat_answer(f"b: {'y' * 60}\n{rest}") for rest in ("c: 1\na: 69", "a: 69\nc: 1")
    }


def test_lengths_of_values_beyond_the_sample_are_estimated(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "SAMPLED_VALUES", 2)
    folder.write([[str(n), f"review {n:04}", "a thing"] for n in range(6)])
    assert folder.run(prompt="{row}") == 0
    assert folder.rows()[5]["answer"] == chat_answer("product: a thing\nreview: review 0005\nid: 5")


def test_a_dry_run_prints_the_plan_and_answers_nothing(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write([[str(n), f"review {n}", "a thing with a long name"] for n in range(6)])
    argv = [str(folder.input), "--prompt", "{row}", "--dry-run"]
    model = ["--model", str(a_config(folder.path / "model"))]
    assert main([*argv, *model], folder.engines, lambda _: a_tokenizer()) == 0
    told = capsys.readouterr().out
    assert folder.engines.engine is None
    for words in ("rows  ", "prompt tokens", "computed in the given order", "seconds, estimated"):
        assert words in told
    with pytest.raises(ConfigError, match="-o OUT is missing"):
        main(argv[:-1], folder.engines)


# --- forms of answers -----------------------------------------------------------------------------


def test_choices_are_scored(folder: Folder) -> None:
    folder.write(some_rows(4))
    assert folder.run("--choices", "yes, no") == 0
    found = folder.rows()
    assert list(found[0])[3:] == ["answer", "answer_probability", "answer_error"]
    assert {row["answer"] for row in found} <= {"yes", "no"}
    assert all(0.5 <= float(row["answer_probability"]) <= 1 for row in found)
    with pytest.raises(InvalidRequest, match="two different texts or more"):
        folder.run("--choices", "yes", "--overwrite")


def test_a_schema_gives_a_column_for_each_property(folder: Folder) -> None:
    schema = {"properties": {"good": {"type": "boolean"}, "n": {"enum": [1, 2]}}, "type": "object"}
    path = folder.path / "schema.json"
    path.write_text(json.dumps(schema))
    folder.write(some_rows(3))
    folder.run("--schema", str(path), "--max-tokens", "60")
    found = folder.rows()
    assert list(found[0])[3:] == ["good", "n", "answer_error"]
    for row in found:
        assert row["good"] in ("true", "false") or row["answer_error"]
    path.write_text("[1]")
    with pytest.raises(InvalidRequest, match="must be a JSON schema"):
        folder.run("--schema", str(path), "--overwrite")
    path.write_text("{")
    with pytest.raises(InvalidRequest, match="is not JSON"):
        folder.run("--schema", str(path), "--overwrite")


def test_an_answer_that_is_cut_off_is_an_error(folder: Folder) -> None:
    path = folder.path / "schema.json"
    path.write_text(json.dumps({"type": "object", "properties": {"a": {"type": "string"}}}))
    folder.write(some_rows(1))
    assert folder.run("--schema", str(path), "--max-tokens", "2") == 1
    (row,) = folder.rows()
    assert row["a"] == ""
    assert row["answer_error"].startswith("no_answer: the answer was cut off; raise --max-tokens")


# --- tables and cells that are wrong --------------------------------------------------------------


def refused(folder: Folder, words: str, *flags: str, prompt: str = "Is {review} ok?") -> None:
    with pytest.raises(InvalidRequest, match=words):
        folder.run(*flags, prompt=prompt)
    assert not folder.output.exists()
    assert folder.engines.engine is None, "the model was loaded first"


def test_a_column_that_the_table_lacks_is_named(folder: Folder) -> None:
    folder.write(some_rows(2))
    refused(folder, "no column 'reviews'. Did you mean review", prompt="{reviews}")
    refused(folder, "no column 'x'. It has 'id', 'product', 'review'", prompt="{x}")
    refused(folder, "no column 'x'", "--fields", "id,x", prompt="{row}")
    refused(folder, "names a column twice", "--fields", "id,id", prompt="{row}")
    template = folder.path / "p.jinja"
    template.write_text("{{ reviews }}")
    refused(folder, "no column 'reviews'", "--prompt-file", str(template))


def test_braces_in_prompts(folder: Folder) -> None:
    folder.write([["1", "good", "pen"]])
    refused(folder, "a single brace near", prompt="a } b")
    refused(folder, "a single brace near", prompt="a {review")
    refused(folder, "must not be empty", prompt=" ")
    assert folder.run(prompt='{{"a": {review}}}') == 0
    assert folder.rows()[0]["answer"] == chat_answer('{"a": good}')


def test_templates_that_are_wrong(folder: Folder) -> None:
    folder.write([["1", "good", "pen"]])
    template = folder.path / "p.jinja"
    template.write_text("{% if %}")
    refused(folder, "--prompt-file: line 1: ", "--prompt-file", str(template))
    template.write_bytes(b"\xff")
    refused(folder, "is not UTF-8", "--prompt-file", str(template))
    refused(folder, "No such file", "--prompt-file", str(folder.path / "none"))


def test_templates_run_in_a_sandbox(folder: Folder) -> None:
    folder.write([["1", "good", "pen"]])
    template = folder.path / "p.jinja"
    template.write_text("{{ review.__class__.__mro__ }}")
    assert folder.run("--prompt-file", str(template)) == 1
    assert "refused by the prompt's template" in folder.rows()[0]["answer_error"]


def test_a_cell_is_neither_a_template_nor_a_special_token(folder: Folder) -> None:
    cells = ["{product}", "{{ product }}", "<|end|>", "{% raw %}"]
    folder.write([["1", cell, "pen"] for cell in cells])
    for flags in ((), ("--no-chat",)):
        assert folder.run(*flags, "--overwrite") == 0
        tokenizer = a_tokenizer()
        for cell, row in zip(cells, folder.rows(), strict=True):
            if cell != "<|end|>":
                text = f"Is {cell} ok?"
                expected = expected_text(text, 8) if flags else chat_answer(text)
                assert row["answer"] == expected
        ids = tokenizer.encode_as_text("Is <|end|> ok?")
        assert tokenizer.token_id("<|end|>") not in ids
        assert tokenizer.decode(ids) == "Is <|end|> ok?"


def test_columns_with_the_same_name_are_refused(folder: Folder) -> None:
    folder.write([["1", "2", "3"]], ["review", "a", "review"])
    refused(folder, "two columns have the same name, 'review'")
    folder.input = folder.path / "in.jsonl"
    folder.input.write_text('{"review": 1, "review": 2}\n')
    refused(folder, "line 1 is not JSON: two fields are named 'review'")


def test_a_column_named_like_the_answers_is_refused(folder: Folder) -> None:
    for name in ("answer", "answer_error"):
        folder.write([["1", "2"]], ["review", name])
        refused(folder, f"column '{name}' already.*--answer")
    folder.write([["1", "2"]], ["review", "answer_probability"])
    refused(folder, "column 'answer_probability' already", "--choices", "a,b")
    assert folder.run() == 0
    folder.write([["1", "2"]], ["review", "row"])
    folder.output.unlink()
    folder.engines = FakeEngines()
    refused(folder, "the table has a column 'row'", prompt="{row}")


def test_an_empty_table_gives_an_empty_table(folder: Folder) -> None:
    folder.write([])
    assert folder.run(prompt="{row} {review}") == 0
    assert folder.output.read_text() == "id,review,product,answer,answer_error\n"
    folder.input.write_text("")
    with pytest.raises(InvalidRequest, match="is empty: it has no columns"):
        folder.run("--overwrite")


def test_a_row_with_other_cells_than_the_header_is_refused(folder: Folder) -> None:
    folder.input.write_text("review,product\nfine,pen\ngood, but late,pen\n")
    with pytest.raises(InvalidRequest, match="row 2 has 3 cells, and the header has 2"):
        folder.run()
    folder.input.write_text('review,product\n"fine,pen\n')
    with pytest.raises(InvalidRequest, match=r"line 2: unexpected end of data"):
        folder.run()
    assert not folder.output.exists()
    assert not folder.journal.exists()


def test_bytes_that_are_not_utf8_stay_in_the_table(folder: Folder) -> None:
    folder.input.write_bytes(b"review,product\nna\xefve,pen\nfine,b\xff\n")
    assert folder.run() == 1
    rows = list(csv.reader(io.StringIO(folder.output.read_bytes().decode("latin-1"))))
    assert [row[:2] for row in rows[1:]] == [["naïve", "pen"], ["fine", "bÿ"]]
    assert rows[1][3] == r"invalid_row: review: the cell is not UTF-8: 'na\\xefve'"
    assert rows[2][2:] == [chat_answer("Is fine ok?"), ""]
    folder.input.write_bytes(b"r\xe9view,product\n")
    with pytest.raises(InvalidRequest, match=r"the column .* is not UTF-8"):
        folder.run("--overwrite")


def test_lone_surrogates_are_error_cells_and_can_be_written(folder: Folder) -> None:
    folder.input = folder.path / "in.jsonl"
    folder.input.write_text('{"review": "a\\ud800", "n": ["\\ud801"]}\n')
    for name in ("out.csv", "out.jsonl", "out.parquet"):
        if name != "out.parquet" or is_here("pyarrow"):
            assert folder.run(output=folder.path / name) == 1
    (row,) = folder.rows()
    assert (row["review"], row["n"]) == (r"a\ud800", r'["\\ud801"]')
    assert row["answer_error"].startswith("invalid_row: review: the cell is not UTF-8")
    found = json.loads((folder.path / "out.jsonl").read_text())
    assert (found["review"], found["n"]) == (r"a\ud800", [r"\ud801"])


def test_a_table_that_changes_meanwhile_gets_no_answers(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(some_rows(6))
    folder.engines.at_step = lambda _: folder.write(some_rows(7)[1:])
    assert folder.run() == 1
    assert not folder.output.exists()
    assert "in.csv has changed while the job ran" in capsys.readouterr().err
    folder.engines.at_step = None
    assert folder.run("--resume") == 0
    assert [row["id"] for row in folder.rows()] == ["1", "2", "3", "4", "5", "6"]
    assert folder.rows()[0]["answer"] == chat_answer("Is text 1 ok?")


def test_a_huge_cell_is_an_error_and_stays_in_the_table(folder: Folder) -> None:
    folder.write([["1", "x" * 3_000_000, "pen"], ["2", "fine", "pen"]])
    assert folder.run() == 1
    csv.field_size_limit(1 << 30)
    found = folder.rows()
    assert len(found[0]["review"]) == 3_000_000
    assert found[0]["answer_error"].startswith("prompt_too_long: ")
    assert found[1]["answer"] == chat_answer("Is fine ok?")


def test_a_row_whose_prompt_is_empty_is_an_error(folder: Folder) -> None:
    folder.write([["1", "", "pen"], ["2", "fine", "pen"]])
    assert folder.run(prompt="{review}") == 1
    found = folder.rows()
    assert found[0]["answer_error"] == "invalid_row: prompt: is empty: the cells in it have no text"
    assert found[1]["answer"] == chat_answer("fine")


def test_a_field_that_a_row_lacks_is_an_error_or_left_out(folder: Folder) -> None:
    folder.input = folder.path / "in.jsonl"
    folder.input.write_text('{"a": 1}\n{"b": 2}\n')
    assert folder.run(prompt="{a}") == 1
    assert [row["answer_error"] for row in folder.rows()] == [
        "",
        "invalid_row: a: the row has no such field",
    ]
    assert folder.run("--overwrite", prompt="{row}") == 0
    assert [row["answer"] for row in folder.rows()] == [chat_answer("a: 1"), chat_answer("b: 2")]


def test_lines_that_are_not_objects_are_refused(folder: Folder) -> None:
    folder.input = folder.path / "in.jsonl"
    for line, words in (("[1]", "line 2 is not a JSON object"), ("{", "line 2 is not JSON")):
        folder.input.write_text(f'{{"review": 1}}\n{line}\n')
        refused(folder, words)


def test_names_of_unknown_formats_are_refused(folder: Folder) -> None:
    folder.write(some_rows(1))
    with pytest.raises(InvalidRequest, match=r"out\.xlsx: its name must end in one of .csv"):
        folder.run(output=folder.path / "out.xlsx")
    with pytest.raises(InvalidRequest, match=r"folder .* does not exist"):
        folder.run(output=folder.path / "none" / "out.csv")
    with pytest.raises(InvalidRequest, match="is the table itself"):
        folder.run("--overwrite", output=folder.input)
    folder.input = folder.path / "none.csv"
    refused(folder, "No such file")
    folder.input = folder.path / "*.parquet"
    refused(folder, "no file matches")


# --- interruptions --------------------------------------------------------------------------------


def test_an_existing_output_is_neither_replaced_nor_resumed_unasked(folder: Folder) -> None:
    folder.write(some_rows(4))
    assert folder.run() == 0
    with pytest.raises(InvalidRequest, match="exists already; use --overwrite"):
        folder.run()
    assert folder.run("--resume") == 0  # complete: nothing to do
    folder.output.unlink()
    folder.journal.write_text('{"custom_id": "1", "response": {}, "error": null}\n')
    with pytest.raises(InvalidRequest, match="holds answers already"):
        folder.run()


def test_rows_that_the_engine_failed_on_are_tried_again(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(some_rows(4))
    bad = a_tokenizer().encode("2 ok?")

    def fail(step: Step) -> None:
        ids = step.token_ids.tolist()
        if any(ids[at : at + len(bad)] == bad for at in range(len(ids))):
            raise RuntimeError("broken")

    folder.engines.at_launch = fail
    assert folder.run() == 1
    assert [bool(row["answer_error"]) for row in folder.rows()] == [False, False, True, False]
    assert "--resume tries them again" in capsys.readouterr().err
    folder.engines.at_launch = None
    assert folder.run("--resume") == 0
    assert {row["answer_error"] for row in folder.rows()} == {""}
    assert not folder.journal.exists()


def test_resuming_with_another_prompt_answers_again(folder: Folder) -> None:
    folder.write(some_rows(6))

    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    folder.engines.at_launch = stop
    with pytest.raises(KeyboardInterrupt):
        folder.run()
    folder.engines.at_launch = None
    assert folder.run("--resume", prompt="{review}!") == 0
    assert folder.rows()[5]["answer"] == chat_answer("text 0!")


def test_a_token_outside_the_vocabulary_is_an_error_cell(folder: Folder) -> None:
    folder.write([["1", "é", "pen"], ["2", "fine", "pen"]])
    assert folder.run() == 1
    assert "outside the vocabulary" in folder.rows()[0]["answer_error"]
    assert folder.rows()[1]["answer"] == chat_answer("Is fine ok?")
