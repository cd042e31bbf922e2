"""Traces the steps of a job, and finds its valleys: steps with few tokens.

    tokens  |#####  ########   a valley: few tokens, though prompts still wait
    a step  |##### #########
            |###############..........   the tail: no prompt is left, only decodes run
            +------------------------> time

The tail is counted separately: a good schedule has a tail, too, and the faster the job is, the
larger is the tail's share. A small step costs time because it reads all weights: `extra_steps` is
the number of steps minus the fewest possible.
"""

from dataclasses import dataclass, field

import numpy as np

VALLEY = 0.25  # steps with fewer than this part of the largest step's tokens are valleys


@dataclass(slots=True)
class StepTrace:
    """One job, step by step."""

    ends_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_decodes: list[int] = field(default_factory=list)

    def add(self, end_s: float, num_tokens: int, num_decodes: int) -> None:
        self.ends_s.append(end_s)
        self.num_tokens.append(num_tokens)
        self.num_decodes.append(num_decodes)

    @property
    def seconds(self) -> float:
        return self.ends_s[-1]

    def summary(self) -> dict[str, float]:
        """Return the shares of time of valleys and of the tail, and the number of steps."""
        tokens = np.array(self.num_tokens)
        spent = np.diff(self.ends_s, prepend=0.0)
        has_prompt = tokens > np.array(self.num_decodes)
        last = int(np.flatnonzero(has_prompt)[-1]) + 1  # after this step there are only answers
        is_small = tokens[:last] < VALLEY * tokens.max()
        fewest = -(-int(tokens.sum()) // int(tokens.max()))
        return {
            "steps": len(tokens),
            "extra_steps": len(tokens) - fewest,
            "tokens_per_step": round(float(tokens.mean()), 1),
            "valley_share": round(float(spent[:last][is_small].sum()) / self.seconds, 4),
            "tail_share": round(float(spent[last:].sum()) / self.seconds, 4),
            "mixed_share": round(float(spent[_is_mixed(self)].sum()) / self.seconds, 4),
        }

    def thinned(self, most: int) -> dict[str, list[float]]:
        """Return at most `most` points for a plot: means over neighbouring steps."""
        parts = np.array_split(np.arange(len(self.ends_s)), min(most, len(self.ends_s)))
        return {
            "at_s": [round(self.ends_s[part[-1]], 4) for part in parts],
            "tokens": [round(float(np.mean(np.take(self.num_tokens, part))), 1) for part in parts],
            "decodes": [
                round(float(np.mean(np.take(self.num_decodes, part))), 1) for part in parts
            ],
        }


def _is_mixed(trace: StepTrace) -> np.ndarray:
    """Return which steps have both prompts and answers."""
    decodes = np.array(trace.num_decodes)
    return (decodes > 0) & (np.array(trace.num_tokens) > decodes)
