"""Counters derived from events."""

from dataclasses import dataclass

from mainstem.core.events import (
    EventBus,
    PagesEvicted,
    RequestSubmitted,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
)


@dataclass(slots=True)
class Counters:
    """Totals since the counters were attached to a bus."""

    requests: int = 0
    sequences_finished: int = 0
    prompt_tokens: int = 0  # of admitted sequences
    cached_tokens: int = 0  # of these, taken from pages that were there
    computed_tokens: int = 0  # tokens that went through the model in prefill
    decoded_tokens: int = 0  # tokens that went through the model one by one
    generated_tokens: int = 0  # of finished answers
    key_tokens_read: int = 0
    key_tokens_seen: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    steps: int = 0
    host_s: float = 0.0
    device_s: float = 0.0

    def attach(self, bus: EventBus) -> "Counters":
        bus.subscribe(RequestSubmitted, self._submitted)
        bus.subscribe(SequenceAdmitted, self._admitted)
        bus.subscribe(SequenceFinished, self._finished)
        bus.subscribe(SequencePreempted, self._preempted)
        bus.subscribe(PagesEvicted, self._evicted)
        bus.subscribe(StepFinished, self._stepped)
        return self

    @property
    def saving_ratio(self) -> float:
        """Share of prompt tokens that did not have to be computed (BatchLLM Eq. 2)."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def read_ratio(self) -> float:
        """Keys read over keys seen: 1.0 when nothing is shared within a step."""
        return self.key_tokens_read / self.key_tokens_seen if self.key_tokens_seen else 1.0

    def _submitted(self, event: RequestSubmitted) -> None:
        self.requests += 1

    def _admitted(self, event: SequenceAdmitted) -> None:
        self.prompt_tokens += event.prompt_tokens
        self.cached_tokens += event.cached_tokens

    def _finished(self, event: SequenceFinished) -> None:
        self.sequences_finished += 1
        self.generated_tokens += event.output_tokens

    def _preempted(self, event: SequencePreempted) -> None:
        self.preemptions += 1

    def _evicted(self, event: PagesEvicted) -> None:
        self.evicted_pages += event.num_pages

    def _stepped(self, event: StepFinished) -> None:
        self.steps += 1
        self.computed_tokens += event.num_prompt_tokens
        self.decoded_tokens += event.num_tokens - event.num_prompt_tokens
        self.key_tokens_read += event.key_tokens_read
        self.key_tokens_seen += event.key_tokens_seen
        self.host_s += event.host_s
        self.device_s += event.device_s
