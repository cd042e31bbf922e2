"""Server-sent events as bytes."""

import msgspec

from mainstem.core.json import JsonView

encode = msgspec.json.Encoder().encode
MARK = "mark"  # placeholder for a text: the bytes around it are the same in many events


def event(value: JsonView) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % encode(value)


def named_event(value: JsonView) -> bytes:
    """An event that is named by the type of its value."""
    return b"event: %b\n%b" % (str(value["type"]).encode(), event(value))
