"""A router: follows KV events, and asks for those that it has missed."""

from collections.abc import Callable
from time import monotonic

import zmq

from tests.kv.mirror import Mirror
from tests.waiting import LIMIT_S

TOPIC = "kv@pod@model"
END = b"\xff" * 8
FEW_BYTES = 1 << 16  # small, so that batches are soon dropped if the router does not read

Apply = Callable[[Mirror, bytes], None]


def apply_plain(mirror: Mirror, payload: bytes) -> None:
    mirror.apply(payload)


class Router:
    """Keeps a mirror of the pages of one engine."""

    def __init__(self, at: str, replay_at: str, mirror: Mirror, apply: Apply) -> None:
        self.mirror, self._apply = mirror, apply
        self.next = 0
        self.num_replays = 0
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.set_hwm(10)
        self._in.rcvbuf = FEW_BYTES
        self._in.connect(at)
        self._in.subscribe(b"kv@")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_at)

    def hears(self) -> bool:
        """Whether a batch arrives within 50 ms, without a replay. It is not read yet."""
        return bool(self._in.poll(50))

    def follow(self, num_batches: int) -> None:
        """Return when the first `num_batches` have been read."""
        deadline_s = monotonic() + LIMIT_S
        while self.next < num_batches:
            assert monotonic() < deadline_s, "the batches did not arrive"
            if not self.hears() or not self._take(self._in.recv_multipart()):
                self._ask_again()

    def catch_up(self) -> Mirror:
        """Ask for the batches that are missing, and read them."""
        self._ask_again()
        return self.mirror

    def _take(self, message: list[bytes]) -> bool:
        """Apply the batch if it is the next one. False: earlier batches are missing."""
        topic, number, payload = message
        assert topic == TOPIC.encode()
        found = int.from_bytes(number, "big")
        if found == self.next:
            self._apply(self.mirror, payload)
            self.next += 1
        return found < self.next

    def _ask_again(self) -> None:
        self.num_replays += 1
        for message in self.replay(self.next):
            assert self._take(message)

    def replay(self, first: int) -> list[list[bytes]]:
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        got: list[list[bytes]] = []
        while True:
            assert self._replay.poll(int(1000 * LIMIT_S)), "the replay has no end mark"
            empty, *message = self._replay.recv_multipart()
            assert empty == b""
            if message == [b"", END, b""]:
                return got
            got.append(message)

    def close(self) -> None:
        self._context.destroy(linger=0)
