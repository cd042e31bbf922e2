"""`mainstem.ray.map_rows`: a prompt for every row of a Dataset."""

import json
from pathlib import Path
from typing import Any

import pytest

import mainstem
from mainstem.core.errors import InvalidRequest
from mainstem.ray import MapRows, map_rows
from tests.fake_engines import TEMPLATE, FakeEngines, a_tokenizer
from tests.fake_llm import patch_loading
from tests.needs import is_here, needs
from tests.tables.test_map import chat_answer

if is_here("pyarrow"):
    import pyarrow as pa

SAMPLING = {"max_tokens": 4}
ROWS: list[dict[str, Any]] = [
    {"id": n, "text": f"a text that is the same for some rows {n % 3}"} for n in range(12)
]


@needs("pyarrow")
@pytest.mark.torch
def test_a_batch_gets_the_columns_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_loading(FakeEngines(), monkeypatch)
    ask = MapRows("Is {text} ok?", model="fake", sampling=SAMPLING, kv_tokens=1024)
    found = ask(pa.Table.from_pylist(ROWS))
    assert found["answer"].to_pylist() == [chat_answer(f"Is {r['text']} ok?", 4) for r in ROWS]
    with pytest.raises(InvalidRequest, match="'answer' already"):
        ask(found)


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    """A model whose tokens are bytes."""
    from tests.models.checkpoints import make_checkpoint  # noqa: PLC0415  # imports torch

    make_checkpoint("llama", tmp_path, vocab_size=300)
    (tmp_path / "tokenizer.json").write_text(a_tokenizer().to_json())
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(tmp_path)


@needs("ray")
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dataset_has_one_order_of_fields(tiny_model: str) -> None:
    import ray  # noqa: PLC0415  # takes seconds

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        asked: dict[str, Any] = {"sampling": SAMPLING, "kv_tokens": 8192, "model": tiny_model}
        found = map_rows(ray.data.from_items(ROWS), "{row}", num_workers=1, **asked).take_all()
    finally:
        ray.shutdown()
    here = mainstem.map(
        ROWS, "{row}", fields=["text", "id"], reorder="none", use_tqdm=False, **asked
    )
    by_id = {row["id"]: row for row in found}
    assert {number: row["answer"] for number, row in by_id.items()} == {
        row["id"]: row["answer"] for row in here
    }
    assert {row["answer_error"] for row in found} == {None}
