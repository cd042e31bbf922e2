"""Progress of work that comes in named stages."""

from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm

Progress = Callable[[str, float], None]
"""Called with a stage (wait, download, check, convert or publish) and its progress, 0 to 1."""


def unseen(stage: str, done: float) -> None:
    """A Progress that shows nothing."""


class StageBar:
    """A bar per stage on standard error; a stage that ends immediately shows none."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, stage: str, done: float) -> None:
        """`done` goes from 0 to 1 within a stage."""
        if stage != self._stage:
            self._close(is_done=True)
            self._stage = stage
        if self._bar is None and done < 1.0:
            form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}"
            self._bar = tqdm(total=1.0, desc=stage, bar_format=form, dynamic_ncols=True)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def __enter__(self) -> "StageBar":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._close(is_done=error is None)

    def _close(self, is_done: bool) -> None:
        if self._bar is not None:
            if is_done:  # work that needed fewer parts than expected
                self._bar.update(1.0 - self._bar.n)
            self._bar.close()
            self._bar = None
