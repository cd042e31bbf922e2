"""Types of ids, so that one cannot be passed for another."""

from typing import NewType

RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
SeqSlot = NewType("SeqSlot", int)  # row of a running sequence in the scheduler's arrays
PageKey = NewType("PageKey", bytes)  # chained hash that identifies a page's contents
