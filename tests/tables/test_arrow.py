"""Parquet and Arrow files, in and out."""

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from mainstem.cli.map import main
from mainstem.core.errors import ConfigError, InvalidRequest
from tests.fake_engines import FakeEngines
from tests.needs import is_here, needs
from tests.tables.test_map import chat_answer

if is_here("pyarrow"):
    import pyarrow as pa
    import pyarrow.parquet as pq

needs_arrow = needs("pyarrow")


def run(source: Path, output: Path, *flags: str, prompt: str = "Is {review} ok?") -> int:
    argv = [
        str(source),
        "--prompt",
        prompt,
        "-o",
        str(output),
        "--no-progress",
        "--max-tokens",
        "8",
    ]
    return main([*argv, *flags], FakeEngines())


def a_table(num_rows: int = 3) -> Any:
    """Columns of types that text formats do not have."""
    return pa.table(
        {
            "review": [f"text {n}" for n in range(num_rows)],
            "n": pa.array([n or None for n in range(num_rows)], pa.int8()),
            "at": pa.array([datetime(2026, 1, 2, 3, 4, 5)] * num_rows, pa.timestamp("ns")),
            "price": pa.array([Decimal("1.50")] * num_rows, pa.decimal128(5, 2)),
            "tags": pa.array([["a", None]] * num_rows),
            "kind": pa.array(["x"] * num_rows).dictionary_encode(),
            "raw": pa.array([b"\xff"] * num_rows),
        }
    )


def write(table: Any, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=2)


def read(path: Path) -> Any:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


@needs_arrow
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_columns_keep_their_types(tmp_path: Path, ending: str) -> None:
    source, output = tmp_path / f"in{ending}", tmp_path / f"out{ending}"
    write(a_table(), source)
    assert run(source, output) == 0
    found = read(output)
    assert found.select(a_table().column_names).equals(a_table())
    assert found["answer"].to_pylist() == [chat_answer(f"Is text {n} ok?") for n in range(3)]
    assert found["answer_error"].to_pylist() == [None] * 3
    assert found.schema.field("answer_error").type == pa.string()


@needs_arrow
def test_cells_of_all_types_have_a_text(tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    write(a_table(2), source)
    prompt = "{n} {at} {price} {tags} {kind}"
    assert run(source, output, prompt=prompt) == 0
    texts = [f'{n} 2026-01-02 03:04:05 1.50 ["a", null] x' for n in ("", "1")]
    assert read(output)["answer"].to_pylist() == list(map(chat_answer, texts))
    assert run(source, output, "--overwrite", prompt="{raw}") == 1
    errors = read(output)["answer_error"].to_pylist()
    assert errors == ["invalid_row: raw: the cell holds bytes, not text"] * 2


@needs_arrow
def test_text_formats_to_parquet_and_back(tmp_path: Path) -> None:
    source, middle, last = (tmp_path / name for name in ("in.jsonl", "out.parquet", "out.jsonl.gz"))
    rows: list[dict[str, object]] = [
        {"review": "a", "n": 1, "mixed": 1, "list": [1]},
        {"review": "b", "n": 2.5, "mixed": "x", "list": None},
        {"review": "c", "n": None},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(source, middle) == 0
    found = read(middle).to_pylist()
    assert [row["n"] for row in found] == [1.0, 2.5, None]
    assert [row["mixed"] for row in found] == ["1", "x", None]
    assert [row["list"] for row in found] == [[1], None, None]
    assert run(middle, last, "--answer", "again") == 0
    comma = tmp_path / "in.csv"
    comma.write_bytes(b"review,n\nna\xefve,1\n")
    assert run(comma, tmp_path / "csv.parquet", prompt="{n}") == 0
    assert read(tmp_path / "csv.parquet")["review"].to_pylist() == [r"na\xefve"]


@needs_arrow
def test_a_value_that_fits_no_type_keeps_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2**60 + 1 is not a float64, and 0.5 is not an int64."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    numbers = [0.5, 2**60 + 1]
    source.write_text("".join(json.dumps({"review": "a", "n": n}) + "\n" for n in numbers))
    status = run(source, output)
    if output.exists():  # a version of Arrow may find a type
        assert (status, read(output).num_rows) == (0, 2)
        return
    assert status == 1
    assert "the answers are kept" in capsys.readouterr().err
    assert (tmp_path / "out.parquet.answers.jsonl").exists()


@needs_arrow
def test_a_schema_gives_typed_columns(tmp_path: Path) -> None:
    kinds = {"i": "integer", "x": "number", "b": "boolean", "s": "string", "o": "array"}
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
    }
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    write(a_table(), source)
    run(source, output, "--schema", str(path))
    found = read(output).schema
    types = [found.field(name).type for name in kinds]
    assert types == [pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.string()]


@needs_arrow
def test_files_that_are_wrong_are_refused(tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    source.write_bytes(b"no parquet")
    with pytest.raises(InvalidRequest, match="cannot be read as parquet"):
        run(source, output)
    pq.write_table(pa.table([[1], [2]], ["review", "review"]), source)
    with pytest.raises(InvalidRequest, match="two columns have the same name"):
        run(source, output)
    pq.write_table(a_table(), source)
    others = pa.table({name: [1] for name in a_table().column_names})
    pq.write_table(others, tmp_path / "b.parquet")
    with pytest.raises(
        InvalidRequest, match=r"the column 'review' is string, and int64 in .*b.parquet"
    ):
        run(tmp_path / "*.parquet", tmp_path / "x" / "out.parquet")


@needs_arrow
def test_an_empty_table_and_a_limit(tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    write(a_table(0), source)
    assert run(source, output, prompt="{row}") == 0
    assert (read(output).num_rows, read(output).num_columns) == (0, 9)
    write(a_table(5), source)
    assert run(source, output, "--overwrite", "--limit", "4") == 0
    assert read(output).num_rows == 4


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "in.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"need pyarrow: pip install 'mainstem\[tables\]'"):
        run(tmp_path / "in.parquet", tmp_path / "out.parquet")
