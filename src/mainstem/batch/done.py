"""Remembers, in little memory, what an earlier run wrote to an output, and finds stale entries."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from mainstem.batch.files import Line
from mainstem.batch.idset import IdSet
from mainstem.batch.marks import MARK, Marker
from mainstem.batch.rows import custom_id_of, parse_json
from mainstem.wire.errors import WireError

ENGINE_FAILED = "engine_failed"
FORM_LIMIT = "form_limit_reached"
MISSING_PACKAGE = "missing_package"
APP_NOT_FOUND = "app_not_found"
# errors caused by this machine or the command line, not by the row: --resume tries the row again
MACHINE_FAULTS = frozenset([ENGINE_FAILED, MISSING_PACKAGE, APP_NOT_FOUND])
OLD_MISSING_PACKAGE = "needs the package"  # the message in older outputs, which have no code for it


class State(Enum):
    """How an output line of an earlier run relates to this run."""

    FRESH = "fresh"
    UNKNOWN = "unknown"  # an older version of Mainstem wrote the line, without a mark
    CHANGED = "changed"  # its row asks something else now
    OTHER_MODEL = "other model"

    @property
    def is_stale(self) -> bool:
        return self in (State.CHANGED, State.OTHER_MODEL)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an output: the answer to a custom id, or the error of a line."""

    custom_id: str | None  # None for an error
    line: int | None  # None for an answer
    is_machine_fault: bool
    row_digest: str | None
    model_digest: str | None

    @property
    def name(self) -> str:
        return _answer_name(self.custom_id) if self.line is None else _error_name(self.line)


def read_entry(data: bytes) -> Entry:
    """Raises ValueError if this is not a line of a batch output."""
    try:
        row = json.loads(data)
        custom_id, error = row["custom_id"], row["error"]
        is_answer = row["response"] is not None and isinstance(custom_id, str)
        line = None if is_answer else int(error["line"])
        is_fault = not is_answer and (
            error.get("code") in MACHINE_FAULTS or OLD_MISSING_PACKAGE in str(error.get("message"))
        )
        mark = row.get(MARK) or {}
        row_digest, model_digest = mark.get("row"), mark.get("model")
    except (KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise ValueError(str(fault)) from None
    return Entry(custom_id if is_answer else None, line, is_fault, row_digest, model_digest)


@dataclass(slots=True)
class Done:
    """What an earlier run has written."""

    answered: IdSet = field(default_factory=IdSet)  # custom ids
    failed_lines: IdSet = field(default_factory=IdSet)  # line numbers as text
    num_answered: int = 0
    num_failed: int = 0
    num_machine_faults: int = 0  # failed lines whose error this machine caused
    num_bytes: int = 0  # of whole lines, unpacked
    models: Counter[str] = field(default_factory=Counter)  # number of lines by model digest
    _marks: IdSet = field(default_factory=IdSet)  # model digest, row digest and entry's name
    _unmarked: IdSet = field(default_factory=IdSet)  # names of entries without a mark

    def note(self, entry: Entry, num_bytes: int) -> None:
        """Add one whole line."""
        self.num_bytes += num_bytes
        if entry.line is None:
            self.answered.add(entry.custom_id or "")
            self.num_answered += 1
        else:
            self.failed_lines.add(str(entry.line))
            self.num_failed += 1
            self.num_machine_faults += entry.is_machine_fault
        if entry.row_digest is None or entry.model_digest is None:
            self._unmarked.add(entry.name)
        else:
            self.models[entry.model_digest] += 1
            self._marks.add(f"{entry.model_digest} {entry.row_digest} {entry.name}")

    def answer_state(self, custom_id: str, row_digest: str, model: str) -> State:
        """How the answer to this id relates to the row as it is now."""
        return self._state(_answer_name(custom_id), row_digest, model)

    def error_state(self, line: int, row_digest: str, model: str) -> State:
        """How the error of this line relates to the line as it is now."""
        return self._state(_error_name(line), row_digest, model)

    def _state(self, name: str, row_digest: str, model: str) -> State:
        if f"{model} {row_digest} {name}" in self._marks:
            return State.FRESH
        if name in self._unmarked:
            return State.UNKNOWN
        others = (other for other in self.models if other != model)
        is_same_row = any(f"{other} {row_digest} {name}" in self._marks for other in others)
        return State.OTHER_MODEL if is_same_row else State.CHANGED


@dataclass(slots=True)
class Stale:
    """Entries of an output whose rows must be answered again."""

    names: IdSet = field(default_factory=IdSet)
    counts: Counter[State] = field(default_factory=Counter)

    def note(self, name: str, state: State) -> None:
        if state.is_stale:
            self.names.add(name)
            self.counts[state] += 1

    def has(self, entry: Entry) -> bool:
        return entry.name in self.names


def find_stale(lines: Iterable[Line], marker: Marker, done: Done) -> Stale:
    """The entries of an output whose rows changed, or that another model made."""
    stale, seen = Stale(), IdSet()
    for line in lines:
        if line.data is not None and not line.data.strip():
            continue
        digest, custom_id, is_new = marker.of_line(line), "", False
        try:
            row = parse_json(line)
            digest = marker.of_row(row)
            custom_id = custom_id_of(row, line.number)
            is_new = seen.add(custom_id)
        except WireError:
            pass  # the output may have an error for this line number
        if str(line.number) in done.failed_lines:
            state = done.error_state(line.number, digest, marker.model)
            stale.note(_error_name(line.number), state)
        if is_new and custom_id in done.answered:
            state = done.answer_state(custom_id, digest, marker.model)
            stale.note(_answer_name(custom_id), state)
    return stale


def _answer_name(custom_id: str | None) -> str:
    return f"answer {custom_id}"


def _error_name(line: int) -> str:
    return f"error {line}"
