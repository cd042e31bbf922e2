"""CUDA graphs without a card: replaying a recording repeats the recorded calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from mainstem.kernels.attention.plan import Launches
from mainstem.runner.graphs import Piece

PiecesOf = Callable[[int, Launches], Sequence[Piece]]


class Recording:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def pool(self) -> str:
        return "the pool"

    def replay(self) -> None:
        for call in self.calls:
            call()


class Recorder:
    """Stands in for the parts of torch.cuda that capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._current: Recording | None = None
        self.num_captured = 0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    @contextmanager
    def _graph(self, graph: Recording, pool: str | None, capture_error_mode: str) -> Iterator[None]:
        assert self._current is None, "a capture is already running"
        assert capture_error_mode == "thread_local", (
            "the mode must allow other threads to call CUDA"
        )
        self._current = graph
        self.num_captured += 1
        yield
        self._current = None

    def wrap(self, pieces_of: PiecesOf) -> PiecesOf:
        """Returns pieces that are recorded instead of run while a graph is captured."""

        def wrapped(piece: Piece) -> Piece:
            def run() -> None:
                if self._current is None:
                    piece.run()
                else:
                    self._current.calls.append(piece.run)

            return piece._replace(run=run)

        return lambda size, launches: [wrapped(piece) for piece in pieces_of(size, launches)]
