"""Copies of pages between the device and host memory: interfaces, and rates of links."""

from time import perf_counter
from typing import NewType, Protocol

from mainstem.core.step import Int32s

LoadId = NewType("LoadId", int)  # names a load; a Step that lists it waits, layer by layer

LEARNING = 0.3  # weight of the latest copy in a link's rate
FADE_S = 1.0  # after this many seconds of work on a shared link, earlier work has half the weight
GUESS_S = 0.05  # the first rate has the weight of this many seconds of work
FORGET_LATE_S = 30.0  # a distant link that was too slow is tried again after this time


class Transfer(Protocol):
    """A copy in progress. Any thread may call these."""

    def num_layers_done(self) -> int:
        """Layers that are complete, counted from the first."""

    def wait(self) -> None:
        """Return when the whole copy is done."""

    def seconds(self) -> float:
        """How long the copy took, without time in a queue. Called after it is done."""


class PageCopier(Protocol):
    """Copies whole pages between the device and a slab of equal slots in host memory.

    A slot holds a page as [layers][K or V][kv_heads, page_size, head_dim], whatever the device's
    own order is. Layers with a window and others may differ in heads and dims. The caller makes
    sure that nothing else uses the pages and slots of a copy.

    `parts` says where the windowed part of each of the copied pages is (Step.window_parts), at the
    last place if a page has none: then that part of the slot holds nothing of use. None: at the
    page's own number.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in its slot; the distance between slots may be larger."""

    def slot(self, slot: int) -> memoryview:
        """The bytes of a slot, to be read and written in place; they begin at a 4 KiB boundary."""

    def save(self, pages: Int32s, slots: Int32s, parts: Int32s | None = None) -> Transfer:
        """Start copying device pages to slots. If it raises, some may have been copied."""

    def load(
        self, load_id: LoadId, slots: Int32s, pages: Int32s, parts: Int32s | None = None
    ) -> Transfer:
        """Start copying slots to device pages; steps may wait for the load by its id. If it
        raises, some may have been copied."""

    def forget(self, load_id: LoadId) -> None:
        """Forget a load that is done or cancelled: no step launched from now on names it."""

    def drain(self) -> None:
        """Return when every started copy has ended, failed ones included."""

    def close(self) -> None:
        """Finish all started copies."""


class TierLink:
    """One direction between two tiers: its queued bytes, and its latest rate."""

    round_trip_s = 0.0  # 0 until the first question is answered

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._queued_bytes = 0

    def pass_s(self, num_bytes: int) -> float:
        """Return the seconds that a copy of `num_bytes` takes, without waiting for earlier
        copies."""
        return num_bytes / self._bytes_per_s

    def expect_s(self, num_bytes: int) -> float:
        """Return the seconds until `num_bytes` more are copied, after everything that is queued."""
        return self.pass_s(self._queued_bytes + num_bytes)

    def start(self, num_bytes: int) -> None:
        self._queued_bytes += num_bytes

    def give_up(self, num_bytes: int) -> None:
        """Note that bytes that `start` counted will not be copied."""
        self._queued_bytes -= num_bytes

    def finish(self, num_bytes: int, seconds: float) -> None:
        """Note that bytes that `start` counted were copied in `seconds`."""
        self._queued_bytes -= num_bytes
        self._learn(num_bytes / max(seconds, 1e-6))

    def _learn(self, bytes_per_s: float) -> None:
        self._bytes_per_s += LEARNING * (bytes_per_s - self._bytes_per_s)


class SharedLink(TierLink):
    """A link with parallel copies. Its rate is the bytes of all copies, divided by the time in
    which the link is busy.

        copy a   |-----|
        copy b    |-------|               |--
        copy c          |-----|
        busy     |------------|           |--

    Bytes and busy seconds are summed, and both sums decay with later work. The progress of copies
    in flight (at most `most_under_way` bytes) is estimated from the rate: copies that began
    together end together, so for a while there is no end to measure. A copy that is t seconds
    overdue is expected to take t more, so a link that hangs is expected to be slower and slower.
    """

    def __init__(self, bytes_per_s: float, most_under_way: float = float("inf")) -> None:
        super().__init__(bytes_per_s)
        self._most_under_way = most_under_way
        self._end_s = 0.0  # end of the latest copy
        self._busy_s = GUESS_S
        self._passed_bytes = bytes_per_s * GUESS_S
        self._partial_bytes = 0.0  # estimated progress of the queue at `_partial_s`
        self._partial_s = 0.0

    def expect_s(self, num_bytes: int) -> float:
        self._pass_on()
        passed = min(self._partial_bytes, self._most_under_way, self._queued_bytes)
        late = self._partial_bytes - passed
        return (self._queued_bytes - passed + late + num_bytes) / self._bytes_per_s

    def start(self, num_bytes: int) -> None:
        self._pass_on()
        super().start(num_bytes)

    def give_up(self, num_bytes: int) -> None:
        self._leave(num_bytes)

    def finish_between(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        """Note that bytes that `start` counted were copied between these times."""
        self._leave(num_bytes)
        more_s = max(0.0, ended_s - max(began_s, self._end_s))
        self._end_s = max(self._end_s, ended_s)
        kept = FADE_S / (FADE_S + more_s)
        self._busy_s = kept * self._busy_s + more_s
        self._passed_bytes = kept * self._passed_bytes + num_bytes
        # other copies may be nearly done, but their progress is not known
        least = self._passed_bytes / self._busy_s
        under_way = min(self._queued_bytes, self._most_under_way)
        is_known = self._busy_s >= 0.9 * FADE_S
        most = (self._passed_bytes + (0 if is_known else under_way)) / self._busy_s
        self._bytes_per_s = min(max(self._bytes_per_s, least), most)

    def _pass_on(self) -> None:
        """Update the estimated progress."""
        now_s = perf_counter()
        passed = self._partial_bytes + (now_s - self._partial_s) * self._bytes_per_s
        self._partial_bytes = passed if self._queued_bytes else 0.0
        self._partial_s = now_s

    def _leave(self, num_bytes: int) -> None:
        self._pass_on()
        self._queued_bytes -= num_bytes
        under_way = min(self._queued_bytes, self._most_under_way)
        self._partial_bytes = min(max(0.0, self._partial_bytes - num_bytes), under_way)


class DistantLink(SharedLink):
    """A link with a round trip before the first byte. The round trip is measured separately from
    the rate.

    If a copy is abandoned as too slow, the rate is halved; after a while the first rate is used
    again.
    """

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self._first_rate = bytes_per_s
        self._late_s: float | None = None  # when the link was last too slow

    def pass_s(self, num_bytes: int) -> float:
        if self._late_s is not None and perf_counter() - self._late_s > FORGET_LATE_S:
            self._late_s = None
            self._reset(self._first_rate)
        return self.round_trip_s + super().pass_s(num_bytes)

    def note_round_trip(self, seconds: float) -> None:
        """Note that a short question was answered in `seconds`. An answer that is quicker than the
        estimate replaces it: an answer may be late for many reasons, but never early."""
        weight = 1.0 if seconds < self.round_trip_s or not self.round_trip_s else LEARNING
        self.round_trip_s += weight * (seconds - self.round_trip_s)

    def note_late(self) -> None:
        """Note that a copy is overdue."""
        self._late_s = perf_counter()
        self._reset(self._bytes_per_s / 2)

    def _reset(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_s, self._passed_bytes = GUESS_S, bytes_per_s * GUESS_S
