"""The progress bar of a batch job."""

import sys
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from mainstem.batch.summary import Summary

LOG_INTERVAL_S = 30.0  # where nobody watches


class JobBar:
    """Rows done, requests/s, tokens/s, saving so far and time left, on standard error.

    The total is unknown at first; as windows are read it is guessed from the bytes of the input,
    and it is exact once all was read.
    """

    def __init__(self, summary: Summary, is_shown: bool) -> None:
        self._summary = summary
        self._bar: tqdm[NoReturn] | None = None
        if is_shown:
            interval_s = 0.1 if sys.stderr.isatty() else LOG_INTERVAL_S
            self._bar = tqdm(unit="req", dynamic_ncols=True, mininterval=interval_s)

    def show_window(self, num_rows_read: int, num_skipped: int, progress: float | None) -> None:
        """A window was read; rows that were done before count as there from the start."""
        if self._bar is None:
            return
        self._bar.initial += num_skipped
        self._bar.n += num_skipped
        if progress:
            self._bar.total = round(num_rows_read / progress)
        self._bar.refresh()

    def show_row(self) -> None:
        """A row was written."""
        if self._bar is None:
            return
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        speed = self._summary.counters.generated_tokens / elapsed
        text = f"{speed:.0f} tok/s, {self._summary.saving_ratio:.0%} of prompts saved"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()

    def __enter__(self) -> "JobBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            if error is None and self._summary.is_complete:
                self._bar.total = self._bar.n
            self._bar.close()
