"""`mainstem map` with the embedded model: the answers are those of the same prompts asked alone."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from mainstem import LLM, RequestOutput, SamplingParams
from mainstem.cli.map import main

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "data" / "reviews.csv"
QUESTION = "What does the buyer say about the product? Answer in a few words."
SHORT = ("product", "stars", "review")
LONG = ("brand", "category", "product", "description", "stars", "review")
MAX_TOKENS = 6
NEAR = 1e-3  # logprobs this near to each other may change places by rounding


def example_rows() -> list[dict[str, str]]:
    with EXAMPLE.open(newline="") as file:
        return list(csv.DictReader(file))


def many_rows(count: int) -> list[dict[str, str]]:
    """Rows of the example, again and again; in each round the reviews differ."""
    rows = example_rows()
    found = []
    for number in range(count):
        row, again = rows[number % len(rows)], number // len(rows)
        after = f" I have had it for {again} months." if again else ""
        found.append({**row, "id": f"{row['id']}-{again}", "review": row["review"] + after})
    return found


def is_near_tie(result: RequestOutput) -> bool:
    """Whether the two likeliest tokens are about equally likely anywhere in an answer."""
    places = result.outputs[0].logprobs
    assert places is not None
    found = [sorted(each.logprob for each in place.values())[-2:] for place in places]
    return any(second - first < NEAR for first, second in found)


def check_answers(tmp_path: Path, rows: list[dict[str, str]], fields: Sequence[str]) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    argv = [str(source), "--prompt", f"{{row}}\n\n{QUESTION}", "--fields", ",".join(fields)]
    flags = ["--max-tokens", str(MAX_TOKENS), "--no-progress", "--kv-tokens", "16384"]
    assert main([*argv, "-o", str(output), "--reorder", "none", *flags]) == 0
    with output.open(newline="") as file:
        found = list(csv.DictReader(file))
    kept = [{name: row[name] for name in rows[0]} for row in found]
    assert kept == rows
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    alone: dict[str, RequestOutput] = {}
    with LLM("smollm2", kv_tokens=16384, share="none") as llm:
        for row, answered in zip(rows, found, strict=True):
            text = "\n".join(f"{name}: {row[name]}" for name in fields) + f"\n\n{QUESTION}"
            if text not in alone:
                chat = [{"role": "user", "content": text}]
                (alone[text],) = llm.chat(chat, greedy, use_tqdm=False)
            assert answered["answer_error"] == ""
            if answered["answer"] != alone[text].outputs[0].text:
                assert is_near_tie(alone[text]), text


def test_answers_of_8_rows_equal_those_of_single_prompts(tmp_path: Path) -> None:
    check_answers(tmp_path, many_rows(8), SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_of_300_rows_equal_those_of_single_prompts(tmp_path: Path) -> None:
    check_answers(tmp_path, many_rows(300), LONG)
