"""Lines -> windows: as many tokenised rows as are planned together.

    InputFile -> JSON -> duplicates and rows that are done -> RowParser -> tokenizer -> Window

A window is bounded in memory, so an input may be of any size.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mainstem.batch.answer_file import Done
from mainstem.batch.files import FileFault, InputFile, Line
from mainstem.batch.idset import IdSet
from mainstem.batch.rows import (
    Chat,
    Prompt,
    Row,
    RowError,
    RowParser,
    custom_id_of,
    parse_json,
)
from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.text.tokenizer import Tokenizer

ROW_BYTES = 1024  # what a row takes beside its tokens
TOKEN_BYTES = 24  # a token id, its copy, and what planning needs for it
ROWS_AT_ONCE = 256  # tokenised together
CHARS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Failure:
    """A line that cannot be answered."""

    line: int
    custom_id: str | None
    error: RowError


@dataclass(slots=True)
class Window:
    """Rows in the order of their lines, and the lines among them that failed."""

    rows: list[Row]
    prompts: Prompts
    failures: list[Failure]
    num_skipped: int  # done by an earlier run
    num_rows_read: int  # since the beginning, with failures and skipped ones
    progress: float | None  # of the input's bytes; None where its size is not known


@dataclass(slots=True)
class _Draft:
    """A window that is being filled."""

    rows: list[Row] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    sizes: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    num_skipped: int = 0
    num_seen: int = 0

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES * self.num_seen + TOKEN_BYTES * len(self.token_ids)

    def add(self, row: Row, token_ids: "array[int]") -> None:
        self.rows.append(row)
        self.token_ids += token_ids
        self.sizes.append(len(token_ids))


class WindowReader:
    """Makes windows of at most about `window_bytes` from the lines of an input."""

    def __init__(
        self,
        source: InputFile,
        tokenizer: Tokenizer,
        parser: RowParser,
        done: Done,
        max_model_len: int,
        window_bytes: int,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._parser = parser
        self._done = done
        self._max_model_len = max_model_len
        self._window_bytes = window_bytes
        self._seen = IdSet()
        self._num_rows = 0

    def __iter__(self) -> Iterator[Window]:
        draft = _Draft()
        waiting: list[tuple[Row, Prompt]] = []
        num_chars = 0
        fault: FileFault | None = None
        try:
            for line in self._source:
                if line.data is not None and not line.data.strip():
                    continue
                self._num_rows += 1
                draft.num_seen += 1
                parsed = self._parse(line, draft)
                if parsed is not None:
                    waiting.append(parsed)
                    num_chars += len(line.data or b"")
                if len(waiting) == ROWS_AT_ONCE or num_chars > CHARS_AT_ONCE:
                    self._tokenize(waiting, draft)
                    waiting, num_chars = [], 0
                if not waiting and draft.num_bytes >= self._window_bytes:
                    yield self._window(draft)
                    draft = _Draft()
        except FileFault as error:
            fault = error  # the rows before it can be answered
        self._tokenize(waiting, draft)
        if draft.num_seen:
            yield self._window(draft)
        if fault is not None:
            raise fault

    def _window(self, draft: _Draft) -> Window:
        starts = np.zeros(len(draft.sizes) + 1, dtype=np.int64)
        np.cumsum(draft.sizes, out=starts[1:])
        prompts = Prompts(np.frombuffer(draft.token_ids, dtype=np.int32), starts)
        failures = sorted(draft.failures, key=lambda failure: failure.line)
        progress = self._source.progress
        return Window(draft.rows, prompts, failures, draft.num_skipped, self._num_rows, progress)

    def _parse(self, line: Line, draft: _Draft) -> tuple[Row, Prompt] | None:
        """What a line asks; None where it failed or was done before, which `draft` notes."""
        custom_id: str | None = None
        try:
            row = parse_json(line)
            custom_id = custom_id_of(row, line.number)
            is_new = self._seen.add(custom_id)
            if str(line.number) in self._done.failed_lines:
                draft.num_skipped += 1
                return None
            if not is_new:
                reason = f"the custom_id {custom_id!r} was used on an earlier line"
                raise RowError("duplicate_custom_id", reason, "custom_id")
            if custom_id in self._done.answered:
                draft.num_skipped += 1
                return None
            return self._parser.parse(row, line.number, custom_id)
        except RowError as error:
            self._fail(draft, line.number, custom_id, error)
            return None

    def _fail(
        self, draft: _Draft, line_number: int, custom_id: str | None, error: RowError
    ) -> None:
        if str(line_number) in self._done.failed_lines:
            draft.num_skipped += 1
        else:
            draft.failures.append(Failure(line_number, custom_id, error))

    def _tokenize(self, waiting: list[tuple[Row, Prompt]], draft: _Draft) -> None:
        texts = iter(self._encode_all([text for _, text in waiting if isinstance(text, str)]))
        for row, prompt in waiting:
            try:
                if isinstance(prompt, str):
                    ids = self._checked(next(texts))
                elif isinstance(prompt, Chat):
                    ids = self._checked(self._encode_chat(prompt))
                else:
                    ids = self._checked(prompt)
            except RowError as error:
                self._fail(draft, row.line, row.custom_id, error)
            else:
                draft.add(row, ids)

    def _encode_all(self, texts: list[str]) -> list[list[int] | RowError]:
        """Ids of each text; one that is not valid does not spoil the others."""
        try:
            return [*self._tokenizer.encode_batch(texts)]
        except InvalidRequest as error:
            if len(texts) > 1:
                return [found for text in texts for found in self._encode_all([text])]
            return [RowError("invalid_value", str(error), error.field)]

    def _encode_chat(self, chat: Chat) -> list[int] | RowError:
        try:
            return self._tokenizer.encode_chat(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                template_args=chat.template_args,
            )
        except InvalidRequest as error:
            return RowError("invalid_value", str(error), error.field)

    def _checked(self, ids: "list[int] | array[int] | RowError") -> "array[int]":
        if isinstance(ids, RowError):
            raise ids
        if not ids:
            raise RowError("invalid_value", "prompt: must hold at least one token", "prompt")
        if len(ids) >= self._max_model_len:
            reason = (
                f"the prompt's {len(ids)} tokens leave no room for an answer in the context of "
                f"{self._max_model_len}"
            )
            raise RowError("prompt_too_long", reason, "prompt")
        return ids if isinstance(ids, array) else array("i", ids)
