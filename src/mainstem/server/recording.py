"""Keeps what is asked of the engine, for `mainstem bench replay`: token ids and times, no text."""

from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from time import monotonic

import msgspec

from mainstem.core.errors import ConfigError
from mainstem.core.request import Request


class Recorder:
    """Appends one line of JSON for each prompt to a file. Lives on the event loop."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            self._file: BufferedWriter = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None
        self._began_s = monotonic()

    def note(self, asked_s: float, requests: Sequence[Request]) -> None:
        """Prompts that were asked for at a moment of the monotonic clock."""
        for request in requests:
            entry = {
                "at_s": round(asked_s - self._began_s, 6),
                "max_tokens": request.sampling.max_tokens,
                "prompt_ids": request.prompt_ids.tolist(),
            }
            self._file.write(msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        self._file.close()
