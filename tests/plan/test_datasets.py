"""Real data sets, read from ../shared/data where that exists: what planning saves on each.

`python -m tests.plan.test_datasets` prints the table kept in docs/log/plan.md. Its last two columns
are what an LRU cache of 100,000 tokens saves, with prompts in file order and shuffled. Traces have
a hash for many tokens, and their cache has 10,000,000 tokens.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from mainstem.core.plan import Int64s, Prompts
from mainstem.plan.planner import plan_tree
from mainstem.plan.prefix_tree import build_tree
from mainstem.plan.saving import LruCache, Savings, compare

DATA = Path(__file__).parents[3] / "shared" / "data"
Row = dict[str, Any]


def rows_of(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def chat_text(messages: list[Row]) -> str:
    said = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(said) + "<|im_start|>assistant\n"


def conversation_texts(path: Path) -> Iterator[str]:
    """Every assistant message is a request whose prompt is the conversation before it."""
    for row in rows_of(path):
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                yield chat_text(row["messages"][:index])


def agent_texts(path: Path) -> Iterator[str]:
    for row in rows_of(path):
        inputs: list[str] = []
        for request in row["requests"]:
            base = inputs[request["base"]][: request["lcp"]] if request["base"] >= 0 else ""
            inputs.append(base + request["suffix"])
        yield from inputs


def question_texts(path: Path) -> Iterator[str]:
    for row in rows_of(path):
        head = row["prefix"] if "prefix" in row else row["doc"]
        yield from (head + item["q"] for item in row["items"])


def prompt_texts(path: Path) -> Iterator[str]:
    yield from (row["prompt"] for row in rows_of(path))


def tool_texts(path: Path) -> Iterator[str]:
    content = next(rows_of(path))
    for session in content["sessions"]:
        docs = "\n".join(content["function_docs"][name] for name in session["classes"])
        messages = [{"role": "system", "content": docs}]
        for turn in session["user_turns"]:
            messages.append({"role": "user", "content": str(turn)})
            yield chat_text(messages)


def mooncake_ids(path: Path) -> Iterator[list[int]]:
    """Hashes of 512 tokens stand for tokens."""
    yield from (row["hash_ids"] for row in rows_of(path))


def weka_ids(path: Path) -> Iterator[list[int]]:
    """Hashes of 64 tokens stand for tokens; they are local to a session."""
    first = 0
    for row in rows_of(path):
        runs = [request["hash_runs"] for request in row["requests"]]
        for request in runs:
            yield [first + b for begin, count in request for b in range(begin, begin + count)]
        first += 1 + max(begin + count for request in runs for begin, count in request)


def tree_ids(path: Path) -> Iterator[list[int]]:
    """The leaves of decoding trees; only token counts are known, so tokens are made up."""
    first = 0
    for row in rows_of(path):
        nodes = {node: (tokens, children) for node, tokens, children in row["nodes"]}
        children = {child for _, below in nodes.values() for child in below}
        stack = [(node, [-1 - row["id"]]) for node in nodes if node not in children]
        while stack:
            node, path_ids = stack.pop()
            tokens, below = nodes[node]
            ids = path_ids + list(range(first, first + tokens))
            first += tokens
            stack += [(child, ids) for child in below]
            if not below:
                yield ids


Reader = Callable[[Path], Iterator[str]] | Callable[[Path], Iterator[list[int]]]

READERS: dict[str, Reader] = {
    "conversations": conversation_texts,
    "agents": agent_texts,
    "fewshot": question_texts,
    "docqa": question_texts,
    "text2sql": question_texts,
    "toolcall/bfcl_live": question_texts,
    "toolcall/bfcl_multi": tool_texts,
    "longctx": prompt_texts,
    "traces/mooncake": mooncake_ids,
    "traces/weka": weka_ids,
    "trees/deft_keyword": tree_ids,
    "trees/deft_sorting": tree_ids,
}


def data_sets() -> Iterator[tuple[str, Reader]]:
    for path in sorted(DATA.glob("*/*.gz")):
        name = str(path.relative_to(DATA))
        for start, reader in READERS.items():
            if name.startswith(start):
                yield name, reader


def load(name: str, reader: Reader) -> Prompts:
    """A data set as token ids; text is encoded with the tokenizer of Qwen2.5."""
    texts: list[str] = []
    ids: list[list[int]] = []
    for row in reader(DATA / name):
        if isinstance(row, str):
            texts.append(row)
        else:
            ids.append(row)
    if texts:
        packed = (DATA / "tokenizers" / "qwen2.5_tokenizer.json.gz").read_bytes()
        tokenizer = tokenizers.Tokenizer.from_buffer(gzip.decompress(packed))
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    return Prompts.from_lists(ids)


def shuffled(prompts: Prompts) -> Prompts:
    order = np.random.default_rng(0).permutation(len(prompts)).tolist()
    starts = np.concatenate([[0], np.cumsum(prompts.num_tokens[order])])
    return Prompts(np.concatenate([prompts[index] for index in order]), starts)


def count_different_prefixes(prompts: Prompts) -> int:
    """Counts different prefixes by a hash of all their tokens, without a tree."""
    lengths: Int64s = prompts.num_tokens
    weights = np.random.default_rng(1).integers(1, 2**63, int(lengths.max()), dtype=np.uint64)
    hashes = prompts.token_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    for start, length in zip(prompts.starts.tolist(), lengths.tolist(), strict=False):
        mine = hashes[start : start + length]
        np.cumsum(mine * weights[:length], out=mine)
        mine *= weights[:length] | np.uint64(1)
    return len(np.unique(hashes))


def lru_of(name: str) -> LruCache:
    """A cache whose size is in the units of the data set: tokens, or hashes of many tokens."""
    hashed = {"traces/mooncake": 512, "traces/weka": 64}
    for start, hash_tokens in hashed.items():
        if name.startswith(start):
            return LruCache(10_000_000 // hash_tokens, page_size=1)
    return LruCache(100_000)


def savings_of(name: str, prompts: Prompts) -> tuple[Savings, int]:
    tree = build_tree(prompts)
    plan = plan_tree(tree)
    return compare(tree, plan, lru_of(name)), plan.num_groups


SETS = dict(data_sets())


@pytest.mark.slow
@pytest.mark.skipif(not SETS, reason="the data sets are not here")
@pytest.mark.parametrize("name", sorted(SETS))
def test_many_levels_save_all_that_can_be_saved(name: str) -> None:
    prompts = load(name, SETS[name])
    savings, _ = savings_of(name, prompts)
    bound = 1 - count_different_prefixes(prompts) / len(prompts.token_ids)
    assert savings.upper_bound == pytest.approx(bound, abs=1e-6)
    assert savings.multi_level >= bound - 0.005


def main() -> None:
    """Print the table."""
    columns = ("prompts", "tokens", "groups", "first", "enlarged", "multi", "bound", "lru", "mixed")
    print("| data set |", " | ".join(columns), "|")
    print("| --- |", " | ".join("---" for _ in columns), "|")
    for name, reader in SETS.items():
        prompts = load(name, reader)
        savings, num_groups = savings_of(name, prompts)
        ratios = (
            savings.first_level,
            savings.first_level_enlarged,
            savings.multi_level,
            savings.upper_bound,
            savings.lru,
            savings_of(name, shuffled(prompts))[0].lru,
        )
        counts = f"{len(prompts):,} | {len(prompts.token_ids):,} | {num_groups:,}"
        shares = " | ".join(f"{100 * ratio:.2f}" for ratio in ratios)
        print(f"| {name.split('.')[0]} | {counts} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
