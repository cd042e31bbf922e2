"""Reports to routers what the KV cache holds, in vLLM 0.32's format: msgpack over ZeroMQ.

    store -- PagesStored ... --> KvEventPublisher -- a list per step --> thread --> PUB
                                                                           `<---> ROUTER (replay)

PUB sends (topic, number, batch). Numbers count from 0 without gaps; 8 bytes, big endian. A batch is
[seconds since 1970, events, 0]; an event is a map whose `type` names it. A client that sends a
number to ROUTER gets (topic, number, batch) of every kept batch from this number on, then an empty
batch whose number is -1.

The engine only queues lists; a thread sends them and answers replays. So subscribers never block
the engine: a subscriber that is too slow misses batches.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from threading import Thread
from time import time
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, msgpack

from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus, PageEvent, PagesCleared, PagesRemoved, PagesStored

if TYPE_CHECKING:
    from zmq import Socket

MAX_UNSENT = 10_000  # batches that wait for one subscriber; more are dropped for it
MAX_KEPT = 10_000  # batches kept for replay
MAX_KEPT_BYTES = 256 << 20  # bytes of these batches
LOOK_S = 0.1  # between two checks for replay requests
LINGER_MS = 1000  # time for subscribers to take the last batches
END = (-1).to_bytes(8, "big", signed=True)
NO_ZMQ = "KV events need pyzmq: pip install 'mainstem[server]'"
MEDIUM = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}

log = logging.getLogger("mainstem.server")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Where KV events go: to subscribers that connect to `bind`, and to a subscriber that listens
    at `connect`."""

    bind: str | None = None
    connect: str | None = None
    replay: str | None = None
    topic: str = ""


# --- the format ----------------------------------------------------------------------------------


class BlockStored(Struct, tag=True, frozen=True):
    """Consecutive pages. The first follows `parent_block_hash`, if there is one. If there are no
    token ids and the size is 0, only the pages' names are known, and not which page follows which.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    medium: str
    lora_id: None = None  # subscribers expect these two fields
    lora_name: None = None


class BlockRemoved(Struct, tag=True, frozen=True):
    """Pages that a medium no longer has; other media may still have them."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(Struct, tag=True, frozen=True):
    """No medium has any page."""


class EventBatch(Struct, array_like=True, frozen=True):
    """The changes of one step, in order."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


def to_batch(ts: float, events: Sequence[PageEvent]) -> EventBatch:
    """Make a batch from events of the bus. Consecutive events are joined if the meaning stays the
    same."""
    sent: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for event in events:
        last = sent[-1] if sent else None
        match event:
            case PagesCleared():
                sent.append(AllBlocksCleared())
            case PagesRemoved(tier, keys):
                if isinstance(last, BlockRemoved) and last.medium == MEDIUM[tier]:
                    last.block_hashes.extend(keys)
                else:
                    sent.append(BlockRemoved(list(keys), MEDIUM[tier]))
            case PagesStored(tier, keys, parents, token_ids):
                run = last if isinstance(last, BlockStored) else None
                for page in zip(keys, parents, token_ids, strict=True):
                    run = _joined(run, MEDIUM[tier], *page)
                    if not sent or run is not sent[-1]:
                        sent.append(run)
    return EventBatch(ts, sent)


def _joined(
    run: BlockStored | None, medium: str, key: bytes, parent: bytes | None, token_ids: bytes
) -> BlockStored:
    """Add a page to a run of the same medium if it follows the last page of the run, or if neither
    has token ids; otherwise begin a new run. Returns the page's run."""
    size = len(token_ids) // 4
    is_alike = run is not None and (run.medium, run.block_size) == (medium, size)
    if run is None or not is_alike or (size and run.block_hashes[-1] != parent):
        run = BlockStored([], parent, [], size, medium)
    run.block_hashes.append(key)
    run.token_ids.extend(np.frombuffer(token_ids, np.int32).tolist())
    return run


# --- the sockets ---------------------------------------------------------------------------------


class KvEventPublisher:
    """Publishes what happens to pages from its creation on. Create it before the store, which
    announces the pages that it finds on disk. `flush` ends a batch.
    """

    def __init__(self, config: KvEventsConfig, bus: EventBus) -> None:
        """Raises ConfigError if an address cannot be used."""
        try:
            import zmq  # noqa: PLC0415  # optional
        except ImportError:
            raise ConfigError(NO_ZMQ) from None
        self._topic = config.topic.encode()
        self._pending: list[PageEvent] = [PagesCleared()]
        self._queue: SimpleQueue[tuple[float, list[PageEvent]] | None] = SimpleQueue()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, False)
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(MAX_UNSENT)
        self._replay: Socket[bytes] | None = None
        try:
            self.endpoint = _bind(self._out, config.bind)
            if config.connect is not None:
                self._out.ipv6 = True
                self._out.connect(config.connect)
            if config.replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # twice the limit, so that a whole replay fits: ZeroMQ may still count batches that
                # were read already, up to half of its limit
                self._replay.set_hwm(2 * (MAX_KEPT + 1))
            self.replay_endpoint = _bind(self._replay, config.replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events: cannot listen or connect: {error}") from None
        facts = {"at": self.endpoint, "to": config.connect, "replay": self.replay_endpoint}
        log.info("publishing KV events", extra={"facts": facts})
        bus.subscribe(PagesStored, self._note)
        bus.subscribe(PagesRemoved, self._note)
        bus.subscribe(PagesCleared, self._note_cleared)
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Send what has happened since the last call as a batch, if anything has."""
        if self._pending:
            self._queue.put((time(), self._pending))
            self._pending = []

    def close(self) -> None:
        """Send what is left, and close the sockets."""
        self.flush()
        self._queue.put(None)
        self._thread.join()

    def _note(self, event: PagesStored | PagesRemoved) -> None:
        self._pending.append(event)

    def _note_cleared(self, event: PagesCleared) -> None:
        self._pending = [event]  # earlier events no longer matter

    # --- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = None if self._replay is None else LOOK_S
        while True:
            try:
                if self._replay is not None:
                    self._answer(self._replay)
                item = self._queue.get(timeout=wait_s)
                if item is None:
                    break
                self._publish(*item)
            except Empty:
                continue
            except Exception:
                log.exception("a batch of KV events is lost")
        self._context.destroy(linger=LINGER_MS)

    def _publish(self, ts: float, events: list[PageEvent]) -> None:
        batch = msgpack.encode(to_batch(ts, events))
        number = self._number
        self._number += 1
        if self._replay is not None:
            self._keep(number, batch)
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), batch))

    def _keep(self, number: int, batch: bytes) -> None:
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: "Socket[bytes]") -> None:
        """Answer one replay request."""
        if replay.poll(0):  # one at a time, so that batches are sent in between
            *envelope, asked = replay.recv_multipart()  # the sender, and usually an empty frame
            first = int.from_bytes(asked, "big")
            for number, batch in self._kept:
                if number >= first:
                    name = number.to_bytes(8, "big")
                    replay.send_multipart((*envelope, self._topic, name, batch))
            replay.send_multipart((*envelope, b"", END, b""))


def _bind(socket: "Socket[bytes] | None", endpoint: str | None) -> str | None:
    """Listen at an address; returns it with its port."""
    if socket is None or endpoint is None:
        return None
    socket.ipv6 = "[" in endpoint
    socket.bind(endpoint)
    if not is_local(endpoint):
        log.warning(
            "anybody who can reach this address can read KV events, including token ids of prompts",
            extra={"facts": {"address": endpoint}},
        )
    bound = socket.last_endpoint
    assert isinstance(bound, bytes)
    return bound.decode()


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach an address."""
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")
