"""Records requests to the engine for `mainstem bench replay`: token ids and times, no text."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from time import monotonic

import msgspec

from mainstem.core.errors import ConfigError
from mainstem.core.request import Request

log = logging.getLogger("mainstem.server")


class Recorder:
    """Writes one line of JSON for each prompt to a file, which is emptied first. Lives on the event
    loop."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file: BufferedWriter | None = os.fdopen(descriptor, "wb")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None
        self._began_s = monotonic()

    def note(self, asked_s: float, requests: Sequence[Request]) -> None:
        """Record prompts that arrived at this monotonic time."""
        if self._file is None:
            return
        for request in requests:
            entry = {
                "at_s": round(asked_s - self._began_s, 6),
                "max_tokens": request.sampling.max_tokens,
                "prompt_ids": request.prompt_ids.tolist(),
            }
            try:
                self._file.write(msgspec.json.encode(entry) + b"\n")
            except OSError as error:
                log.error("recording has stopped", extra={"facts": {"reason": str(error)}})
                self.close()
                return

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the disk may be full
                file.close()
