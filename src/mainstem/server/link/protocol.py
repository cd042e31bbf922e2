"""Messages between the front (see engine_process.py) and the engine's process, and their encoding.

    front  -- commands (Submit, Abort ...), a list per event loop iteration ----->  engine
           <------------------------------- EngineReport, after each step ---------------

Messages are msgpack without field names, each after its length in four bytes. They contain no code:
the worst that an invalid message can do is end the connection.
"""

import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Struct

from mainstem.core.config import EngineConfig
from mainstem.core.errors import (
    EngineAsleep,
    InvalidRequest,
    MissingPackage,
    TooManyForms,
    WeightsLost,
)
from mainstem.core.events import Event
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.request import Output, Overflow, Request, SamplingParams, Scoring
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.weights import Tag, UpdateMode
from mainstem.server.link.kv_events import KvEventsConfig

_LENGTH = struct.Struct("<I")

# --- to the engine -------------------------------------------------------------------------------


class BeginEngine(Struct, array_like=True, frozen=True, tag="begin"):
    """The first message: which engine to make."""

    config: EngineConfig
    folder: str  # the model's folder, resolved
    log_level: str
    kv_events: KvEventsConfig | None = None


class Submit(Struct, array_like=True, frozen=True, tag="submit"):
    """A prompt to be answered. Stop strings stay with the front, which reads the text."""

    number: int  # identifies the request in reports
    request_id: RequestId
    prompt_ids: bytes  # int32
    sampling: dict[str, Any]  # fields of SamplingParams that differ from their defaults
    eos_ids: tuple[int, ...]
    owner: str  # the owner whose share of compiled forms it uses
    salt: bytes = b""
    public_tokens: int = 0
    priority: int = 0
    session: SessionId | None = None
    overflow: Overflow | None = None
    keep_tokens: int = 0
    boundaries: tuple[int, ...] = ()
    scoring: Scoring | None = None


class Abort(Struct, array_like=True, frozen=True, tag="abort"):
    """The answers of a request are no longer wanted."""

    number: int


class Stop(Struct, array_like=True, frozen=True, tag="stop"):
    """A stop string has ended one answer."""

    number: int
    index: int


class Pin(Struct, array_like=True, frozen=True, tag="pin"):
    """Pin the pages of these prefixes (int32), in place of those pinned under the name before;
    without prefixes, unpin them. Pages are named as in a request with this salt and this number of
    public tokens. Answered with the number of pages."""

    call: int
    name: str
    prefixes: tuple[bytes, ...]
    salt: bytes = b""
    public_tokens: int = 0


class ClearCache(Struct, array_like=True, frozen=True, tag="clear"):
    """Forget every cached page, in every tier, that no sequence holds. Answered with the number of
    those on the device."""

    call: int


class CheckEngine(Struct, array_like=True, frozen=True, tag="check"):
    """Asks whether anything runs. Answered with 1 or 0, or with a fault if a page was lost."""

    call: int


class UpdateWeights(Struct, array_like=True, frozen=True, tag="update"):
    """Bring the weights in a folder, or in a safetensors file, into force. Answered with the name
    of their version."""

    call: int
    path: str
    mode: UpdateMode


class LoseWeights(Struct, array_like=True, frozen=True, tag="lose"):
    """The engine before this one had other weights; see Engine.lose_weights. The first command."""

    call: int


class ResumeWeights(Struct, array_like=True, frozen=True, tag="resume"):
    """Answer with the model's own weights. Answered with the name of their version."""

    call: int


class SleepEngine(Struct, array_like=True, frozen=True, tag="sleep"):
    """Give memory back; see Engine.sleep. Answered with the name of the version."""

    call: int
    level: int
    mode: UpdateMode


class WakeEngine(Struct, array_like=True, frozen=True, tag="wake"):
    """Undo SleepEngine, or a part of it. Answered with the name of the version."""

    call: int
    tags: frozenset[Tag]


class Close(Struct, array_like=True, frozen=True, tag="close"):
    """Save pages that must be saved, and end."""


Change = UpdateWeights | LoseWeights | ResumeWeights | SleepEngine | WakeEngine
Command = Submit | Abort | Stop | Pin | ClearCache | CheckEngine | Change | Close

# --- from the engine -----------------------------------------------------------------------------


class Ready(Struct, array_like=True, frozen=True, tag="ready"):
    """The engine is made."""

    max_model_len: int
    snapshot: EngineSnapshot
    weights_version: str = ""


class NotMade(Struct, array_like=True, frozen=True, tag="not made"):
    """The engine could not be made."""

    reason: str


# An Output as a tuple of its values, except those of the text, which the front adds
_FROM_ENGINE = [each.name for each in fields(Output) if each.name not in ("text", "stop_reason")]
pack_output: Callable[[Output], "PackedOutput"] = attrgetter(*_FROM_ENGINE)
if TYPE_CHECKING:
    PackedOutput = tuple[Any, ...]
else:  # the decoder checks each value
    _TYPES = get_type_hints(Output)
    PackedOutput = tuple[tuple(_TYPES[name] for name in _FROM_ENGINE)]


def unpack_output(packed: PackedOutput) -> Output:
    """The output that was packed."""
    return Output(*packed)


class Refused(Struct, array_like=True, frozen=True):
    """A request that cannot run; an InvalidRequest."""

    number: int
    kind: str  # a key of _REFUSALS
    field: str
    reason: str

    @classmethod
    def of(cls, number: int, error: InvalidRequest) -> "Refused":
        return cls(number, type(error).__name__, error.field, error.reason)

    def error(self) -> InvalidRequest:
        if self.kind == WeightsLost.__name__:
            return WeightsLost(self.reason)
        if self.kind == EngineAsleep.__name__:
            return EngineAsleep()
        return _REFUSALS.get(self.kind, InvalidRequest)(self.field, self.reason)


_REFUSALS = {kind.__name__: kind for kind in (MissingPackage, TooManyForms)}


class StepInProgress(Struct, array_like=True, frozen=True):
    """The step that runs now."""

    num_tokens: int
    began_s: float  # monotonic, the same clock in all processes of a machine


class CommandResult(Struct, array_like=True, frozen=True):
    """The answer to a command with a `call`."""

    call: int
    value: int
    fault: str | None = None
    version: str = ""  # of the weights, after a Change
    refused: Refused | None = None  # the caller's fault, instead of `fault`


class EngineReport(Struct, array_like=True, tag="report"):
    """What has happened since the last report."""

    accepted: list[int] = []
    admitted: list[tuple[int, float]] = []  # (number, when the request left the queue)
    refused: list[Refused] = []
    # number, index, token, number, index ...: one more token for each of some answers, which all
    # had `news` before
    tokens: list[int] = []
    news: list[tuple[int, PackedOutput]] = []  # all other news of answers, by number
    replies: list[CommandResult] = []
    events: list[tuple[int, list[Any]]] = []  # place in EVENTS, fields
    snapshot: EngineSnapshot | None = None  # sent from time to time
    step: StepInProgress | None = None  # set only together with `snapshot`

    @property
    def is_empty(self) -> bool:
        lists = (self.accepted, self.refused, self.tokens, self.news, self.replies, self.events)
        # `admitted` needs no check: it comes with an event
        return not any(lists) and self.snapshot is None


# --- events --------------------------------------------------------------------------------------

EVENTS: tuple[type[Event], ...] = get_args(Event)
_PLACES = {kind: place for place, kind in enumerate(EVENTS)}
_FIELDS = [[each.name for each in fields(kind)] for kind in EVENTS]


def pack_event(event: Event) -> tuple[int, list[Any]]:
    """An event as plain values."""
    place = _PLACES[type(event)]
    return place, [getattr(event, name) for name in _FIELDS[place]]


def unpack_event(packed: tuple[int, list[Any]]) -> Event:
    """The event that was packed."""
    place, values = packed
    named = dict(zip(_FIELDS[place], values, strict=True))
    return msgspec.convert(named, EVENTS[place])


# --- requests ------------------------------------------------------------------------------------

_DEFAULTS = SamplingParams()
# fields for the text, which the front makes; they are not sent to the engine
_FRONT_ONLY = {"stop", "skip_special_tokens", "include_stop_str_in_output"}
_SENT = [each.name for each in fields(SamplingParams) if each.name not in _FRONT_ONLY]


# fields of Request that are sent as they are
_SAME = {each.name for each in fields(Request)} & set(Submit.__struct_fields__)
_SAME -= {"prompt_ids", "sampling", "eos_ids"}


def pack_request(number: int, request: Request, eos_ids: tuple[int, ...], owner: str) -> Submit:
    """A request as a message to the engine."""
    given = {name: getattr(request.sampling, name) for name in _SENT}
    return Submit(
        number=number,
        prompt_ids=request.prompt_ids.tobytes(),
        sampling={
            name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)
        },
        eos_ids=eos_ids,
        owner=owner,
        **{name: getattr(request, name) for name in _SAME},
    )


def unpack_request(submit: Submit) -> Request:
    """The request in a message; its grammar is not compiled yet."""
    return Request(
        prompt_ids=np.frombuffer(submit.prompt_ids, np.int32),
        sampling=SamplingParams(**submit.sampling),
        eos_ids=submit.eos_ids,
        **{name: getattr(submit, name) for name in _SAME},
    )


# --- frames --------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda number: number.item())  # numpy's numbers
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_begin = msgspec.msgpack.Decoder(BeginEngine).decode
decode_report = msgspec.msgpack.Decoder(EngineReport | Ready | NotMade).decode


def frame(message: object) -> bytes:
    """A message as bytes for the connection."""
    data = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, data, _LENGTH.size)
    _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
    return bytes(data)


def read_frame(connection: socket.socket) -> bytes | None:
    """Wait for one message, and read no byte after it; None: the connection is closed."""
    head = _read_exactly(connection, _LENGTH.size)
    return None if head is None else _read_exactly(connection, _LENGTH.unpack(head)[0])


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            return None
        data += part
    return data


class Unframer:
    """Splits the bytes of a connection into messages, which are still encoded."""

    def __init__(self) -> None:
        self._held = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; returns the messages that are now complete."""
        held = self._held
        held += data
        begin = 0
        while len(held) - begin >= _LENGTH.size:
            end = begin + _LENGTH.size + _LENGTH.unpack_from(held, begin)[0]
            if len(held) < end:
                break
            yield bytes(held[begin + _LENGTH.size : end])
            begin = end
        del held[:begin]
