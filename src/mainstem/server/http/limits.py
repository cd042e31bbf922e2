"""Limits for clients: sizes, times, and requests in progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from mainstem.core.errors import ConfigError
from mainstem.server.http.auth import Tenant
from mainstem.server.http.faults import ApiError, busy
from mainstem.wire.calls import BodyLimits


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may send, keep and have in progress, and how long they may take."""

    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
    header_s: float = 10.0  # from the first byte, or the connection, to the end of the headers
    body_s: float = 30.0  # from the headers to the end of the body
    # an idle connection; proxies keep theirs for 60 s and should be the first to close
    idle_s: int = 75
    upload_bytes: int = 256 << 20  # a file sent to /v1/files
    message_batch_bytes: int = 64 << 20  # a body sent to /v1/messages/batches
    upload_s: float = 3600.0  # for the whole upload; each piece must arrive within `body_s`
    stored_bytes: int = 4 << 30  # all files of a key, including the answers of its batches
    stored_files: int = 10_000  # of a key; even a small file needs an entry in a folder
    file_ttl_s: float = 30 * 86_400.0  # counted from a file's creation, and from a batch's end
    open_batches: int = 32  # batches of a key that have not ended
    kept_batches: int = 10_000  # of a key; above this, old batches without files are removed
    write_s: float = 60.0  # a stream's client that reads nothing for this long is disconnected
    max_depth: int = 32  # nesting of JSON
    body: BodyLimits = field(default_factory=BodyLimits)
    response_ttl_s: float = 30 * 86_400.0  # counted from a response's last use
    # responses of all keys; above this, the key with the most loses its least recently used one
    kept_responses: int = 10_000
    # bytes of all kept responses with their inputs; above this, the key with the most loses one
    response_bytes: int = 256 << 20
    open_answers: int = 2048  # running and waiting, of all clients; above this, 429
    pinned_share: float = 0.25  # share of the device's pages that a key may keep by `cache_control`
    weights_bytes: int = 16 << 30  # tensors sent to /admin/weights
    requests_per_minute: int | None = None  # per key
    open_requests: int | None = None  # per key

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if self.pinned_share > 1:
            raise ConfigError(f"pinned_share must be at most 1, got {self.pinned_share}")


@dataclass(slots=True)
class _Use:
    """What one tenant has in progress, and the requests it may still start."""

    tokens: float  # of a token bucket: each is a request that may start now
    refilled_s: float
    open_requests: int = 0


@dataclass(slots=True)
class RequestGate:
    """Counts requests as they begin and end. Used only on the event loop."""

    limits: ServerLimits
    clock: Callable[[], float] = monotonic
    open_answers: int = 0
    _uses: dict[str, _Use] = field(default_factory=dict)

    def allow(self, tenant: Tenant) -> None:
        """Count a request in the tenant's rate, or raise ApiError 429."""
        rate = self.limits.requests_per_minute
        if rate is None:
            return
        use = self._use(tenant)
        now_s = self.clock()
        use.tokens = min(float(rate), use.tokens + (now_s - use.refilled_s) * rate / 60.0)
        use.refilled_s = now_s
        if use.tokens < 1.0:
            wait_s = ceil((1.0 - use.tokens) * 60.0 / rate)
            raise busy(f"this key may send at most {rate} requests per minute", wait_s)
        use.tokens -= 1.0

    @contextmanager
    def enter(self, tenant: Tenant, num_answers: int) -> Iterator[None]:
        """Reserve places for a request's answers; raises ApiError 429 if too few are free, 400 if
        there can never be enough."""
        use, limits = self._use(tenant), self.limits
        if num_answers > limits.open_answers:
            message = f"{num_answers} answers (prompts times n) are more than the server's queue"
            reason = f"{message} takes: {limits.open_answers} (--max-queue); send fewer at a time"
            raise ApiError(400, reason, "n", "invalid_value")
        if limits.open_requests is not None and use.open_requests >= limits.open_requests:
            raise busy(f"this key may have at most {limits.open_requests} requests open", 1)
        if self.open_answers + num_answers > limits.open_answers:
            raise busy("the queue is full", 1 + self.open_answers // 256)
        use.open_requests += 1
        self.open_answers += num_answers
        try:
            yield
        finally:
            use.open_requests -= 1
            self.open_answers -= num_answers

    def _use(self, tenant: Tenant) -> _Use:
        use = self._uses.get(tenant.name)
        if use is None:
            rate = self.limits.requests_per_minute or 0
            use = self._uses[tenant.name] = _Use(float(rate), self.clock())
        return use

    def check(self) -> None:
        """Raise if a place was lost; called when nothing is in progress."""
        assert self.open_answers == 0, "an answer still holds a place"
        assert all(use.open_requests == 0 for use in self._uses.values()), "a request is open"
