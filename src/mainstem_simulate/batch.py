"""Requests that run together in the simulator, step by step.

    prompts   computed in the order they came, up to `chunk_tokens` a step with all answers' tokens
    answers   one token of each in every step

A request's last chunk of prompt has its first token.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from mainstem_simulate.service import Batching, ServiceRates


@dataclass(slots=True)
class Running:
    """A request that was started."""

    ticket: int
    arrived_s: float
    started_s: float
    context_tokens: int  # of the prompt
    new_tokens: int  # of the prompt, still to compute
    output_tokens: int
    is_counted: bool


@dataclass(slots=True)
class Batch:
    """What the next steps compute."""

    batching: Batching
    rates: ServiceRates
    _prompts: deque[Running] = field(default_factory=deque)
    _answers: list[tuple[int, int, Running]] = field(default_factory=list)  # a heap: the last step
    _context_tokens: int = 0  # of all answers
    num_steps: int = 0

    def __bool__(self) -> bool:
        return bool(self._prompts or self._answers)

    def add(self, request: Running) -> None:
        self._prompts.append(request)

    def answering(self) -> list[int]:
        """The tickets of those that have answers."""
        return [ticket for _, ticket, _ in self._answers]

    def step(self) -> tuple[float, list[Running], list[Running]]:
        """Make a step. Returns its seconds, the requests whose first token it has, and those whose
        last it has."""
        first, last = list[Running](), list[Running]()
        num_tokens = self._compute_prompts(first) if self._prompts else 0
        seconds = self.batching.step_s(len(self._answers), self._context_tokens)
        seconds += self.batching.prompts_s(num_tokens, self.rates)
        self.num_steps += 1
        self._context_tokens += len(self._answers)
        while self._answers and self._answers[0][0] == self.num_steps:
            request = heappop(self._answers)[-1]
            self._context_tokens -= request.context_tokens + request.output_tokens
            last.append(request)
        for request in first:
            if request.output_tokens <= 1:
                last.append(request)
                continue
            self._context_tokens += request.context_tokens + 1
            end = self.num_steps + request.output_tokens - 1
            heappush(self._answers, (end, request.ticket, request))
        return seconds, first, last

    def _compute_prompts(self, first: list[Running]) -> int:
        """Compute the next tokens of prompts; returns how many. Adds prompts that end to
        `first`."""
        budget = left = max(1, self.batching.chunk_tokens - len(self._answers))
        while self._prompts and left:
            request = self._prompts[0]
            size = min(left, request.new_tokens)
            request.new_tokens -= size
            left -= size
            if not request.new_tokens:
                first.append(self._prompts.popleft())
        return budget - left
