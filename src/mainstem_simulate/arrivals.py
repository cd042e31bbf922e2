"""Draws the times at which turns of conversations arrive, for traces that have only lengths.

Session starts are a Poisson process (AttentionStore 4.1: one per second). Think times are those of
people in a chat: the shipped table has 1,000 times of equal probability (`think_times.json`, from
ChitChat). A file in ChitChat's format can replace the table.
"""

import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from random import Random

from mainstem.core.errors import InvalidRequest
from mainstem.core.files import UNREADABLE, read_plain_or_gzip, text_lines

ANSWER_S_PER_TOKEN = 0.02  # how long an answer takes; a user starts to write when it has ended


class ArrivalProcess:
    """Draws session starts and think times; the same seed gives the same times."""

    def __init__(self, rate: float, seed: int, think_times: Path | None) -> None:
        self._rate = rate
        self._starts = Random(f"starts {seed}")
        self._thinks = Random(f"thinks {seed}")
        self._think_s = load_think_times(think_times)
        self._now_s = 0.0

    def next_start(self) -> float:
        """Draw the start of the next session."""
        self._now_s += self._starts.expovariate(self._rate)
        return self._now_s

    def think_s(self) -> float:
        """Draw the seconds from the end of an answer to the next prompt."""
        return self._thinks.choice(self._think_s)

    def answer_s(self, output_tokens: int) -> float:
        return output_tokens * ANSWER_S_PER_TOKEN


def load_think_times(path: Path | None) -> list[float]:
    """Return the shipped times, or the gaps between turns in a file of {"turns": [[first_s,
    last_s]]}."""
    if path is None:
        table = json.loads((files("mainstem_simulate") / "data" / "think_times.json").read_text())
        return [float(value) for value in table["think_s"]]
    gaps: list[float] = []
    try:
        text = read_plain_or_gzip(path)
    except UNREADABLE as error:
        raise InvalidRequest(str(path), str(error)) from None
    for number, line in enumerate(text_lines(text), 1):
        try:
            turns = json.loads(line)["turns"]
            gaps += [
                max(0.0, float(after[0]) - float(before[1])) for before, after in pairwise(turns)
            ]
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidRequest(f"{path}:{number}", f"not a line of turns: {error!r}") from None
    if not gaps:
        raise InvalidRequest(str(path), "no two turns follow one another")
    return gaps
