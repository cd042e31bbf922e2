"""RemoteTier: pages on a Redis or Valkey server that several processes share.

    engine thread      asking thread        writing thread           reading threads
    ask(keys) -------> EXISTS ... ---.
    write(job) ---------------------- | --> sign, SET ... PX ---.
    read(jobs) ---------------------- | ----------------------- | --> GET ..., compare the signature
    poll() <--------------------------+-------------------------+---------------'

Each thread has its own line (kv/bytes/line.py), so a question does not wait for pages being
sent. Commands are pipelined, so a hundred pages cost one round trip. A value is

    format | BLAKE2b(secret; name, what follows) | length | token ids | page, layer by layer

and its name is BLAKE2b(secret; model identity, page's key): a page is accepted only if its writer
knew the secret, wrote it under this name, and had the same model. After an error,
pages are computed instead. A server that hangs or cannot be reached is not called for a while. A
full server gets no writes. Closing waits a limited time for a slow server.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest
from logging import getLogger
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic, perf_counter
from typing import Generic, TypeVar

from mainstem.core.errors import StoreError
from mainstem.core.ids import PageKey
from mainstem.kv.bytes.line import (
    Address,
    BadCredentials,
    Command,
    LineError,
    Overdue,
    RemoteLine,
    RemoteRefusal,
    Reply,
)
from mainstem.kv.tier import Answer, Emptied, FoundPage, Read, ReadJob, WriteJob, Written
from mainstem.kv.transfer import DistantLink

FORMAT = b"mainstem remote page 1"
NAME_BYTES = 24
TAG_BYTES = 32
NUM_READERS = 4
WRITE_BATCH = 8  # pages sent together
FIRST_RATE = 250e6  # bytes a second, until a read has been measured
WRITE_LIMIT_S = 10.0  # long, since no request waits for writes
ASK_LIMIT_S = 1.0
PAUSE_S = 1.0  # no calls for this long after a failure; doubled after each further failure
MAX_PAUSE_S = 30.0  # the longest such pause
FULL_PAUSE_S = 30.0  # no writes for this long after the server was full or refused pages
CLOSE_LIMIT_S = 10.0  # sending stops this long after closing began
CHECK_S = 5.0  # between checks of how much memory the server uses

# why a server refused a page: few kinds, since each is reported and counted separately
FULL = "server full"
CLUSTER = "clusters are not supported"
REFUSED = "server refuses"
CLUSTER_KINDS = {"MovedError", "AskError", "TryAgainError", "ClusterDownError"}

log = getLogger("mainstem.store")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The model and secret of the pages, how long they are kept, and the server's size."""

    identity: bytes  # identity of the model
    secret: bytes = field(repr=False)
    ttl_s: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class _Reads:
    jobs: deque[ReadJob]  # whose outcome is not reported yet
    due_s: float


@dataclass(frozen=True, slots=True)
class _Writes:
    jobs: deque[WriteJob]  # whose outcome is not reported yet


@dataclass(frozen=True, slots=True)
class _Down:
    words: str


@dataclass(frozen=True, slots=True)
class _RoundTrip:
    seconds: float


class _NotOpen(LineError):
    """The server failed a moment ago and is not called for a while."""


class _Worker(Generic[T]):
    """A thread with its own line, for orders of one kind. If an order fails for any reason,
    `give_up` reports it and the thread continues."""

    def __init__(
        self,
        name: str,
        line: RemoteLine,
        work: Callable[[RemoteLine, T], None],
        give_up: Callable[[T], None],
        tell_down: Callable[[str], None],
        *,
        fails_if_late: bool = True,
    ) -> None:
        self.line = line
        self._fails_if_late = fails_if_late  # whether an overdue call is a failure
        self._orders: SimpleQueue[T | Event | None] = SimpleQueue()
        self._work, self._give_up, self._report_down = work, give_up, tell_down
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, order: T) -> None:
        self._orders.put(order)

    def take_more(self) -> T | None:
        """Return the next order if there is one. Used by work that takes several orders at once."""
        with suppress(Empty):
            order = self._orders.get_nowait()
            if not isinstance(order, Event) and order is not None:
                return order
            self._orders.put(order)
        return None

    def flush(self) -> None:
        """Return when every order so far is done or has failed."""
        done = Event()
        self._orders.put(done)
        while not done.wait(0.05):
            self.line.cut_if_overdue()

    def close(self) -> None:
        self._orders.put(None)
        while self._thread.is_alive():
            self._thread.join(0.05)
            self.line.cut_if_overdue()
        self.line.close()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, Event):
                order.set()
                continue
            try:
                self._work(self.line, order)
            except Exception as error:  # report any error: a request may wait for the outcome
                self.line.close()
                is_late = isinstance(error, Overdue) and not self._fails_if_late
                if not is_late and not isinstance(error, _NotOpen):
                    self._report_down(str(error) if isinstance(error, LineError) else repr(error))
                self._give_up(order)


class RemoteTier:
    """One thread owns the tier and makes all calls; the drawing above shows all threads."""

    name = "remote"
    is_shared = True

    def __init__(self, address: Address, page_bytes: int, settings: RemoteSettings) -> None:
        """Connect. If the server cannot be reached, this is logged and tried again later. Raises
        StoreError if the server refuses the credentials, ConfigError for an invalid address."""
        self._shown = address.shown
        self._page_bytes = page_bytes
        self._settings = settings
        self._secret = blake2b(settings.secret, digest_size=32, person=b"mainstem remote").digest()
        self._prefix = b"mainstem:" + self._digest(NAME_BYTES, settings.identity)[:8].hex().encode()
        self.num_places = max(1, settings.max_bytes // page_bytes)
        self.link = DistantLink(FIRST_RATE)
        self.num_writes_pending = 0  # whose outcome `poll` has not returned
        self._num_reads = 0
        self._next_reader = 0
        self._down_until_s = self._full_until_s = 0.0
        self._end_s = float("inf")  # nothing is sent after this time
        self._pause_s = PAUSE_S
        self._is_down = False  # True: the server failed, and the log says so
        self._last_down_s = 0.0
        self._has_told_refusal = False
        self._check_s = 0.0  # when the writing thread next checks the server's memory
        self._done: SimpleQueue[Written | Read | Answer | _Down | _RoundTrip] = SimpleQueue()
        self._greet(RemoteLine(address))
        self._asker: _Worker[Sequence[PageKey]] = _Worker(
            "kv-remote-ask",
            RemoteLine(address),
            self._ask,
            self._give_up_question,
            self._report_down,
        )
        self._writer: _Worker[_Writes | dict[PageKey, float]] = _Worker(
            "kv-remote-write",
            RemoteLine(address),
            self._write,
            self._give_up_writes,
            self._report_down,
        )
        self._readers: list[_Worker[_Reads]] = [
            _Worker(
                "kv-remote-read",
                RemoteLine(address),
                self._read,
                self._give_up_reads,
                self._report_down,
                fails_if_late=False,
            )
            for _ in range(NUM_READERS)
        ]

    # --- the owner's calls ----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the server may be called: the pause after the last failure is over, and the time
        limit for closing has not passed."""
        return self._down_until_s <= monotonic() < self._end_s

    @property
    def can_write(self) -> bool:
        """Whether the server is up and not full. Unlike a disk, it has no records to take."""
        return self.is_open and monotonic() >= self._full_until_s

    def recover(self) -> Sequence[FoundPage]:
        """Return nothing: the server does not list its pages; `ask` finds them."""
        return []

    def opened(self, num_pages: int) -> None:
        """Return no event: the log reports about the server."""

    def take_place(self, key: PageKey) -> bool:
        return self.can_write

    def delete(self, key: PageKey) -> None:
        """Do nothing: the page stays on the server, for other processes, until it expires."""

    def ask(self, keys: Sequence[PageKey]) -> None:
        """Ask which of these pages the server has. If it is down, the answer is: none."""
        if self.is_open:
            self._asker.put(keys)
        else:
            self._done.put(Answer(keys[-1], ()))

    def write(self, job: WriteJob) -> None:
        """Send a page; its buffer must not change until `poll` returns the outcome."""
        self.num_writes_pending += 1
        self._writer.put(_Writes(deque([job])))

    def read(self, jobs: Sequence[ReadJob], limit_s: float) -> None:
        """Fetch pages into their buffers, which belong to the tier until `poll` returns the
        outcome. Reads that take longer than `limit_s` are cancelled."""
        self._num_reads += len(jobs)
        reader = self._readers[self._next_reader]
        self._next_reader = (self._next_reader + 1) % len(self._readers)
        reader.put(_Reads(deque(jobs), monotonic() + limit_s))

    def touch(self, used_at: dict[PageKey, float]) -> None:
        """Renew the expiry of used pages."""
        if self.is_open:
            self._writer.put(used_at)

    def poll(self) -> Iterator[Written | Read | Answer | Emptied]:
        """Return what was done since the last call."""
        if self._num_reads:
            for reader in self._readers:
                if reader.line.cut_if_overdue():
                    self.link.note_late()
        while True:
            try:
                done = self._done.get_nowait()
            except Empty:
                return
            if isinstance(done, _RoundTrip):
                self._note_up(done.seconds)
            elif isinstance(done, _Down):
                self._note_down(done.words)
                yield Emptied()
            else:
                self._note(done)
                yield done

    def flush(self) -> None:
        """Return when everything given to `write` so far is done or has failed."""
        self._writer.flush()

    def end_soon(self) -> None:
        """Start the time limit for writes: a slow server must not delay closing."""
        self._end_s = min(self._end_s, monotonic() + CLOSE_LIMIT_S)

    def close(self) -> None:
        """Finish or cancel all orders, and stop the threads."""
        self.end_soon()
        self._asker.close()
        self._writer.close()
        for reader in self._readers:
            reader.close()

    def _note(self, done: Written | Read | Answer) -> None:
        if isinstance(done, Read):
            self._num_reads -= 1
        elif isinstance(done, Written):
            self.num_writes_pending -= 1
            if done.problem in (FULL, CLUSTER, REFUSED):
                self._full_until_s = monotonic() + FULL_PAUSE_S

    def _note_up(self, seconds: float) -> None:
        self.link.note_round_trip(seconds)
        if self._is_down:
            log.warning("the remote store at %s is back", self._shown)
        self._is_down, self._pause_s = False, PAUSE_S

    def _note_down(self, words: str) -> None:
        since_s, self._last_down_s = monotonic() - self._last_down_s, monotonic()
        if not self._is_down:
            log.warning(
                "the remote store at %s failed: %s. Pages are computed instead; the store will be "
                "tried again later",
                self._shown,
                words.rstrip("."),
            )
            self._is_down = True
        elif since_s >= self._pause_s:  # otherwise another thread reports the same failure
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _greet(self, line: RemoteLine) -> None:
        """Check that the server is up and accepts the credentials, and measure the round trip."""
        try:
            for _ in range(2):  # the first call connects, the second measures
                began_s = perf_counter()
                (reply,) = line.call([("PING",)], ASK_LIMIT_S)
                seconds = perf_counter() - began_s
        except BadCredentials as error:
            raise StoreError(f"{self._shown} refuses us: {error}") from error
        except LineError as error:
            self._report_down(str(error))
        else:
            if isinstance(reply, RemoteRefusal):
                raise StoreError(f"{self._shown} refuses us: {reply.words}")
            self.link.note_round_trip(seconds)
        finally:
            line.close()

    # --- threads --------------------------------------------------------------------------------

    def _report_down(self, words: str) -> None:
        """Stop calls at once, even if the owner waits in `flush`; `poll` logs the failure."""
        self._down_until_s = monotonic() + self._pause_s
        self._done.put(_Down(words))

    def _check_open(self) -> None:
        if not self.is_open:
            raise _NotOpen

    def _ask(self, line: RemoteLine, keys: Sequence[PageKey]) -> None:
        self._check_open()
        commands: list[Command] = [("EXISTS", self._name(key)) for key in keys]
        began_s = perf_counter()
        replies = list(line.call(commands, ASK_LIMIT_S))
        self._done.put(_RoundTrip(perf_counter() - began_s))
        found = [key for key, reply in zip(keys, replies, strict=True) if reply == 1]
        self._done.put(Answer(keys[-1], found))

    def _give_up_question(self, keys: Sequence[PageKey]) -> None:
        self._done.put(Answer(keys[-1], ()))

    def _write(self, line: RemoteLine, order: _Writes | dict[PageKey, float]) -> None:
        self._check_open()
        if isinstance(order, dict):
            self._refresh(line, list(order))
            return
        touched: list[PageKey] = []
        while len(order.jobs) < WRITE_BATCH and (more := self._writer.take_more()) is not None:
            if isinstance(more, dict):
                touched += more
            else:
                order.jobs.extend(more.jobs)
        self._send(line, order.jobs)
        if touched:
            self._refresh(line, touched)

    def _send(self, line: RemoteLine, jobs: deque[WriteJob]) -> None:
        ttl_ms = int(1000 * self._settings.ttl_s)
        if self._is_too_large(line):
            self._tell_unwritten(jobs, FULL)
            return
        commands: list[Command] = []
        for job in list(jobs):
            try:
                if job.after is not None:
                    job.after()
            except Exception as error:  # a copy from the device may raise any error
                jobs.remove(job)
                self._done.put(Written(job.key, repr(error)))
                continue
            name = self._name(job.key)
            commands.append(("SET", name, self._value(name, job), "PX", ttl_ms))
        for reply in line.call(commands, WRITE_LIMIT_S) if commands else ():
            self._log_refusal(reply)
            self._done.put(Written(jobs.popleft().key, _problem(reply)))

    def _log_refusal(self, reply: Reply) -> None:
        """Log the server's own message, once; the counters only have kinds of refusals."""
        if _problem(reply) == REFUSED and not self._has_told_refusal:
            self._has_told_refusal = True
            log.warning("the remote store at %s refuses a page: %s", self._shown, reply)

    def _is_too_large(self, line: RemoteLine) -> bool:
        """Whether the server uses `max_bytes` or more and does not evict. If not, this
        is checked again only after CHECK_S."""
        if monotonic() < self._check_s:
            return False
        (reply,) = line.call([("INFO", "memory")], ASK_LIMIT_S)
        facts = _facts(reply)
        is_bounded = facts.get("maxmemory", "0") != "0"
        evicts = is_bounded and facts.get("maxmemory_policy") != "noeviction"
        is_large = int(facts.get("used_memory", "0")) >= self._settings.max_bytes and not evicts
        if not is_large:
            self._check_s = monotonic() + CHECK_S
        return is_large

    def _refresh(self, line: RemoteLine, keys: Sequence[PageKey]) -> None:
        ttl_ms = int(1000 * self._settings.ttl_s)
        for _ in line.call([("PEXPIRE", self._name(key), ttl_ms) for key in keys], WRITE_LIMIT_S):
            pass

    def _give_up_writes(self, order: _Writes | dict[PageKey, float]) -> None:
        if isinstance(order, _Writes):
            has_time = monotonic() < self._end_s
            self._tell_unwritten(order.jobs, "server lost" if has_time else "no time at the end")

    def _tell_unwritten(self, jobs: deque[WriteJob], problem: str) -> None:
        while jobs:
            self._done.put(Written(jobs.popleft().key, problem))

    def _read(self, line: RemoteLine, order: _Reads) -> None:
        self._check_open()
        jobs = order.jobs
        began_s = perf_counter()
        commands: list[Command] = [("GET", self._name(job.key)) for job in jobs]
        for reply in line.call(commands, order.due_s - monotonic()):
            job = jobs[0]
            token_ids, problem = self._take(job, reply)
            ended_s = perf_counter()
            # the round trip is measured separately
            sent_s = min(began_s + self.link.round_trip_s, ended_s)
            jobs.popleft()
            self._done.put(
                Read(job.key, len(job.buffer), sent_s, ended_s, problem, token_ids=token_ids)
            )

    def _give_up_reads(self, order: _Reads) -> None:
        now_s = perf_counter()
        while order.jobs:
            job = order.jobs.popleft()
            self._done.put(Read(job.key, len(job.buffer), now_s, now_s, "server lost"))

    # --- names and values -----------------------------------------------------------------------

    def _digest(self, size: int, *parts: bytes | memoryview) -> bytes:
        """A hash that cannot be made without the secret."""
        digest = blake2b(FORMAT, key=self._secret, digest_size=size)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def _name(self, key: PageKey) -> bytes:
        """The name of a page on the server, which does not reveal the page's tokens."""
        return self._prefix + self._digest(NAME_BYTES, self._settings.identity, key)

    def _value(self, name: bytes, job: WriteJob) -> bytes:
        tag = self._digest(TAG_BYTES, name, job.token_ids, job.buffer)
        size = len(job.token_ids).to_bytes(4, "little")
        return b"".join((FORMAT, tag, size, job.token_ids, job.buffer))

    def _take(self, job: ReadJob, reply: Reply) -> tuple[bytes | None, str | None]:
        """Copy a value into its buffer; returns the page's tokens, or what is wrong with the
        value."""
        if reply is None:
            return None, "missing"
        if not isinstance(reply, bytes):
            return None, _problem(reply) or "format"
        value = memoryview(reply)
        start = len(FORMAT) + TAG_BYTES
        num_token_bytes = int.from_bytes(value[start : start + 4], "little")
        start += 4
        size = start + num_token_bytes + len(job.buffer)
        if value[: len(FORMAT)] != FORMAT or len(value) != size:
            return None, "format"
        token_ids, page = value[start : start + num_token_bytes], value[start + num_token_bytes :]
        tag = self._digest(TAG_BYTES, self._name(job.key), token_ids, page)
        if not compare_digest(tag, bytes(value[len(FORMAT) : len(FORMAT) + TAG_BYTES])):
            return None, "checksum"
        job.buffer[:] = page
        return bytes(token_ids), None


def _problem(reply: Reply) -> str | None:
    """Why the server refused a page, in a few fixed words; None: it did not."""
    if not isinstance(reply, RemoteRefusal):
        return None
    if reply.kind in CLUSTER_KINDS:
        return CLUSTER
    is_full = "maxmemory" in reply.words or reply.words.startswith("OOM")
    return FULL if is_full else REFUSED


def _facts(reply: Reply) -> dict[str, str]:
    """Return the answer of INFO; an empty one if the server refuses to answer."""
    if not isinstance(reply, bytes):
        return {}
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
