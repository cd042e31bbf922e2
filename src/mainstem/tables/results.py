"""The answers of a batch job, by row of the table: from the lines of its output."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from mainstem.core.json import AnyJson, Json
from mainstem.tables.asking import Asking, Kind, NoAnswer, error_column

NOT_RUN = "not_answered: the job ended before this row"


class Outcomes(Protocol):
    """The answers' cells of every row."""

    def of(self, number: int) -> Sequence[object]:
        """The cells of a row, which is counted from 1: the answers', and the error's."""


def answer_columns(asking: Asking, answer: str) -> dict[str, Kind]:
    """The columns that a table gets."""
    return {**asking.columns, error_column(answer): Kind.TEXT}


def read_outcome(line: AnyJson, asking: Asking) -> list[object]:
    """The cells of a row from its line in a batch output."""
    if line["response"] is None:
        error = line["error"]
        return [*(None for _ in asking.columns), f"{error['code']}: {error['message']}"]
    try:
        return [*asking.read(line["response"]["body"]), None]
    except NoAnswer as error:
        return [*(None for _ in asking.columns), f"no_answer: {error}"]


def row_number(line: AnyJson) -> int:
    """The row of a line in a batch output, counted from 1."""
    return int(line["custom_id"] if line["response"] is not None else line["error"]["line"])


class HeldOutcomes:
    """Answers in memory: the sink of a batch job."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._cells: dict[int, list[object]] = {}

    def append(self, row: Mapping[str, object]) -> None:
        """Take a line of the batch output."""
        line: AnyJson = dict(row)
        self._cells[row_number(line)] = read_outcome(line, self._asking)

    def of(self, number: int) -> Sequence[object]:
        """See Outcomes."""
        return self._cells.get(number) or [*(None for _ in self._asking.columns), NOT_RUN]


class KeptOutcomes:
    """Answers in the output file of a batch job. Only their places are in memory: 8 bytes a row."""

    def __init__(self, path: Path, num_rows: int, asking: Asking) -> None:
        self._asking = asking
        self._places = np.full(num_rows + 1, -1, dtype=np.int64)
        self._file = io.BufferedReader(io.FileIO(path, "rb"), 1 << 16)
        self.num_without_answer = 0
        place = 0
        for data in self._file:
            number = row_number(json.loads(data))
            if number <= num_rows:  # the table may have become shorter since an earlier run
                self._places[number] = place
            place += len(data)

    def of(self, number: int) -> Sequence[object]:
        """See Outcomes."""
        place = int(self._places[number])
        if place < 0:
            return [*(None for _ in self._asking.columns), NOT_RUN]
        self._file.seek(place)
        line: Json = json.loads(self._file.readline())
        cells = read_outcome(line, self._asking)
        self.num_without_answer += cells[-1] is not None
        return cells

    def close(self) -> None:
        """Close the file."""
        self._file.close()
