"""What a cell is as text, in prompts and in text formats."""

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Final

from mainstem.core.errors import InvalidRequest


class Missing:
    """The cell of a row that does not have the field at all (JSON lines)."""


MISSING: Final = Missing()


def is_empty(value: object) -> bool:
    """Whether a cell has no value: null, not a number, or no such field."""
    return value is None or value is MISSING or (isinstance(value, float) and math.isnan(value))


def cell_text(value: object) -> str:
    """A cell as text: an empty text for a cell without a value, JSON for lists and objects, ISO
    8601 for dates. Raises InvalidRequest for a value that is not text (bytes)."""
    if isinstance(value, str):
        return value
    if is_empty(value):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list | tuple | Mapping):
        return json.dumps(json_value(value), ensure_ascii=False)
    if isinstance(value, bytes):
        raise InvalidRequest("cell", "holds bytes, not text")
    return str(value)


def json_value(value: object) -> object:
    """A cell as a JSON value: as it is where JSON has its type, otherwise its text."""
    if is_empty(value):
        return None
    if isinstance(value, str):
        return readable(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {readable(str(name)): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return cell_text(value)


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: cells with bytes that are not UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """The text with bytes that are not UTF-8 as `\\xff`, and lone surrogates as `\\ud800`."""
    if is_unicode(text):
        return text
    if has_bytes_only(text):
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return text.encode("utf-8", "backslashreplace").decode()


def has_bytes_only(text: str) -> bool:
    """Whether all surrogates in a text stand for bytes, so that it can be written as it was
    read."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
