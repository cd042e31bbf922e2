"""Marks: two short hashes in each output line, of the row and of the model that answered it.

    {"custom_id": "a", "response": {...}, "error": null,
     "mainstem": {"row": "8a41...", "model": "90fc..."}}

A later run compares them with its own rows and model. The row's hash covers the row without its id,
and the job's settings for fields that the row leaves out.
"""

from hashlib import blake2b

import msgspec

from mainstem.batch.files import Line
from mainstem.core.json import JsonView

MARK = "mainstem"  # the field of an output line
DIGEST_BYTES = 8


class Marker:
    """Makes the marks of one run."""

    def __init__(self, defaults: JsonView, seed: int, model: bytes) -> None:
        """`defaults` and `seed` are for rows that leave these fields out; `model` identifies
        weights and numerics."""
        self._defaults = defaults
        self._seed = seed
        self.model = _hex(model)

    def of_row(self, row: JsonView) -> str:
        """The hash of what a row asks."""
        body = row.get("body")
        fields = body if isinstance(body, dict) else row
        content = {name: value for name, value in row.items() if name != "custom_id"}
        return _hex(_encoded(content), _encoded(self._job_settings(fields)))

    def of_line(self, line: Line) -> str:
        """The hash of a line that is not a row."""
        return _hex((line.data or b"").strip())

    def _job_settings(self, fields: JsonView) -> dict[str, object]:
        """The job's settings that apply to a row with these fields."""
        given = {name for name, value in fields.items() if value is not None}
        if "max_completion_tokens" in given:
            given.add("max_tokens")
        found = {name: value for name, value in self._defaults.items() if name not in given}
        temperature = fields.get("temperature")
        is_greedy = (self._defaults.get("temperature") if temperature is None else temperature) == 0
        if not is_greedy and "seed" not in given:
            found["seed"] = self._seed
        return found

    def marked(self, output: dict[str, object], row_digest: str) -> dict[str, object]:
        """An output line with its mark."""
        return output | {MARK: {"row": row_digest, "model": self.model}}


def _encoded(value: object) -> bytes:
    """JSON that does not depend on the order of fields."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError):
        # values that only Python's own JSON accepts: lone surrogates, huge numbers
        return repr(value).encode("utf-8", "backslashreplace")


def _hex(*parts: bytes) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
