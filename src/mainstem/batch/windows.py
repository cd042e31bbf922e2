"""Lines -> windows: as many tokenised rows as are planned together.

    InputFile -> JSON -> duplicates and rows that are done -> parse_row -> tokenizer -> Window

A window is bounded in memory, so an input may be of any size.
"""

import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np

from mainstem.batch.answer_file import Done
from mainstem.batch.files import FileFault, Line
from mainstem.batch.idset import IdSet
from mainstem.batch.rows import Row, custom_id_of, parse_json, parse_row
from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.text.encoding import App, Prompt, encode_prompt
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.calls import Call, CallParser
from mainstem.wire.errors import WireError, from_invalid

ROW_BYTES = 1024  # what a row takes beside its tokens
TOKEN_BYTES = 24  # a token id, its copy, and what planning needs for it
ROWS_AT_ONCE = 256  # tokenised together
CHARS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Failure:
    """A line that cannot be answered."""

    line: int
    custom_id: str | None
    error: WireError


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


class RowSource(Protocol):
    """Lines in order, and how much of them was read."""

    @property
    def progress(self) -> float | None: ...

    def __iter__(self) -> Iterator[Line]: ...


@dataclass(frozen=True, slots=True)
class RowReader:
    """How rows become calls and token ids; the same for a job, a server's batch and a plan.

    The tokenizer is loaded by the first row that needs it. `find_app` says which app a row is for;
    it raises WireError for one that is not there.
    """

    parser: CallParser
    load_tokenizer: Callable[[], Tokenizer]
    find_app: Callable[[Call], App | None] = lambda call: None
    max_model_len: int = sys.maxsize


class WindowReader:
    """Makes windows of at most about `window_bytes` from the lines of an input."""

    def __init__(self, source: RowSource, rows: RowReader, done: Done, window_bytes: int) -> None:
        self._source = source
        self._rows = rows
        self._done = done
        self._window_bytes = window_bytes
        self._seen = IdSet()
        self._num_rows = 0
        self.tokenize_s = 0.0

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
                raise WireError("duplicate_custom_id", reason, "custom_id")
            if custom_id in self._done.answered:
                draft.num_skipped += 1
                return None
            return parse_row(self._rows.parser, row, line.number, custom_id)
        except WireError as error:
            self._fail(draft, line.number, custom_id, error)
            return None

    def _fail(
        self, draft: _Draft, line_number: int, custom_id: str | None, error: WireError
    ) -> None:
        if str(line_number) in self._done.failed_lines:
            draft.num_skipped += 1
        else:
            draft.failures.append(Failure(line_number, custom_id, error))

    def _tokenize(self, waiting: list[tuple[Row, Prompt]], draft: _Draft) -> None:
        began_s = perf_counter()
        for (row, _), ids in zip(waiting, self._encode_all(waiting), strict=True):
            try:
                draft.add(row, self._checked(ids))
            except WireError as error:
                self._fail(draft, row.line, row.custom_id, error)
        self.tokenize_s += perf_counter() - began_s

    def _encode_all(self, waiting: list[tuple[Row, Prompt]]) -> "list[array[int] | WireError]":
        """Ids of each prompt, or why there are none; plain texts are encoded side by side."""
        found: list[array[int] | WireError | None] = [None] * len(waiting)
        texts: dict[int, str] = {}
        for place, (row, prompt) in enumerate(waiting):
            try:
                app = self._rows.find_app(row.call)
                if app is None and isinstance(prompt, str):
                    texts[place] = prompt
                elif app is None and isinstance(prompt, array):
                    found[place] = prompt
                else:
                    ids = encode_prompt(self._rows.load_tokenizer(), prompt, app)
                    found[place] = array("i", ids)
            except WireError as error:
                found[place] = error
            except InvalidRequest as error:
                found[place] = from_invalid(error)
        for place, read in zip(texts, self._encode_texts(list(texts.values())), strict=True):
            found[place] = read if isinstance(read, WireError) else array("i", read)
        return [item for item in found if item is not None]

    def _encode_texts(self, texts: list[str]) -> list[list[int] | WireError]:
        """Ids of each text; one that is not valid does not spoil the others."""
        if not texts:
            return []
        try:
            return [*self._rows.load_tokenizer().encode_batch(texts)]
        except InvalidRequest as error:
            if len(texts) > 1:
                return [found for text in texts for found in self._encode_texts([text])]
            return [from_invalid(error)]

    def _checked(self, ids: "array[int] | WireError") -> "array[int]":
        if isinstance(ids, WireError):
            raise ids
        if not ids:
            raise WireError("invalid_value", "prompt: must hold at least one token", "prompt")
        window = self._rows.max_model_len
        if len(ids) >= window:
            reason = f"the prompt's {len(ids)} tokens leave no room for an answer in the context of"
            raise WireError("prompt_too_long", f"{reason} {window}", "prompt")
        return ids
