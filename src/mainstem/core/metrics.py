"""Counters derived from events."""

from collections import defaultdict
from dataclasses import dataclass, field

from mainstem.core.events import (
    EventBus,
    PagesEvicted,
    PagesLoaded,
    PagesLost,
    PagesMoved,
    PagesPrefetched,
    PagesSaved,
    PromptTruncated,
    RequestSubmitted,
    SavesSkipped,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    SequenceResumed,
    StatesEvicted,
    StatesRefused,
    StepFailed,
    StepFinished,
    StoreOpened,
    WindowsLost,
)


@dataclass(slots=True)
class Counters:
    """Totals since the counters were attached to a bus."""

    requests: int = 0
    sequences_finished: int = 0
    prompt_tokens: int = 0  # of admitted sequences
    cached_tokens: int = 0  # prompt tokens that were found in cached pages
    computed_tokens: int = 0  # tokens that went through the model in prefill
    decoded_tokens: int = 0  # tokens that went through the model one by one
    recomputed_tokens: int = 0  # after preemptions
    generated_tokens: int = 0  # of finished answers
    key_tokens_read: int = 0
    key_tokens_seen: int = 0
    key_tokens_saved: int = 0  # keys that were not read again, because readers share a span
    preemptions: int = 0
    evicted_pages: int = 0  # from the device
    # tiers below the device, by name: host, disk, remote
    loaded_pages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    saved_pages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dropped_pages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unsaved_pages: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason
    lost_pages: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason
    evicted_states: int = 0  # of recurrent layers, from the device
    refused_states: int = 0  # times that no slot was free for one
    damaged_stores: int = 0  # disk stores in which something was wrong when they were opened
    prefetched_pages: int = 0
    truncated_prompts: int = 0
    dropped_tokens: int = 0  # of truncated prompts
    moved_pages: int = 0  # kept through a truncation
    lost_window_tokens: int = 0  # computed again, because windowed parts of pages were gone
    steps: int = 0
    spans: int = 0  # of all steps
    failed_steps: int = 0
    host_s: float = 0.0
    device_s: float = 0.0

    def attach(self, bus: EventBus) -> "Counters":
        bus.subscribe(RequestSubmitted, self._submitted)
        bus.subscribe(SequenceAdmitted, self._admitted)
        bus.subscribe(SequenceFinished, self._finished)
        bus.subscribe(SequencePreempted, self._preempted)
        bus.subscribe(SequenceResumed, self._resumed)
        bus.subscribe(PagesEvicted, self._evicted)
        bus.subscribe(PagesLoaded, self._loaded)
        bus.subscribe(PagesSaved, self._saved)
        bus.subscribe(SavesSkipped, self._skipped)
        bus.subscribe(PagesLost, self._lost)
        bus.subscribe(StatesEvicted, self._states_evicted)
        bus.subscribe(StatesRefused, self._states_refused)
        bus.subscribe(StoreOpened, self._opened)
        bus.subscribe(PagesPrefetched, self._prefetched)
        bus.subscribe(PromptTruncated, self._truncated)
        bus.subscribe(PagesMoved, self._moved)
        bus.subscribe(WindowsLost, self._lost_windows)
        bus.subscribe(StepFinished, self._stepped)
        bus.subscribe(StepFailed, self._failed)
        return self

    @property
    def saving_ratio(self) -> float:
        """Share of prompt tokens that did not have to be computed (BatchLLM Eq. 2)."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def read_ratio(self) -> float:
        """Keys read / keys seen: 1.0 if nothing is shared within a step."""
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

    def _resumed(self, event: SequenceResumed) -> None:
        self.recomputed_tokens += event.computed_tokens

    def _evicted(self, event: PagesEvicted) -> None:
        if event.tier == "device":
            self.evicted_pages += event.num_pages
        else:
            self.dropped_pages[event.tier] += event.num_pages

    def _loaded(self, event: PagesLoaded) -> None:
        self.loaded_pages[event.tier] += event.num_pages

    def _saved(self, event: PagesSaved) -> None:
        self.saved_pages[event.tier] += event.num_pages

    def _skipped(self, event: SavesSkipped) -> None:
        self.unsaved_pages[event.reason] += event.num_pages

    def _lost(self, event: PagesLost) -> None:
        self.lost_pages[event.reason] += event.num_pages

    def _states_evicted(self, event: StatesEvicted) -> None:
        self.evicted_states += event.num_states

    def _states_refused(self, event: StatesRefused) -> None:
        self.refused_states += event.num_states

    def _opened(self, event: StoreOpened) -> None:
        self.damaged_stores += event.found is not None
        for reason, count in event.lost.items():
            self.lost_pages[reason] += count

    def _prefetched(self, event: PagesPrefetched) -> None:
        self.prefetched_pages += event.num_pages

    def _truncated(self, event: PromptTruncated) -> None:
        self.truncated_prompts += 1
        self.dropped_tokens += event.dropped_tokens

    def _moved(self, event: PagesMoved) -> None:
        self.moved_pages += event.num_pages

    def _lost_windows(self, event: WindowsLost) -> None:
        self.lost_window_tokens += event.num_tokens

    def _failed(self, event: StepFailed) -> None:
        self.failed_steps += 1

    def _stepped(self, event: StepFinished) -> None:
        self.steps += 1
        self.spans += event.num_spans
        self.computed_tokens += event.num_prompt_tokens
        self.decoded_tokens += event.num_tokens - event.num_prompt_tokens
        self.key_tokens_read += event.key_tokens_read
        self.key_tokens_seen += event.key_tokens_seen
        self.key_tokens_saved += max(0, event.key_tokens_seen - event.key_tokens_read)
        self.host_s += event.host_s
        self.device_s += event.device_s
