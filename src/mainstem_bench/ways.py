"""Ways to deal with a full window, and a runner that records how well a text is predicted."""

from dataclasses import dataclass, replace

import numpy as np

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus, PromptTruncated
from mainstem.core.request import Overflow
from mainstem.core.step import InFlight, Int32s, Runner, Step, StepResult
from mainstem_bench.kept import KeptRunner


@dataclass(frozen=True, slots=True)
class OverflowWay:
    """One way to deal with a full window."""

    name: str
    overflow: Overflow
    sink_tokens: int | None = None
    is_naive: bool = False


WAYS = {
    way.name: way
    for way in (
        OverflowWay("recompute", Overflow.RECOMPUTE),
        OverflowWay("kv", Overflow.KV),
        OverflowWay("important", Overflow.IMPORTANT),
        OverflowWay("no sink", Overflow.KV, sink_tokens=0),
        OverflowWay("naive", Overflow.KV, is_naive=True),
    )
}


class WatchedRunner(KeptRunner):
    """Runs steps, and records the logprob of each next token of a given text, and the likeliest
    token. With `is_naive`, moved keys are not rotated; otherwise answers are unchanged."""

    def __init__(self, runner: Runner, text_ids: Int32s, first: int, is_naive: bool) -> None:
        """Tokens from number `first` on are scored."""
        super().__init__(runner)
        self._text_ids = text_ids
        self._first = first
        self._is_naive = is_naive
        # from this position on, number in the text = position + `_distances[-1]`
        self._start = 0
        self._distances = [0]  # the distance after each cut so far
        # by token number; only the first prediction of a token counts
        self.logprobs: dict[int, float] = {}
        self.likeliest: dict[int, int] = {}

    def attach(self, bus: EventBus, sink_tokens: int) -> None:
        """Follow the cuts of the only conversation."""
        self._start = sink_tokens
        bus.subscribe(PromptTruncated, self._note_cut)

    def _note_cut(self, event: PromptTruncated) -> None:
        if event.dropped_tokens != self._distances[-1]:
            self._distances.append(event.dropped_tokens)

    @property
    def num_cuts(self) -> int:
        """The number of cuts so far. A cut that is repeated in a later turn counts once."""
        return len(self._distances) - 1

    @property
    def can_overlap(self) -> bool:
        return False

    def launch(self, step: Step) -> "_Watched":
        # pages are weighed before the cut is made
        distance = self._distances[-2:][0 if step.weighings else -1]
        place = step.positions + np.where(step.positions >= self._start, distance, 0)
        number = place + 1
        is_asked = (number >= self._first) & (number < len(self._text_ids))
        is_asked &= [int(n) not in self.logprobs for n in number]
        if is_asked.any():  # tokens that are read again at other positions are not scored
            is_asked &= bool((self._text_ids[place] == step.token_ids).all())
        rows = np.flatnonzero(is_asked).astype(np.int32)
        number = number[rows]
        step = replace(
            step,
            prompt_logprob_rows=rows,
            prompt_logprob_targets=self._text_ids[number],
            num_prompt_logprobs=np.ones(len(rows), np.int32),
        )
        if self._is_naive:
            step = replace(step, move_by=np.zeros_like(step.move_by))
        return _Watched(self, number, self._runner.launch(step))


@dataclass(frozen=True, slots=True)
class _Watched:
    runner: WatchedRunner
    numbers: Int32s
    handle: InFlight

    def wait(self) -> StepResult:
        result = self.handle.wait()
        for number, found in zip(self.numbers.tolist(), result.prompt_logprobs, strict=True):
            self.runner.logprobs[number] = found.logprob
            self.runner.likeliest[number] = found.top_ids[0]
        return replace(result, prompt_logprobs=())

    def has_ended(self) -> bool:
        return self.handle.has_ended()


def way_config(config: EngineConfig, way: OverflowWay) -> EngineConfig:
    """Return the config with pages for a few windows: for original pages and moved ones."""
    window = config.sched.max_model_len
    assert window is not None
    sched = replace(config.sched, sink_tokens=way.sink_tokens)
    cache = replace(config.cache, kv_tokens=config.cache.kv_tokens or 8 * window)
    return replace(config, sched=sched, cache=cache)
