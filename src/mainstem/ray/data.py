"""Ray Data: `Generate` answers the rows of a Dataset; `plan` groups rows that share prefixes.

rows = ray.data.read_parquet("questions.parquet")
rows = plan(rows, "smollm2", num_workers=8)
pool = ray.data.ActorPoolStrategy(size=8)
rows = rows.map_batches(
    Generate, fn_constructor_kwargs={"model": "smollm2", "sampling": {"max_tokens": 64}},
    batch_size=None, compute=pool, num_gpus=1,
)
rows.write_json("answers")
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mainstem.checkpoints.fetch import fetch_tokenizer
from mainstem.core.config import ModelConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.plan.cut import cut_plan
from mainstem.plan.planner import plan_prompts
from mainstem.text.prompts import is_conversation, read_conversation, read_prompt
from mainstem.text.tokenizer import Tokenizer
from mainstem.vllm_names import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

BUNDLES_PER_WORKER = 4
EXPECTED_TOKENS = 256  # assumed length of an answer

Batch = dict[str, Any]  # columns


class Generate:
    """A class for `Dataset.map_batches`: adds an answer and its cost to each row.

    `prompt` names the column with texts, lists of token ids or conversations (lists of messages),
    `answer` the new column. Further new columns are `finish_reason`, `prompt_tokens`,
    `cached_tokens`, `output_tokens` and `error`: why a row has no answer, or None.
    `settings` are those of LLM, `sampling` are fields of SamplingParams.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prompt: str = "prompt",
        answer: str = "answer",
        sampling: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        from mainstem.llm import LLM  # noqa: PLC0415  # imports torch, not needed by the driver

        self._prompt, self._answer = prompt, answer
        self._llm = LLM(model, **settings)
        given: dict[str, Any] = {**self._llm.tokenizer.sampling_defaults, **(sampling or {})}
        self._sampling = SamplingParams(**given)
        if self._sampling.n != 1:
            raise InvalidRequest("sampling", "n must be 1: a row has one answer")

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its answers."""
        prompts = [_plain(item) for item in _column(batch, self._prompt)]
        chats = [place for place, prompt in enumerate(prompts) if is_conversation(prompt)]
        others = sorted(set(range(len(prompts))) - set(chats))
        found: list[Any] = [None] * len(prompts)
        for places, ask in ((chats, self._llm.chat), (others, self._llm.generate)):
            if places:
                asked: Any = [prompts[place] for place in places]
                results = ask(asked, self._sampling, use_tqdm=False, errors="return")
                for place, result in zip(places, results, strict=True):
                    found[place] = result
        answers = [_answer_of(result) for result in found]
        columns: dict[str, list[object]] = {
            self._answer: [answer and answer.text for answer in answers],
            "finish_reason": [answer and answer.finish_reason for answer in answers],
            "prompt_tokens": [len(result.prompt_token_ids) for result in found],
            "cached_tokens": [result.num_cached_tokens for result in found],
            "output_tokens": [sum(len(o.token_ids) for o in result.outputs) for result in found],
            "error": [result.error for result in found],
        }
        return batch | {name: _array(values) for name, values in columns.items()}


def plan(
    dataset: "Dataset",
    model: str = "smollm2",
    *,
    num_workers: int,
    prompt: str = "prompt",
    expected_tokens: int = EXPECTED_TOKENS,
) -> "Dataset":
    """Return the same rows, sorted into bundles of one block each, for
    `map_batches(batch_size=None)`.

    Rows that share a prefix are neighbours, if possible in one bundle. Bundles take about the same
    time; there are up to four per worker. The whole Dataset is held in the caller's memory.
    """
    table = whole_table(dataset)
    if prompt not in table.column_names:
        raise InvalidRequest("prompt", f"the Dataset has no column {prompt!r}")
    tokenizer = fetch_tokenizer(ModelConfig(model))
    prompts = _tokenized(tokenizer, table[prompt].to_pylist())
    return in_bundles(table, prompts, num_workers, expected_tokens)


def whole_table(dataset: "Dataset") -> Any:
    """All rows of a Dataset as one Arrow table."""
    import pyarrow as pa  # noqa: PLC0415  # comes with the extra
    import ray  # noqa: PLC0415  # an extra

    return pa.concat_tables(ray.get(dataset.to_arrow_refs()), promote_options="default")


def in_bundles(
    table: Any, prompts: Prompts, num_workers: int, expected_tokens: int = EXPECTED_TOKENS
) -> "Dataset":
    """The rows of a table in planned order, as a Dataset with a block for each bundle; `prompts`
    are those of its rows."""
    import ray  # noqa: PLC0415  # an extra

    made = plan_prompts(prompts)
    outputs = np.full(len(prompts), float(expected_tokens))
    cut = cut_plan(made, prompts.num_tokens, outputs, num_workers * BUNDLES_PER_WORKER)
    blocks = []
    for share in np.argsort(-cut.share_s, kind="stable").tolist():  # longest first
        mine = np.flatnonzero(cut.workers == share).tolist()
        if mine:
            places = [made.members[cut.begins[b] : cut.ends[b]] for b in mine]
            blocks.append(table.take(np.concatenate(places)))
    return ray.data.from_arrow(blocks)


def _tokenized(tokenizer: Tokenizer, prompts: Sequence[object]) -> Prompts:
    """Token ids of each prompt. An invalid prompt counts as empty; its row gets an `error`."""
    found: list[list[int]] = []
    for given in prompts:
        try:
            if is_conversation(given):
                found.append(tokenizer.encode_chat(read_conversation(given)))
                continue
            read = read_prompt(given)
            found.append(tokenizer.encode(read) if isinstance(read, str) else read)
        except InvalidRequest:
            found.append([])
    return Prompts.from_lists(found)


def _column(batch: Batch, name: str) -> Any:
    if name not in batch:
        raise InvalidRequest("prompt", f"the batch has no column {name!r}, only {sorted(batch)}")
    return batch[name]


def _plain(item: Any) -> Any:
    """Convert arrays to lists, recursively."""
    if isinstance(item, np.ndarray):
        return [_plain(part) for part in item]
    return item.item() if isinstance(item, np.generic) else item


def _answer_of(result: Any) -> Any:
    return None if result.error is not None or not result.outputs else result.outputs[0]


def _array(values: list[object]) -> np.ndarray[Any, Any]:
    """Make a column: of integers if possible, otherwise of objects, which can be None."""
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
