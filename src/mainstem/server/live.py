"""Collects what the server is doing, for its page: totals, shared runs, the last requests."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from time import monotonic

from mainstem.core.json import Json
from mainstem.core.metrics import Counters
from mainstem.server.http.auth import Tenant
from mainstem.server.link.answering import OpenRequest
from mainstem.server.link.engine_client import EngineClient

NUM_RECENT = 20
RATE_S = 10.0  # the window over which tokens per second are counted


class RequestState(Enum):
    OPEN = "open"  # the page shows it as waiting or running
    FINISHED = "finished"
    ABORTED = "aborted"  # its client left
    FAILED = "failed"


@dataclass(slots=True)
class Record:
    """A request as the page shows it."""

    request_id: str
    tenant: Tenant
    app: str | None
    opened: OpenRequest
    state: RequestState = RequestState.OPEN

    def view(self, num_read: int | None) -> Json:
        """Return the object for the page. `num_read` is the number of prompt tokens computed so
        far; None: the last snapshot does not list the prompt as unfinished."""
        opened = self.opened
        state = self.state.value
        if self.state is RequestState.OPEN:
            state = "waiting" if opened.admitted_s is None else "running"
        first_s = opened.token_s[0] - opened.began_s if opened.token_s else None
        return {
            "id": self.request_id,
            "app": self.app,
            "prompt_tokens": len(opened.request.prompt_ids),
            "cached_tokens": opened.num_cached_tokens,
            "computed_tokens": self._num_read(num_read),
            "output_tokens": opened.num_output_tokens,
            "ttft_ms": None if first_s is None else round(first_s * 1e3, 1),
            "state": state,
        }

    def _num_read(self, num_read: int | None) -> int:
        """Return how many tokens of the prompt are computed, or are in the step that runs."""
        if self.opened.admitted_s is None:
            return 0
        if num_read is None or self.opened.token_s:
            return len(self.opened.request.prompt_ids)
        return num_read


class TokenRate:
    """Tokens per second over the last RATE_S seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, num_tokens: int) -> None:
        self._counts.append((monotonic(), num_tokens))
        self._total += num_tokens
        self._forget()

    def per_s(self) -> float:
        self._forget()
        return self._total / RATE_S

    def _forget(self) -> None:
        oldest_s = monotonic() - RATE_S
        while self._counts and self._counts[0][0] < oldest_s:
            self._total -= self._counts.popleft()[1]


class Live:
    """Collects data for the page. Used only on the event loop; events of the engine change
    `counters`."""

    def __init__(self, model: str, counters: Counters) -> None:
        self._model = model
        self._counters = counters
        self._began_s = monotonic()
        self._recent: deque[Record] = deque(maxlen=NUM_RECENT)
        self.rate = TokenRate()

    def begin(self, record: Record) -> None:
        self._recent.append(record)

    def view(self, engine: EngineClient, apps: list[str], tenant: Tenant) -> Json:
        """The object of `/live`; a tenant sees its own requests, an admin all."""
        counters, snapshot, step = self._counters, engine.snapshot, engine.step
        num_read = {prompt.request_id: prompt.num_computed for prompt in snapshot.prompts}
        recent = [
            record.view(num_read.get(record.opened.request.request_id))
            for record in self._recent
            if tenant.is_admin or record.tenant.name == tenant.name
        ]
        return {
            "model": self._model,
            "uptime_s": round(monotonic() - self._began_s, 1),
            "running": snapshot.num_running,
            "waiting": snapshot.num_waiting + engine.num_unheard,
            "step": None
            if step is None
            else {"tokens": step.num_tokens, "seconds": round(monotonic() - step.began_s, 1)},
            "pages": {
                "total": snapshot.num_pages,
                "held": snapshot.num_held_pages,
                "cached": snapshot.num_cached_pages,
                "host": snapshot.num_host_pages,
                "disk": snapshot.num_disk_pages,
                "page_size": snapshot.page_size,
            },
            "stems": [
                {
                    "id": stem.stem_id,
                    "parent": stem.parent_id,
                    "tokens": stem.num_tokens,
                    "sequences": stem.num_sequences,
                }
                for stem in snapshot.stems
            ],
            "totals": {
                "prompt_tokens": counters.prompt_tokens,
                "cached_tokens": counters.cached_tokens,
                "computed_tokens": counters.computed_tokens,
                "generated_tokens": counters.generated_tokens,
                "saving_ratio": counters.saving_ratio,
                "read_ratio": counters.read_ratio,
                "preemptions": counters.preemptions,
                "truncated_prompts": counters.truncated_prompts,
                "loaded_pages": dict(counters.loaded_pages),
            },
            "tokens_per_s": round(self.rate.per_s(), 2),
            "apps": apps,
            "recent": recent,
        }
