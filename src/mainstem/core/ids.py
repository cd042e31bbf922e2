"""Types of ids, so that one cannot be passed for another."""

from collections.abc import Iterator
from itertools import count
from secrets import token_hex
from typing import NewType

RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
SeqSlot = NewType("SeqSlot", int)  # row of a running sequence in the scheduler's arrays
PageKey = NewType("PageKey", bytes)  # chained hash that identifies a page's contents


def unique_ids() -> Iterator[str]:
    """Ids that are unique over all processes, but can be guessed."""
    prefix = token_hex(8)
    return (f"{prefix}{number:08x}" for number in count())
