"""Makes windows from lines: a window holds tokenised rows that are planned together.

    InputFile -> JSON -> duplicates and rows that are done -> parse_row -> tokenizer -> Window

A window is bounded in memory, so an input may be of any size.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import numpy as np

from mainstem.batch.done import Done, State
from mainstem.batch.files import FileFault, Line
from mainstem.batch.idset import IdSet
from mainstem.batch.marks import Marker
from mainstem.batch.rows import Row, custom_id_of, parse_json, parse_row
from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.text.encoding import App, Prompt, PromptTooLong, begin_prompt
from mainstem.text.scoring import encode_scoring
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.calls import Call
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.errors import WireError, from_invalid

ROW_BYTES = 1024  # memory of a row besides its tokens
TOKEN_BYTES = 24  # memory of a token: its id, a copy, and what planning needs
ROWS_AT_ONCE = 256  # tokenised together
CHARS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Failure:
    """A line that cannot be answered."""

    line: int
    custom_id: str | None
    error: WireError
    digest: str = ""  # like Row.digest


@dataclass(slots=True)
class Window:
    """Rows in the order of their lines, and the lines that failed."""

    rows: list[Row]
    prompts: Prompts
    failures: list[Failure]
    num_skipped: int  # done by an earlier run
    num_rows_read: int  # since the beginning, including failed and skipped ones
    progress: float | None  # share of the input's bytes read; None if its size is not known
    states: Counter[State] = field(default_factory=Counter)  # states of the skipped rows


@dataclass(slots=True)
class _Draft:
    """A window that is being filled."""

    rows: list[Row] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    sizes: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    num_skipped: int = 0
    states: Counter[State] = field(default_factory=Counter)
    num_seen: int = 0

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES * self.num_seen + TOKEN_BYTES * len(self.token_ids)

    def add(self, row: Row, token_ids: "array[int]") -> None:
        self.rows.append(row)
        self.token_ids += token_ids
        self.sizes.append(len(token_ids))


class RowSource(Protocol):
    """Lines in order, and the progress of reading them."""

    @property
    def progress(self) -> float | None: ...

    def __iter__(self) -> Iterator[Line]: ...


@dataclass(frozen=True, slots=True)
class RowReader:
    """What turns rows into calls and token ids, for jobs, batches of a server and plans. The
    tokenizer is loaded when the first row needs it. `find_app` returns the app of a row, or raises
    WireError if the app is unknown. `marker` is for outputs that can be resumed. `find_salt`
    returns a row's salt: only requests with the same salt find the row's encoded texts
    (text/part_cache.py).
    """

    parser: CallParser
    load_tokenizer: Callable[[], Tokenizer]
    find_app: Callable[[Call], App | None] = lambda call: None
    max_model_len: int = sys.maxsize
    marker: Marker | None = None
    find_salt: Callable[[Call], bytes] = lambda call: b""


class WindowReader:
    """Makes windows of at most about `window_bytes` from the lines of an input."""

    def __init__(self, source: RowSource, rows: RowReader, done: Done, window_bytes: int) -> None:
        self._source = source
        self._rows = rows
        self._done = done
        self._window_bytes = window_bytes
        self._seen = IdSet()
        self.num_rows = 0  # read so far; read by other threads
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
                self.num_rows += 1
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
            fault = error  # raised after the rows before it were returned
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
        return Window(
            rows=draft.rows,
            prompts=prompts,
            failures=failures,
            num_skipped=draft.num_skipped,
            states=draft.states,
            num_rows_read=self.num_rows,
            progress=progress,
        )

    def _parse(self, line: Line, draft: _Draft) -> tuple[Row, Prompt] | None:
        """The row of a line; None if it failed or was done before, which is recorded in `draft`."""
        custom_id: str | None = None
        marker, done, digest = self._rows.marker, self._done, ""
        try:
            row = parse_json(line)
            if marker is not None:
                digest = marker.of_row(row)
            custom_id = custom_id_of(row, line.number)
            is_new = self._seen.add(custom_id)
            if str(line.number) in done.failed_lines:
                self._skip(draft, done.error_state(line.number, digest, self._model))
                return None
            if not is_new:
                reason = f"the custom_id {custom_id!r} was used on an earlier line"
                raise WireError("duplicate_custom_id", reason, "custom_id")
            if custom_id in done.answered:
                self._skip(draft, done.answer_state(custom_id, digest, self._model))
                return None
            return parse_row(self._rows.parser, row, line.number, custom_id, digest)
        except WireError as error:
            if marker is not None and not digest:
                digest = marker.of_line(line)
            self._fail(draft, Failure(line.number, custom_id, error, digest))
            return None

    @property
    def _model(self) -> str:
        return "" if self._rows.marker is None else self._rows.marker.model

    def _skip(self, draft: _Draft, state: State) -> None:
        draft.num_skipped += 1
        if self._rows.marker is not None:
            draft.states[state] += 1

    def _fail(self, draft: _Draft, failure: Failure) -> None:
        if str(failure.line) in self._done.failed_lines:
            state = self._done.error_state(failure.line, failure.digest, self._model)
            self._skip(draft, state)
        else:
            draft.failures.append(failure)

    def _tokenize(self, waiting: list[tuple[Row, Prompt]], draft: _Draft) -> None:
        began_s = perf_counter()
        for (row, prompt), ids in zip(waiting, self._encode_all(waiting), strict=True):
            try:
                if row.call.choices:
                    self._add_scored(row, prompt, draft)
                else:
                    draft.add(row, self._checked(ids))
            except WireError as error:
                self._fail(draft, Failure(row.line, row.custom_id, error, row.digest))
        self.tokenize_s += perf_counter() - began_s

    def _add_scored(self, row: Row, prompt: Prompt, draft: _Draft) -> None:
        """Add a row whose choices are scored; raises WireError."""
        tokenizer, most = self._rows.load_tokenizer(), self._rows.max_model_len - 1
        app = self._rows.find_app(row.call)
        try:
            salt = self._rows.find_salt(row.call)
            scoring = encode_scoring(tokenizer, prompt, row.call.choices, app, salt, most)
        except PromptTooLong as error:
            raise self._too_long(f"at least {error.least_tokens}") from None
        except InvalidRequest as error:
            raise from_invalid(error) from None
        ids = self._checked(array("i", scoring.context_ids))
        draft.add(replace(row, choices=tuple(scoring.choices)), ids)

    def _encode_all(self, waiting: list[tuple[Row, Prompt]]) -> "list[array[int] | WireError]":
        """Ids of each prompt, or the error. Plain texts are encoded in parallel. Contexts of
        choices are not encoded here, since they are encoded together with their choices."""
        found: list[array[int] | WireError | None] = [None] * len(waiting)
        texts: dict[int, str] = {}
        for place, (row, prompt) in enumerate(waiting):
            if row.call.choices:
                found[place] = array("i")
                continue
            try:
                app = self._rows.find_app(row.call)
                if app is None and isinstance(prompt, str):
                    self._check_size(prompt)
                    texts[place] = prompt
                elif app is None and isinstance(prompt, array):
                    found[place] = prompt
                else:
                    tokenizer, most = self._rows.load_tokenizer(), self._rows.max_model_len
                    salt = self._rows.find_salt(row.call)
                    begun = begin_prompt(tokenizer, prompt, app, salt=salt, max_tokens=most - 1)
                    found[place] = array("i", begun.pending.finish())
            except WireError as error:
                found[place] = error
            except PromptTooLong as error:
                found[place] = self._too_long(f"at least {error.least_tokens}")
            except InvalidRequest as error:
                found[place] = from_invalid(error)
        for place, read in zip(texts, self._encode_texts(list(texts.values())), strict=True):
            found[place] = read if isinstance(read, WireError) else array("i", read)
        return [item for item in found if item is not None]

    def _encode_texts(self, texts: list[str]) -> list[list[int] | WireError]:
        """Ids of each text; an invalid one does not affect the others."""
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
        if len(ids) >= self._rows.max_model_len:
            raise self._too_long(f"{len(ids)}")
        return ids

    def _check_size(self, text: str) -> None:
        """Refuse a text that is certainly too long, before it is encoded."""
        if len(text) >= self._rows.max_model_len:
            least = self._rows.load_tokenizer().least_tokens(text)
            if least >= self._rows.max_model_len:
                raise self._too_long(f"at least {least}")

    def _too_long(self, num_tokens: str) -> WireError:
        window = self._rows.max_model_len
        reason = f"the prompt has {num_tokens} tokens; an answer has no room in the context of"
        return WireError("prompt_too_long", f"{reason} {window} tokens", "prompt")
