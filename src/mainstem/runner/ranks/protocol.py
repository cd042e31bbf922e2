"""The messages between the engine's process and its ranks. Each rank has a pair of sockets.

    to a rank      BeginRank; then Open, Step, SavePages, LoadPages, ForgetLoad in any order;
                   CloseRank
    from a rank    Loaded; Opened; StepEnded for each step; Copied as a copy progresses; Failed

Messages are pickled: both ends are the same version of this program, and no other process has the
sockets. A Step, which is sent every few milliseconds, is sent as its arrays, one after the other:
that takes half the time of pickling.
"""

import pickle
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from mainstem.core.config import EngineConfig
from mainstem.core.errors import MainstemError
from mainstem.core.step import Int32s, SampleBatch, Spans, Step, StepResult
from mainstem.kv.transfer import LoadId
from mainstem.models.shard import Shard
from mainstem.runner.facts import RunnerFacts

if TYPE_CHECKING:  # it imports torch
    from mainstem.runner.origin import Origin


@dataclass(frozen=True, slots=True)
class BeginRank:
    """Load a part of a model."""

    shard: Shard
    origin: "Origin"
    config: EngineConfig
    meeting_fd: int  # shared memory in which ranks find each other's addresses
    slab_fd: int  # shared memory for the saved pages of all ranks


@dataclass(frozen=True, slots=True)
class Open:
    """Prepare copies between pages and a slab of this size."""

    host_bytes: int


@dataclass(frozen=True, slots=True)
class SavePages:
    number: int  # number of the copy
    pages: Int32s
    slots: Int32s
    parts: Int32s | None
    after_steps: int  # wait until this many steps have ended: they wrote these pages


@dataclass(frozen=True, slots=True)
class LoadPages:
    number: int
    load_id: LoadId
    slots: Int32s
    pages: Int32s
    parts: Int32s | None
    after_steps: int  # wait until this many steps have ended: they may have read the old contents


@dataclass(frozen=True, slots=True)
class ForgetLoad:
    load_id: LoadId


@dataclass(frozen=True, slots=True)
class CloseRank:
    """End the process; nothing is in progress."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first message of a rank."""

    facts: RunnerFacts
    can_overlap: bool
    page_bytes: int  # of the rank's part of a page
    num_layers: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to Open."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The next step, in the order of sending, has ended. Only rank 0 sends its result."""

    result: StepResult | None


@dataclass(frozen=True, slots=True)
class Copied:
    """`num_layers` of a copy are done; `seconds` is valid with the last layer."""

    number: int
    num_layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends after an error."""

    at_s: float  # on the clock that all processes of a machine share
    error: MainstemError | None  # None: an error of another library, or a bug
    words: str
    traceback: str


ToRank = BeginRank | Open | SavePages | LoadPages | ForgetLoad | CloseRank | Step
FromRank = Loaded | Opened | StepEnded | Copied | Failed

# the three parts of a Step: its spans, its sampling, and the rest
_SPANS = [each.name for each in fields(Spans)]
_SAMPLING = [each.name for each in fields(SampleBatch)]
_REST = [each.name for each in fields(Step) if each.name not in ("spans", "sampling")]
_VALUES = attrgetter(
    *(f"spans.{name}" for name in _SPANS), *(f"sampling.{name}" for name in _SAMPLING), *_REST
)
_ALIGNMENT = 16  # alignment of an array in a message
_STEP, _OTHER = b"s", b"o"


def encode(message: ToRank | FromRank) -> bytes:
    """The message as bytes; the same bytes go to every rank."""
    if isinstance(message, Step):
        return _encode_step(message)
    return _OTHER + pickle.dumps(message, protocol=5)


def _encode_step(step: Step) -> bytes:
    """| s | size of the head (8 bytes) | head | arrays, each at a multiple of 16 bytes |. The head
    has [dtype, *shape] for each array, and all other values as they are."""
    head: list[object] = []
    parts: list[bytes] = []
    for value in _VALUES(step):
        if isinstance(value, np.ndarray):
            head.append([value.dtype.char, *value.shape])
            parts.append(value.tobytes())
            parts.append(bytes(-value.nbytes % _ALIGNMENT))
        else:
            head.append(value)
    packed = pickle.dumps(head, protocol=5)
    begin = _STEP + len(packed).to_bytes(8, "little") + packed
    return b"".join((begin, bytes(-len(begin) % _ALIGNMENT), *parts))


def decode(data: bytes) -> ToRank | FromRank:
    """The message that was encoded."""
    if data[:1] == _STEP:
        return _decode_step(bytearray(data))  # a copy: torch wants arrays that can be written to
    message: ToRank | FromRank = pickle.loads(memoryview(data)[1:])
    return message


def _decode_step(data: bytearray) -> Step:
    head_end = 9 + int.from_bytes(data[1:9], "little")
    place = head_end + -head_end % _ALIGNMENT
    values: list[Any] = pickle.loads(data[9:head_end])
    for index, value in enumerate(values):
        if type(value) is list:
            kind, *shape = value
            values[index] = np.ndarray(shape, kind, data, place)
            num_bytes = values[index].nbytes
            place += num_bytes + -num_bytes % _ALIGNMENT
    first, second = len(_SPANS), len(_SPANS) + len(_SAMPLING)
    return Step(
        spans=Spans(**dict(zip(_SPANS, values[:first], strict=True))),
        sampling=SampleBatch(**dict(zip(_SAMPLING, values[first:second], strict=True))),
        **dict(zip(_REST, values[second:], strict=True)),
    )


class Channel:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self.connection = Connection(fd)
        self._sending = Lock()

    def send(self, message: ToRank | FromRank) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send the result of `encode`; raises OSError if the other end is closed."""
        with self._sending:
            self.connection.send_bytes(data)

    def receive(self) -> ToRank | FromRank:
        """Wait for a message; raises EOFError or OSError if the other end is closed."""
        return decode(self.connection.recv_bytes())

    def close(self) -> None:
        self.connection.close()
