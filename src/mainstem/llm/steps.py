"""The engine's steps, which a call and open streams share."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from mainstem.core.ids import RequestId
from mainstem.core.plan import Prompts
from mainstem.core.request import Output, Request
from mainstem.core.step import Int32s
from mainstem.plan.order import shared_with_next
from mainstem.plan.planner import plan_prompts
from mainstem.text.text_engine import TextEngine

Submit = Callable[[RequestId, int | None], bool]  # gets the plan place; False: it was refused
# gets a step's outputs, returns how many prompts ended; raises if the LLM was closed meanwhile
Hear = Callable[[list[Output]], int]


class Bar(Protocol):
    """What shows how many prompts have ended: a bar of tqdm, say."""

    def reset(self, total: int) -> object: ...
    def update(self, n: int) -> object: ...


class SharedSteps:
    """Advances the engine: outputs of streams wait for their readers, a call gets the others."""

    def __init__(self, text_engine: TextEngine, shares: bool) -> None:
        """`shares`: prompts of a call are ordered so that those with a common prefix are
        neighbours."""
        self._text_engine = text_engine
        self._shares = shares
        self._streams: dict[str, deque[Output]] = {}  # outputs not read yet, by request
        self._abandoned: deque[str] = deque()  # streams that are no longer read

    @property
    def is_idle(self) -> bool:
        return not (self._text_engine.has_work or self._streams or self._abandoned)

    def open_stream(self, request: Request) -> deque[Output]:
        """Submit a request; its outputs will be in the queue that is returned."""
        outputs = self._streams[request.request_id] = deque[Output]()
        self._text_engine.submit(request)
        return outputs

    def leave_stream(self, request_id: str) -> None:
        """Note that a stream is no longer read; the next step ends it. Safe on any thread."""
        self._abandoned.append(request_id)

    def step(self) -> list[Output]:
        """Advance the engine by one step. Returns the outputs that are not of streams."""
        self._end_abandoned()
        outputs = self._text_engine.step()
        if not self._streams:
            return outputs
        rest: list[Output] = []
        for output in outputs:
            self._streams.get(output.request_id, rest).append(output)
        return rest

    def settle(self) -> None:
        """Run the engine until it is idle, unless streams are open."""
        self._end_abandoned()
        while self._text_engine.has_work and not self._streams:
            self.step()

    def run(
        self, prompts: Mapping[RequestId, Int32s], submit: Submit, hear: Hear, bar: Bar
    ) -> None:
        """Submit the prompts of a call in the order to run, and step until all have ended. After
        an error or Ctrl-C none of them runs on."""
        running: set[RequestId] = set()
        try:
            for request_id, place in self._order(prompts):
                running.add(request_id)
                if not submit(request_id, place):
                    running.remove(request_id)
            bar.reset(len(running))
            num_open = len(running)
            while self._text_engine.has_work and (num_open or not self._streams):
                # a call that was interrupted may have left outputs
                num_ended = hear([each for each in self.step() if each.request_id in running])
                num_open -= num_ended
                bar.update(num_ended)
        except BaseException:
            for request_id in running:
                self._text_engine.abort(request_id)
            self.settle()
            raise

    def _end_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._streams.pop(request_id, None)
            self._text_engine.abort(request_id)

    def _order(self, prompts: Mapping[RequestId, Int32s]) -> list[tuple[RequestId, int | None]]:
        """Return the prompts in the order to run, with their plan places. Without sharing, the
        order is the given one, without places."""
        names = [*prompts]
        if not self._shares or len(names) < 2:
            return [(name, None) for name in names]
        starts = np.zeros(len(names) + 1, np.int64)
        np.cumsum([len(ids) for ids in prompts.values()], out=starts[1:])
        plan = plan_prompts(Prompts(np.concatenate([*prompts.values()]), starts))
        first = self._text_engine.engine.expect(shared_with_next(plan))
        return [(names[row], first + place) for place, row in enumerate(plan.members.tolist())]
