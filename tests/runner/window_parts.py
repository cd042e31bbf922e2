"""A runner that keeps the windowed parts of pages in places of their own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mainstem.core.request import SamplingParams
from mainstem.core.step import InFlight, Int32s, Runner, Step
from mainstem.engine.engine import Engine
from mainstem.kernels.attention.window import clip_spans
from tests.builders import a_request, run_all

PAGE = 16
PartsOf = Callable[[Step], Int32s]  # Step.window_parts of a step


class PartedRunner:
    """Adds `window_parts` to every step."""

    def __init__(self, runner: Runner, parts_of: PartsOf) -> None:
        self._runner, self._parts_of = runner, parts_of

    @property
    def can_overlap(self) -> bool:
        return self._runner.can_overlap

    def launch(self, step: Step) -> InFlight:
        return self._runner.launch(replace(step, window_parts=self._parts_of(step)))

    def drain(self) -> None:
        self._runner.drain()

    def check(self) -> None:
        self._runner.check()

    def close(self) -> None:
        self._runner.close()


def anywhere(num_pages: int, num_parts: int) -> PartsOf:
    """Every page has a part, at some place of a larger pool."""
    parts = np.random.default_rng(1).permutation(num_parts)[:num_pages].astype(np.int32)
    return lambda _: parts


class LastWindow:
    """Only pages that the window of some token sees have a part; `num_parts` are enough. Works for
    one sequence after the other, if they share nothing."""

    def __init__(self, num_pages: int, num_parts: int, window: int) -> None:
        self._num_parts = num_parts
        self._parts = np.full(num_pages, num_parts, np.int32)
        self._free = set(range(num_parts))
        self._window = window
        self.num_given_back = 0

    def __call__(self, step: Step) -> Int32s:
        clipped = clip_spans(step.spans, step.positions, self._window, PAGE)
        written = np.unique(step.write_slots // PAGE)
        needed = np.union1d(clipped.page_ids, written)
        lost = np.setdiff1d(np.flatnonzero(self._parts < self._num_parts), needed)
        for page in lost.tolist():
            self._free.add(int(self._parts[page]))
            self._parts[page] = self._num_parts
            self.num_given_back += 1
        for page in np.setdiff1d(written, np.flatnonzero(self._parts < self._num_parts)).tolist():
            self._parts[page] = self._free.pop()
        assert (self._parts[needed] < self._num_parts).all(), "a page lost its part too early"
        return self._parts.copy()


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The greedy answers, each to a request that shares nothing and runs alone."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    answers = []
    for number, ids in enumerate(prompts):
        request = a_request(ids, name=str(number), salt=b"%d" % number, sampling=sampling)
        outputs = run_all(engine, [request]).outputs
        answers.append([token for output in outputs for token in output.token_ids])
    return answers
