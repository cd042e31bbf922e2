"""`mainstem.map` over a fake model: tables in memory."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest

import mainstem
from mainstem import LLM, InvalidRequest
from tests.fake_engines import FakeEngines
from tests.fake_llm import a_fake_llm, patch_loading
from tests.needs import needs
from tests.tables.test_map import chat_answer

Rows = list[dict[str, Any]]
SHORT = {"max_tokens": 8}


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    with a_fake_llm(FakeEngines(), monkeypatch) as made:
        yield made


def ask(table: Any, llm: LLM, prompt: str = "Is {review} ok?", **more: Any) -> Any:
    return mainstem.map(table, prompt, model=llm, sampling=SHORT, use_tqdm=False, **more)


ROWS: Rows = [{"review": f"text {n}", "n": n or None} for n in range(3)]
ANSWERS = [chat_answer(f"Is text {n} ok?") for n in range(3)]


def test_a_list_of_dictionaries(llm: LLM) -> None:
    found = ask(ROWS, llm)
    assert found == [
        {**row, "answer": text, "answer_error": None}
        for row, text in zip(ROWS, ANSWERS, strict=True)
    ]
    assert "answer" not in ROWS[0]
    assert ask([], llm, "Hello") == []
    assert ask(ROWS, llm, "{row}", reorder="rows")[0]["answer_error"] is None


def test_rows_without_an_answer_have_an_error(llm: LLM) -> None:
    found = ask([*ROWS, {"other": 1}, {"review": "x" * 1000}], llm)
    errors = [row["answer_error"] for row in found]
    assert errors[:4] == [None, None, None, "invalid_row: review: the row has no such field"]
    assert errors[4].startswith("prompt_too_long")


@needs("pandas")
def test_a_frame_of_pandas_keeps_its_index_and_types(llm: LLM) -> None:
    import pandas as pd  # noqa: PLC0415  # an extra

    frame = pd.DataFrame(ROWS, index=["a", "b", "c"])
    found = ask(frame, llm)
    assert found["answer"].tolist() == ANSWERS
    assert found.index.tolist() == ["a", "b", "c"]
    assert found[["review", "n"]].equals(frame)
    assert frame.columns.tolist() == ["review", "n"]
    found = ask(frame, llm, "{n}?", choices=["yes", "no"])
    assert str(found["answer_probability"].dtype) == "Float64"
    with pytest.raises(InvalidRequest, match="names of columns must be texts, got 0"):
        ask(pd.DataFrame([[1]]), llm)
    with pytest.raises(InvalidRequest, match="two columns have the same name"):
        ask(pd.DataFrame([[1, 2]], columns=["a", "a"]), llm)


@needs("polars")
def test_a_frame_of_polars(llm: LLM) -> None:
    import polars as pl  # noqa: PLC0415  # an extra

    frame = pl.DataFrame(ROWS)
    found = ask(frame, llm)
    assert found["answer"].to_list() == ANSWERS
    assert found.drop("answer", "answer_error").equals(frame)
    assert found.schema["answer_error"] == pl.String


@needs("pyarrow")
def test_an_arrow_table(llm: LLM) -> None:
    import pyarrow as pa  # noqa: PLC0415  # an extra

    table = pa.Table.from_pylist(ROWS)
    found = ask(table, llm)
    assert found["answer"].to_pylist() == ANSWERS
    assert found.select(["review", "n"]).equals(table)
    with pytest.raises(InvalidRequest, match="is a RecordBatch"):
        ask(table.to_batches()[0], llm)


def test_calls_that_are_wrong(llm: LLM) -> None:
    for table, words in (("in.csv", "there is `mainstem map`"), (3, "must be a DataFrame")):
        with pytest.raises(InvalidRequest, match=words):
            ask(table, llm)
    for more, words in (
        ({"reorder": "best"}, "must be one of columns, rows, none"),
        ({"kv_tokens": 8}, "kv_tokens: cannot be set for an LLM"),
        ({"choices": ["a", "b"], "schema": {}}, "cannot be combined"),
        ({"template": "x"}, "either a prompt or a template"),
        ({"answer": ""}, "must not be empty"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            ask(ROWS, llm, **more)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        mainstem.map(ROWS, "Hi", model=llm, sampling={"max_tokens": -1})


def test_a_model_is_loaded_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_loading(FakeEngines(), monkeypatch)
    found = mainstem.map(ROWS, "Is {review} ok?", model="fake", sampling=SHORT, use_tqdm=False)
    assert [row["answer"] for row in found] == ANSWERS


def test_an_llm_is_as_before_after_a_job(llm: LLM) -> None:
    listeners = {kind: len(each) for kind, each in llm.text_engine.engine.bus._listeners.items()}
    ask(ROWS, llm)
    after = llm.text_engine.engine.bus._listeners
    assert {kind: len(each) for kind, each in after.items() if each} == listeners
    stream = llm.stream("abc")
    next(stream)
    with pytest.raises(InvalidRequest, match="has open streams"):
        ask(ROWS, llm)
    assert isinstance(stream, Generator)
    stream.close()
    assert ask(ROWS, llm)[0]["answer"] == ANSWERS[0]


def test_an_interrupted_job_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = FakeEngines()
    with a_fake_llm(engines, monkeypatch) as llm:

        def stop(_: object) -> None:
            raise KeyboardInterrupt

        engines.at_step = stop
        with pytest.raises(KeyboardInterrupt):
            ask(ROWS, llm)
        engines.at_step = None
        assert ask(ROWS, llm)[2]["answer"] == ANSWERS[2]
        llm.text_engine.engine.check()


def test_a_closed_llm_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = FakeEngines()
    llm = a_fake_llm(engines, monkeypatch)
    engines.at_step = lambda _: llm.close()
    with pytest.raises(InvalidRequest, match="was closed before all rows"):
        ask(ROWS, llm)
