"""A table as the lines of a batch job: a request for every row."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from mainstem.batch.files import Line
from mainstem.core.errors import InvalidRequest
from mainstem.core.json import Json
from mainstem.tables.asking import Asking
from mainstem.tables.cells import is_unicode
from mainstem.tables.fields import FieldOrder, TableReader
from mainstem.tables.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Wording:
    """How the text of a row becomes a prompt."""

    prompt: Prompt
    asking: Asking
    system: str | None = None
    # ids of a prompt that does not go through the chat template; None: it does
    encode: Callable[[str], list[int]] | None = None

    def request(self, text: str) -> Json:
        """The body of a row's request."""
        if self.encode is not None:
            return {"prompt": self.encode(text), **self.asking.fields}
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": text})
        return {"messages": messages, **self.asking.fields}


class TableRows:
    """The lines of a batch job over a table; row N, counted from 1, has the custom_id N. May be
    read again and again."""

    def __init__(
        self, table: TableReader, wording: Wording, order: FieldOrder, num_rows: int
    ) -> None:
        self._table, self._wording, self._order = table, wording, order
        self._num_rows = num_rows
        self._num_read = 0

    @property
    def progress(self) -> float | None:
        """The share of the rows read so far."""
        return min(1.0, self._num_read / self._num_rows) if self._num_rows else None

    def __iter__(self) -> Iterator[Line]:
        columns = self._table.columns
        for number, row in enumerate(self._table, 1):
            self._num_read = number
            try:
                cells = dict(zip(columns, row, strict=True))
                yield Line(number, self._data(number, cells))
            except InvalidRequest as error:
                yield Line(number, None, str(error))

    def _data(self, number: int, cells: dict[str, object]) -> bytes:
        text = self._wording.prompt.render(cells, self._order.of(number - 1))
        if not is_unicode(text):
            raise InvalidRequest("prompt", "a cell is not UTF-8")
        if not text.strip():
            raise InvalidRequest("prompt", "is empty: the cells in it have no text")
        return msgspec.json.encode({"custom_id": str(number), **self._wording.request(text)})
