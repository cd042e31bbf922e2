"""Events as typed records. Metrics, progress bars, logs and tests subscribe to them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from mainstem.core.ids import PageKey, RequestId
from mainstem.core.request import FinishReason, Overflow


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    request_id: RequestId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceAdmitted:
    """A sequence got its pages; `cached_tokens` of its prompt need not be computed."""

    request_id: RequestId
    index: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceResumed:
    """A preempted sequence is back; `computed_tokens` of it must be computed again."""

    request_id: RequestId
    index: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """A sequence gave its pages back and waits again: pages ran out, or a step failed. When it
    resumes, pages of it that are still cached need not be computed again."""

    request_id: RequestId
    index: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    request_id: RequestId
    index: int
    reason: FinishReason
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PromptTruncated:
    """A prompt and room for its answer did not fit into the context window: the prompt was cut.
    `policy` says what happens to its KV."""

    request_id: RequestId
    policy: Overflow
    dropped_tokens: int
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class PagesMoved:
    """Pages kept through a truncation are rotated to their new positions."""

    request_id: RequestId
    num_pages: int


@dataclass(frozen=True, slots=True)
class WindowsLost:
    """A sequence computes cached tokens again, because the windowed parts of their pages had to
    make room."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PagesEvicted:
    """Cached pages that no sequence held were evicted. Reasons: `room`, `clear`, `ttl`."""

    num_pages: int
    reason: str
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class PagesSaved:
    """Pages are in a lower tier: `host`, or `disk` and `remote`, where they outlive the process."""

    num_pages: int
    tier: str


@dataclass(frozen=True, slots=True)
class SavesSkipped:
    """Pages were not copied to a lower tier; if they have no other copy, later requests compute
    them again."""

    num_pages: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class PagesLoaded:
    """Pages a request waits for were loaded from `tier`, `seconds` after the load began. If a load
    came from several tiers, only the event of the slowest has its seconds; the others have 0."""

    num_pages: int
    tier: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PagesPrefetched:
    """Pages that waiting requests will need were read from disk, or from a shared server, into host
    memory."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class PagesLost:
    """A tier lost or damaged pages. Reasons: `checksum`, `truncated`, `missing`, `tokens`, or an
    error of the disk (`EIO`). The pages are computed again when a request needs them."""

    num_pages: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """A disk store was opened with `num_pages`; `found` says what was wrong with it. `lost` says
    how many pages were lost, if known, by reason: `index`, `emptied`, `missing`, `truncated`. Later
    subscribers get this event, too, because it happens before an engine has subscribers."""

    folder: str
    num_pages: int
    found: str | None = None
    lost: Mapping[str, int] = field(default_factory=dict)

    @property
    def words(self) -> str | None:
        """A sentence to show to users; None: nothing was wrong."""
        if self.found is None:
            return None
        num_lost = sum(self.lost.values())
        lost = f"has lost {num_lost:,} pages" if num_lost else "may have lost pages"
        return (
            f"the KV store in {self.folder} {lost}: {self.found}. {self.num_pages:,} are left; "
            "what is lost is computed again"
        )


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A forward pass is about to be launched. On a CPU it may take seconds."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A forward pass has ended. `key_tokens_read` counts the keys that were read; `key_tokens_seen`
    counts the keys that would be read if every sequence read its whole context by itself. For
    states of recurrent layers, see StateUse.count_reads."""

    num_tokens: int
    num_prompt_tokens: int
    num_seqs: int
    num_spans: int
    key_tokens_read: int
    key_tokens_seen: int
    host_s: float
    device_s: float
    states_read: int = 0
    states_saved: int = 0
    rows_folded: int = 0


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step of `num_seqs` sequences failed. All sequences wait again, and the device's cache is
    empty."""

    fault: str
    num_seqs: int


@dataclass(frozen=True, slots=True)
class StepsResized:
    """From now on steps have at most `num_tokens` tokens: fewer after a step that did not fit the
    device, more again after many steps that did."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class StatesEvicted:
    """Kept states of recurrent layers left the device, because others needed their slots."""

    num_states: int


@dataclass(frozen=True, slots=True)
class StatesRefused:
    """How often since the last step no slot was free: for a state that should have been kept, or
    for a sequence that could have started otherwise."""

    num_states: int


Event = (
    RequestSubmitted
    | SequenceAdmitted
    | SequenceResumed
    | SequencePreempted
    | SequenceFinished
    | PromptTruncated
    | PagesMoved
    | WindowsLost
    | PagesEvicted
    | PagesSaved
    | SavesSkipped
    | PagesLoaded
    | PagesPrefetched
    | PagesLost
    | StatesEvicted
    | StatesRefused
    | StoreOpened
    | StepStarted
    | StepFinished
    | StepFailed
    | StepsResized
)


@dataclass(frozen=True, slots=True)
class PagesStored:
    """From now on pages can be found in `tier` (`device`, `host`, `disk`).

    A page has a parent, the page before it, or none if it is the first of a prompt. For pages that
    an earlier process left on disk, parent and tokens are not known: None and empty.
    """

    tier: str
    keys: Sequence[PageKey]
    parents: Sequence[PageKey | None]
    token_ids: Sequence[bytes]  # int32


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages can no longer be found in `tier`."""

    tier: str
    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """No page can be found in any tier."""


PageEvent = PagesStored | PagesRemoved | PagesCleared  # built only if there is a listener
E = TypeVar("E", bound=Event | PageEvent)


class EventBus:
    """Delivers events to the subscribers of their kind, in order, on the publishing thread.
    StoreOpened is also delivered to those that subscribe after it was published."""

    def __init__(self) -> None:
        self._listeners: dict[type, list[Callable[[Event | PageEvent], None]]] = defaultdict(list)
        self._openings: list[StoreOpened] = []

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        self._listeners[kind].append(listener)  # type: ignore[arg-type]  # only its own kind comes
        for event in self._openings:
            if isinstance(event, kind):
                listener(event)

    @contextmanager
    def guests(self) -> Iterator[None]:
        """Listeners that subscribe within the block leave at its end."""
        before = {kind: len(listeners) for kind, listeners in self._listeners.items()}
        try:
            yield
        finally:
            for kind, listeners in self._listeners.items():
                del listeners[before.get(kind, 0) :]

    def has_listeners(self, kind: type[Event | PageEvent]) -> bool:
        """Whether anybody listens to this kind of event; if not, a hot path need not build it."""
        return bool(self._listeners.get(kind))

    def publish(self, event: Event | PageEvent) -> None:
        if isinstance(event, StoreOpened):
            self._openings.append(event)
        for listener in self._listeners.get(type(event), ()):
            listener(event)
