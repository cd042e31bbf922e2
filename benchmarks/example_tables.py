"""Makes the five tables of docs/log/batch.md from public data sets, as CSV files.

python benchmarks/example_tables.py DATA OUT

DATA has the files named below, one JSON object a line, gzip: few-shot sets as {"task", "prefix",
"items": [{"q", "a"}]}, documents as {"id", "doc", "items"}, dialogues as {"id", "services",
"messages"}. Columns are in the order in which one would write them: the row's own text first.
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

Rows = Iterator[dict[str, object]]


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def tatqa(data: Path) -> Rows:
    """Financial reports: questions, and the report's table and text."""
    for doc in read(data / "docqa" / "tatqa.jsonl.gz"):
        head, _, text = doc["doc"].partition("\n\n")
        for number, item in enumerate(doc["items"]):
            question = item["q"].strip()
            yield {
                "id": f"{doc['id']}-{number}", "question": question, "answer": item["a"],
                "report": doc["id"], "text": text, "table": head,
            }  # fmt: skip


def spider(data: Path) -> Rows:
    """Text to SQL: questions, queries, and the schema of their database."""
    number = 0
    for database in read(data / "text2sql" / "spider_dev.jsonl.gz"):
        kinds = database["prefix"].count("CREATE TABLE")
        for item in database["items"]:
            number += 1
            yield {
                "id": number, "question": item["q"].strip(), "sql": item["a"],
                "database": database["db"], "tables": kinds, "schema": database["prefix"],
            }  # fmt: skip


def mmlu(data: Path) -> Rows:
    """Multiple choice: questions, choices, and the examples of their subject."""
    for task in read(data / "fewshot" / "mmlu_5shot.jsonl.gz"):
        for item in task["items"][:40]:
            question, _, choices = item["q"].partition("\nA. ")
            yield {
                "question": question, "choices": f"A. {choices}", "label": item["a"],
                "subject": task["task"], "examples": task["prefix"],
            }  # fmt: skip


def dialogues(data: Path) -> Rows:
    """Turns of dialogues, with what the user wanted at the beginning."""
    for number, session in enumerate(read(data / "conversations" / "sgd_dev.jsonl.gz")):
        if number == 200:
            return
        for turn, message in enumerate(session["messages"]):
            yield {
                "dialogue": session["id"], "turn": turn, "speaker": message["role"],
                "text": message["content"], "services": ", ".join(session["services"]),
                "opening": session["messages"][0]["content"],
                "last": session["messages"][-1]["content"],
            }  # fmt: skip


def pairs(data: Path) -> Rows:
    """Pairs of questions about one paragraph, to be judged."""
    for doc in read(data / "docqa" / "xquad_en.jsonl.gz"):
        for one, other in combinations(doc["items"][:5], 2):
            yield {
                "first": one["q"].strip(), "second": other["q"].strip(), "first_answer": one["a"],
                "second_answer": other["a"], "article": doc["art"], "paragraph": doc["doc"],
            }  # fmt: skip


TABLES = {"tatqa": tatqa, "spider": spider, "mmlu": mmlu, "dialogues": dialogues, "pairs": pairs}


def main(data: Path, out: Path) -> None:
    """Write all tables."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows_of in TABLES.items():
        rows = list(rows_of(data))
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{name}: {len(rows):,} rows, {len(rows[0])} columns")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
