"""Writes down what an engine reports while a bench runs, to look at afterwards."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from mainstem.core import events
from mainstem.core.events import EventBus

KINDS: tuple[type[Any], ...] = (
    events.SequenceAdmitted,
    events.SequencePreempted,
    events.SequenceResumed,
    events.StepFinished,
    events.PagesLoaded,
    events.PagesPrefetched,
    events.PagesSaved,
    events.PagesEvicted,
    events.SavesSkipped,
)


class EventLog:
    """A JSON line for each event: its kind, its fields, and the seconds since the log was made
    (`at_s`)."""

    def __init__(self, file: TextIO | None) -> None:
        """None: nothing is written."""
        self._file = file
        self._began_s = perf_counter()

    @classmethod
    @contextmanager
    def to(cls, path: Path | None) -> Iterator["EventLog"]:
        """Append to a gzipped file."""
        if path is None:
            yield cls(None)
            return
        with gzip.open(path, "at", encoding="utf-8") as file:
            yield cls(file)

    def attach(self, bus: EventBus) -> None:
        for kind in KINDS:
            bus.subscribe(kind, self._note)

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line that is no event."""
        if self._file is not None:
            at_s = round(perf_counter() - self._began_s, 6)
            self._file.write(json.dumps({"kind": kind, "at_s": at_s, **values}) + "\n")

    def _note(self, event: Any) -> None:
        if self._file is not None:
            self.write(type(event).__name__, asdict(event))
