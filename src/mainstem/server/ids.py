"""Names for requests."""

from collections.abc import Iterator
from itertools import count
from secrets import token_hex


def unique_ids() -> Iterator[str]:
    """Ids that differ from each other and from those of other processes; they can be guessed."""
    prefix = token_hex(8)
    return (f"{prefix}{number:08x}" for number in count())
