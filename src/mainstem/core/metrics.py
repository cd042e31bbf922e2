"""Counters derived from events."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from mainstem.core import events

# counters by the events that add to them: a field of the event, or 1 for each event (None)
_SUMS: dict[type[Any], dict[str, str | None]] = {
    events.RequestSubmitted: {"requests": None},
    events.SequenceAdmitted: {"prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens"},
    events.SequenceFinished: {"sequences_finished": None, "generated_tokens": "output_tokens"},
    events.SequencePreempted: {"preemptions": None},
    events.SequenceResumed: {"recomputed_tokens": "computed_tokens"},
    events.StatesEvicted: {"evicted_states": "num_states"},
    events.StatesRefused: {"refused_states": "num_states"},
    events.PagesPrefetched: {"prefetched_pages": "num_pages"},
    events.PromptTruncated: {"truncated_prompts": None, "dropped_tokens": "dropped_tokens"},
    events.PagesMoved: {"moved_pages": "num_pages"},
    events.WindowsLost: {"lost_window_tokens": "num_tokens"},
    events.StepFailed: {"failed_steps": None},
}
# counters of pages, and the field of the event that they are counted by
_SUMS_BY: dict[type[Any], tuple[str, str]] = {
    events.PagesLoaded: ("loaded_pages", "tier"),
    events.PagesSaved: ("saved_pages", "tier"),
    events.SavesSkipped: ("unsaved_pages", "reason"),
    events.PagesLost: ("lost_pages", "reason"),
}


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
    states_read: int = 0  # of recurrent layers; once for sequences that read one together
    states_saved: int = 0  # that were not read again, because siblings read one together
    rows_folded: int = 0  # tokens that siblings kept beside a state until they wrote their own
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

    def attach(self, bus: events.EventBus) -> "Counters":
        for kind in _SUMS:
            bus.subscribe(kind, self._add)
        for kind in _SUMS_BY:
            bus.subscribe(kind, self._add_by)
        bus.subscribe(events.PagesEvicted, self._evicted)
        bus.subscribe(events.StoreOpened, self._opened)
        bus.subscribe(events.StepFinished, self._stepped)
        return self

    @property
    def saving_ratio(self) -> float:
        """Share of prompt tokens that did not have to be computed (BatchLLM Eq. 2)."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def read_ratio(self) -> float:
        """Keys read / keys seen: 1.0 if nothing is shared within a step."""
        return self.key_tokens_read / self.key_tokens_seen if self.key_tokens_seen else 1.0

    def _add(self, event: events.Event) -> None:
        for name, field_name in _SUMS[type(event)].items():
            added = 1 if field_name is None else getattr(event, field_name)
            setattr(self, name, getattr(self, name) + added)

    def _add_by(self, event: Any) -> None:
        name, key = _SUMS_BY[type(event)]
        getattr(self, name)[getattr(event, key)] += event.num_pages

    def _evicted(self, event: events.PagesEvicted) -> None:
        if event.tier == "device":
            self.evicted_pages += event.num_pages
        else:
            self.dropped_pages[event.tier] += event.num_pages

    def _opened(self, event: events.StoreOpened) -> None:
        self.damaged_stores += event.found is not None
        for reason, count in event.lost.items():
            self.lost_pages[reason] += count

    def _stepped(self, event: events.StepFinished) -> None:
        self.steps += 1
        self.spans += event.num_spans
        self.computed_tokens += event.num_prompt_tokens
        self.decoded_tokens += event.num_tokens - event.num_prompt_tokens
        self.key_tokens_read += event.key_tokens_read
        self.key_tokens_seen += event.key_tokens_seen
        self.key_tokens_saved += max(0, event.key_tokens_seen - event.key_tokens_read)
        self.states_read += event.states_read
        self.states_saved += event.states_saved
        self.rows_folded += event.rows_folded
        self.host_s += event.host_s
        self.device_s += event.device_s
