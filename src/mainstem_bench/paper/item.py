"""One figure or table of a paper: how it is measured here, drawn, and judged.

A line is one measured point as JSON. An item's `run` yields lines; `plot` and `verdict` use only
lines, so pages can be made from stored lines.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mainstem_bench.paper.engines import Engines, Size
from mainstem_bench.paper.style import Figure

Line = dict[str, Any]
"""A measured point. The item's `run` chooses its keys, and only its `plot` and `verdict` know
them."""


class Outcome(Enum):
    EXCEEDED = "exceeded"
    REPRODUCED = "reproduced"
    PARTLY = "partly reproduced"
    NOT = "not reproduced"
    CANNOT = "not possible"
    OPEN = "not run yet"


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the paper, and ours. More is better."""

    ours: float
    paper: float
    tolerance: float = 0.15  # share of the paper's number, either way, within which they agree


@dataclass(frozen=True, slots=True)
class Runs:
    """The lowest and the highest value of several runs."""

    count: int
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What is faster than a baseline: the lines of both, and the values that are compared."""

    ours: Line
    baseline: Line
    our_runs: Runs
    baseline_runs: Runs
    is_rival: bool = False  # another engine, measured once

    @property
    def ratio(self) -> float:
        """Requests per second, ours over the baseline's."""
        return float(self.ours["requests_per_s"] / self.baseline["requests_per_s"])


@dataclass(frozen=True, slots=True)
class Sustained:
    """A rate that is said to be sustained. None: not stored."""

    per_s: float
    limit_per_s: float
    sent_s: float | None  # how long requests arrived
    latency_s: float | None  # mean time of a request
    is_queue_growing: bool | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the paper's claim holds here, and why; the rest is what `rules` checks."""

    outcome: Outcome
    reason: str  # a sentence or two; our own numbers come from lines
    numbers: tuple[Number, ...] = ()
    gains: tuple[Gain, ...] = ()
    sustained: tuple[Sustained, ...] = ()


class Where(Enum):
    """What a full run needs."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Settings:
    """How items are run."""

    is_quick: bool = False  # tiny models on this machine: the same code, small numbers
    model: str | None = None  # folder or hub id, instead of `Item.model`
    engines: Engines = field(default_factory=Engines)
    _measured: dict[str, list[Line]] = field(default_factory=dict)

    def sized(self, size: Size) -> Size:
        """Return `size`, or a tiny model for a quick run."""
        return Size("tiny", 16_384) if self.is_quick else size

    def once(self, name: str, measure: Callable[[], Iterator[Line]]) -> list[Line]:
        """Return the lines of `measure`, which runs once for all items that use the same `name`."""
        if name not in self._measured:
            self._measured[name] = list(measure())
        return [dict(line) for line in self._measured[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A figure or table. If `run` is None, there is no command, and `verdict` says why."""

    name: str  # relay-fig7
    title: str
    claim: str  # what the paper shows, in a sentence with its numbers
    differs: str  # what is different here, and why
    where: Where = Where.GPU
    full_s: float  # seconds of a full run, measured
    quick_s: float  # seconds of a quick run on 2 slow cores, measured
    run: Callable[[Settings], Iterator[Line]] | None
    verdict: Callable[[Sequence[Line]], Verdict]
    point: str  # where the claim is judged: the models, lengths and sizes that it depends on
    is_papers_point: bool = False  # else it is judged at another point than the paper's
    num_lines: int  # that a full run yields
    is_simulated: bool = False
    # of a simulation: benchmarks/results/<name>.jsonl has it beside the engine, and they agree
    agreement: str | None = None
    plot: Callable[[Sequence[Line], Figure], None] | None = None
    model: str | None = None  # hub id of the weights; None: --model cannot name others

    @property
    def command(self) -> str:
        return f"mainstem bench paper {self.name}"
