"""Makes ids for requests."""

from collections.abc import Iterator
from itertools import count
from secrets import token_hex


def unique_ids() -> Iterator[str]:
    """Ids that are unique over all processes, but can be guessed."""
    prefix = token_hex(8)
    return (f"{prefix}{number:08x}" for number in count())
