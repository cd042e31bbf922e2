"""A prompt for every row of a Dataset: what `mainstem.map` does, on many engines.

rows = ray.data.read_parquet("reviews.parquet")
rows = map_rows(rows, "Is {review} about {product}?", num_workers=8, num_gpus=1)
rows.write_parquet("answers")
"""

import json
from typing import TYPE_CHECKING, Any

from mainstem.checkpoints.fetch import fetch_tokenizer
from mainstem.core.config import ModelConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.map_table import map as map_table
from mainstem.ray.data import in_bundles, whole_table
from mainstem.tables.fields import Reorder
from mainstem.tables.job import TableJob, wish_for
from mainstem.tables.memory import MemoryTable
from mainstem.tables.rows import TableRows
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ray.data import Dataset


class MapRows:
    """A class for `Dataset.map_batches` with `batch_format="pyarrow"`: adds the columns of the
    answers. The arguments are those of `mainstem.map`; the order of fields is chosen batch by
    batch, unless they are named and `reorder` is "none"."""

    def __init__(self, prompt: str | None = None, *, model: str = "smollm2", **asked: Any) -> None:
        from mainstem.llm import LLM  # noqa: PLC0415  # imports torch, not needed by the driver

        settings = {name: asked.pop(name) for name in asked.keys() - ASKED}
        self._llm = LLM(model, **settings)
        self._prompt, self._asked = prompt, asked

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its answers."""
        return map_table(batch, self._prompt, model=self._llm, use_tqdm=False, **self._asked)


# arguments of `mainstem.map` that are not settings of LLM
WISHED = ("template", "system", "chat", "fields", "reorder", "answer", "schema", "choices")
ASKED = frozenset([*WISHED, "sampling"])


def map_rows(
    dataset: "Dataset",
    prompt: str | None = None,
    *,
    num_workers: int,
    model: str = "smollm2",
    num_gpus: float = 0,
    **asked: Any,
) -> "Dataset":
    """Return the rows with their answers, from `num_workers` engines.

    One order of fields is chosen for the whole Dataset, which is held in the caller's memory. Rows
    that share prefixes are neighbours: they do not keep their places. `asked` are further arguments
    of `mainstem.map`.
    """
    import ray  # noqa: PLC0415  # an extra

    table = whole_table(dataset)
    tokenizer = fetch_tokenizer(ModelConfig(model))
    wished = {name: asked[name] for name in WISHED if name in asked}
    wish = wish_for(prompt, **wished)
    job = TableJob(MemoryTable(table), wish)
    job.prepare(tokenizer)
    if job.order.orders[0] and wish.reorder is not Reorder.ROWS:
        asked |= {"fields": list(job.order.orders[0]), "reorder": Reorder.NONE.value}
    planned = in_bundles(table, _prompts(job.rows(), tokenizer), num_workers)
    return planned.map_batches(
        MapRows,
        fn_constructor_kwargs={"prompt": prompt, "model": model, **asked},
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        num_gpus=num_gpus,
    )


def _prompts(rows: TableRows, tokenizer: Tokenizer) -> Prompts:
    """Token ids of each row. A row without a prompt counts as empty; it will get an error."""
    found: list[list[int]] = []
    for line in rows:
        try:
            body = {} if line.data is None else json.loads(line.data)
            has_chat = "messages" in body
            ids = tokenizer.encode_chat(body["messages"]) if has_chat else body.get("prompt", [])
            found.append(ids)
        except InvalidRequest:
            found.append([])
    return Prompts.from_lists(found)
