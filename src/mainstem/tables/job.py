"""A prompt for every row of a table: what a caller wishes, and the batch job that comes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mainstem.core.errors import InvalidRequest
from mainstem.tables.asking import (
    Asking,
    ChoiceAnswer,
    SchemaAnswer,
    TextAnswer,
    check_columns,
    is_cheaper_scored,
)
from mainstem.tables.fields import (
    FieldOrder,
    Reorder,
    TableReader,
    checked_fields,
    count_rows,
    order_fields,
    scan,
)
from mainstem.tables.prompts import JinjaPrompt, PlainPrompt, Prompt
from mainstem.tables.rows import TableRows, Wording
from mainstem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of every row; either `prompt` or `template` is given."""

    prompt: str | None = None  # with {column} in it
    template: str | None = None  # Jinja
    system: str | None = None
    is_chat: bool = True
    fields: Sequence[str] | None = None
    reorder: Reorder = Reorder.COLUMNS
    answer: str = "answer"
    schema: object = None
    choices: Sequence[str] | None = None
    may_score: bool = True


def wish_for(
    prompt: str | None, *, chat: bool = True, reorder: str = "columns", **others: Any
) -> Wish:
    """What the arguments of `mainstem.map` ask; `others` are fields of a Wish. Raises
    InvalidRequest for an unknown `reorder`."""
    try:
        kind = Reorder(reorder)
    except ValueError:
        known = ", ".join(each.value for each in Reorder)
        raise InvalidRequest("reorder", f"must be one of {known}, got {reorder!r}") from None
    return Wish(prompt, is_chat=chat, reorder=kind, **others)


class TableJob:
    """A table, and what is asked of its rows. `prepare` comes before everything else."""

    def __init__(self, table: TableReader, wish: Wish) -> None:
        """Raises InvalidRequest for whatever is wrong with the call, before a model is needed."""
        self._table, self._wish = table, wish
        self._prompt = _prompt(wish, table.columns)
        fields = checked_fields(wish.fields, table.columns)
        self._fields = fields if self._prompt.has_row else ()
        if wish.system is not None and not wish.is_chat:
            raise InvalidRequest("--system", "needs a chat; put the text into the prompt")
        if not wish.answer:
            raise InvalidRequest("--answer", "must not be empty")
        self.asking = _asking(wish, wish.may_score)
        check_columns(self.asking, wish.answer, table.columns)
        self._encode: Callable[[str], list[int]] | None = None
        self.order = FieldOrder([()])
        self.num_rows = 0

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Read the table once: its number of rows, and the order of its fields."""
        self._encode = None if self._wish.is_chat else tokenizer.encode_as_text
        if self._wish.choices is not None:
            is_scored = is_cheaper_scored(self._wish.choices, tokenizer.encode_plain)
            self.asking = _asking(self._wish, self._wish.may_score and is_scored)
        if not self._fields:
            self.num_rows = count_rows(self._table)
            return
        self.num_rows, columns = scan(self._table, self._fields, tokenizer)
        self.order = order_fields(self._fields, columns, self._wish.reorder)

    def rows(self, order: FieldOrder | None = None) -> TableRows:
        """The rows as lines of a batch job; with another order of fields if one is given."""
        wording = Wording(self._prompt, self.asking, self._wish.system, self._encode)
        return TableRows(self._table, wording, order or self.order, self.num_rows)


def _prompt(wish: Wish, columns: Sequence[str]) -> Prompt:
    """The prompt, with the list of fields after it if fields are named and it has no {row}."""
    if (wish.prompt is None) is (wish.template is None):
        raise InvalidRequest("--prompt", "either a prompt or a template must be given")
    found: Prompt
    if wish.template is not None:
        found = JinjaPrompt(wish.template, columns)
        if wish.fields is not None and not found.has_row:
            found = JinjaPrompt(wish.template + "\n\n{{ row }}", columns)
        return found
    text = wish.prompt or ""
    if not text.strip():
        raise InvalidRequest("--prompt", "must not be empty")
    found = PlainPrompt.parse(text, columns)
    if wish.fields is not None and not found.has_row:
        found = PlainPrompt.parse(text + "\n\n{row}", columns)
    return found


def _asking(wish: Wish, is_scored: bool) -> Asking:
    if wish.schema is not None and wish.choices is not None:
        raise InvalidRequest("--choices", "cannot be combined with a schema")
    if wish.choices is not None:
        return ChoiceAnswer(wish.choices, is_scored, wish.answer)
    if wish.schema is not None:
        return SchemaAnswer(wish.schema, wish.answer)
    return TextAnswer(wish.answer)
