"""Prompts with columns in them: `{column}` in a plain prompt, variables in a Jinja file.

    Is {review} about {product}?      the cells of two columns; {{ and }} are braces
    {row}                             a list of fields, one line each: "column: cell"

A cell's text is data: it is put into the prompt as it is, and is never read as a template.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mainstem.core.errors import InvalidRequest
from mainstem.core.spelling import did_you_mean
from mainstem.tables.cells import MISSING, cell_text, is_unicode, json_value, readable
from mainstem.text.chat_template import render_bounded

COLUMNS_SHOWN = 20  # in an error
ROW, CELLS = "row", "cells"  # the list of fields; in Jinja also all cells, by the column's name
Cells = Mapping[str, object]


class Prompt(Protocol):
    """Makes the text of a row's prompt."""

    @property
    def has_row(self) -> bool:
        """Whether the prompt contains the list of fields."""

    def render(self, cells: Cells, fields: Sequence[str]) -> str:
        """The prompt of a row; `fields` are the columns that {row} lists, in order. Raises
        InvalidRequest for a row that has no prompt."""


def field_line(column: str, text: str) -> str:
    """One field of {row}."""
    return f"{column}: {text}\n"


def text_in(cells: Cells, column: str) -> str:
    """A cell's text; raises InvalidRequest, which names the column, if it has none."""
    value = cells[column]
    if value is MISSING:
        raise InvalidRequest(column, "the row has no such field")
    try:
        text = cell_text(value)
    except InvalidRequest as error:
        raise InvalidRequest(column, f"the cell {error.reason}") from None
    if not is_unicode(text):
        raise InvalidRequest(column, f"the cell is not UTF-8: {readable(text)!r:.80}")
    return text


def row_text(cells: Cells, fields: Sequence[str]) -> str:
    """The list of fields, without a line end after the last. A field that the row lacks is left
    out."""
    present = (column for column in fields if cells[column] is not MISSING)
    return "".join(field_line(column, text_in(cells, column)) for column in present)[:-1]


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """A prompt with `{column}` in it; `parts` are texts and columns in turn, beginning with a
    text."""

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, columns: Collection[str]) -> "PlainPrompt":
        """Raises InvalidRequest for a column that the table does not have, and for a single
        brace."""
        parts, here = [""], 0
        while here < len(text):
            sign = text[here]
            if sign not in "{}":
                end = min((at for at in (text.find("{", here), text.find("}", here)) if at >= 0),
                          default=len(text))  # fmt: skip
                parts[-1] += text[here:end]
                here = end
            elif text[here : here + 2] == sign * 2:
                parts[-1] += sign
                here += 2
            else:
                name, here = _named(text, here)
                parts += [_checked(name, columns), ""]
        return cls(tuple(parts))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.parts[1::2]

    @property
    def has_row(self) -> bool:
        return ROW in self.columns

    def render(self, cells: Cells, fields: Sequence[str]) -> str:
        """See Prompt."""
        found = []
        for place, part in enumerate(self.parts):
            if not place % 2:
                found.append(part)
            else:
                found.append(row_text(cells, fields) if part == ROW else text_in(cells, part))
        return "".join(found)


def _named(text: str, begin: int) -> tuple[str, int]:
    """The name in braces that begins at `begin`, and where the text goes on."""
    end = text.find("}", begin)
    name = text[begin + 1 : end]
    if text[begin] == "}" or end < 0 or "{" in name:
        around = text[max(0, begin - 20) : begin + 20]
        reason = f"a single brace near {around!r}; write {{{{ or }}}} for a brace in the text"
        raise InvalidRequest("--prompt", reason)
    return name, end + 1


def _checked(name: str, columns: Collection[str]) -> str:
    if name == ROW:
        if ROW in columns:
            reason = "the table has a column 'row', so {row} could mean two things; rename it"
            raise InvalidRequest("--prompt", reason)
        return name
    if name not in columns:
        raise no_such_column("--prompt", name, columns)
    return name


def no_such_column(field: str, name: str, columns: Collection[str]) -> InvalidRequest:
    """The error for a column that the table does not have."""
    known = ", ".join(map(repr, sorted(columns)[:COLUMNS_SHOWN]))
    hint = did_you_mean(name, columns) or f" It has {known}."
    return InvalidRequest(field, f"the table has no column {name!r}.{hint}")


class JinjaPrompt:
    """A prompt that is a Jinja template, in a sandbox. Its variables are the columns, `row`, and
    `cells`, which has every cell by its column's name."""

    def __init__(self, source: str, columns: Collection[str]) -> None:
        """Raises InvalidRequest for a template that is not valid, and for variables that are not
        columns."""
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
            raise InvalidRequest("--prompt-file", reason) from None
        for name in sorted(names - {CELLS, ROW, *columns, *environment.globals}):
            raise no_such_column("--prompt-file", name, columns)
        if ROW in names and ROW in columns:
            reason = "the table has a column 'row', so `row` could mean two things; rename it"
            raise InvalidRequest("--prompt-file", reason)
        self._names = names & set(columns)
        self._reads_cells = CELLS in names - set(columns)
        self.has_row = ROW in names

    def render(self, cells: Cells, fields: Sequence[str]) -> str:
        """See Prompt."""
        variables: dict[str, object] = {name: _value(cells, name) for name in self._names}
        if self._reads_cells:
            variables[CELLS] = _CellView(cells)
        if self.has_row:
            variables[ROW] = row_text(cells, fields)
        return render_bounded(self._template, variables, "prompt", "the prompt's template")


class _CellView(Mapping[str, object]):
    """All cells of a row, for a template. Only the cells that it reads must be valid."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> object:
        return _value(self._cells, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _value(cells: Cells, name: str) -> object:
    """A cell as a template gets it: numbers, lists and objects as they are, other values as text;
    None for a cell without a value."""
    value = cells[name]
    if isinstance(value, str) or value is MISSING:
        return text_in(cells, name)
    return json_value(value)
