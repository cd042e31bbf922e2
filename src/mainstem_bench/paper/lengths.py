"""Lengths of real requests, as numbers only: ShareGPT's conversations and MMLU's questions.

sharegpt_session_lengths.jsonl.gz   {"turns": [[user tokens, answer tokens], ...]} a conversation
mmlu_lengths.jsonl.gz               {"task", "prefix": tokens with 1, 3 and 5 examples,
                                     "questions": [tokens, ...]} a subject (SmolLM2's tokenizer)
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from mainstem.core.plan import Int64s

SHOTS = (1, 3, 5)
LEAST, MOST_USER, MOST_ALL = 4, 1024, 2048  # limits of the paper and of vLLM's benchmark


@contextmanager
def shipped(name: str) -> Iterator[Path]:
    """Return the path of a data file of this package."""
    with as_file(files("mainstem_bench") / "paper" / "data" / name) as path:
        yield path


@cache
def sharegpt_turns() -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return conversations, as (user tokens, answer tokens) of each turn."""
    rows = _rows("sharegpt_session_lengths.jsonl.gz")
    return tuple(tuple((user, answer) for user, answer in row["turns"]) for row in rows)


@dataclass(frozen=True, slots=True)
class Requests:
    """Lengths of single requests."""

    users: Int64s
    answers: Int64s

    def __len__(self) -> int:
        return len(self.users)


def sharegpt_requests(count: int, most_answer: int, seed: int = 0) -> Requests:
    """Return the first turns of conversations drawn at random; answers are cut at `most_answer`
    tokens."""
    kept = [
        (user, answer)
        for (user, answer), *_ in (turns for turns in sharegpt_turns() if turns)
        if user >= LEAST and answer >= LEAST and user <= MOST_USER and user + answer <= MOST_ALL
    ]
    drawn = np.array(Random(seed).sample(kept, count), np.int64)
    return Requests(drawn[:, 0], np.minimum(drawn[:, 1], most_answer))


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject of MMLU."""

    task: str
    prefix: dict[int, int]  # tokens of the prefix, by number of examples
    questions: tuple[int, ...]  # tokens


@cache
def mmlu_subjects() -> tuple[Subject, ...]:
    return tuple(
        Subject(row["task"], dict(zip(SHOTS, row["prefix"], strict=True)), tuple(row["questions"]))
        for row in _rows("mmlu_lengths.jsonl.gz")
    )


def _rows(name: str) -> list[dict[str, Any]]:
    with shipped(name) as path, gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
