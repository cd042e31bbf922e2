"""CUDA graphs of steps, several per padded size, in pieces of a few layers.

A step that needs pages still being loaded waits for them between the pieces. Small steps also have
graphs without the attention launches that decodes often do not need.

Some pieces are no graphs, but run in each step: recurrences over prompts, whose launches depend on
how a step's tokens are divided among its sequences.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mainstem.core.step import Step
from mainstem.kernels.attention.plan import Launches
from mainstem.models.block import Gate
from mainstem.models.spec import ExpertsSpec, ModelSpec
from mainstem.runner.gates import LAYERS_AT_ONCE

GRAPH_SIZES = (
    1, 2, 4, 8, 16, 24, 32, 48, *range(64, 512, 32), *range(512, 2049, 64), *range(2176, 4097, 128)
)  # fmt: skip
FEW_TOKENS = 1024  # every model has graphs up to this size
# Seconds that the host of an H200 needs to launch a layer. Measured: 12.5 ms for 32 dense layers;
# 52 ms for 48 layers with experts, before launches became a quarter cheaper. A hybrid's layers have
# about half as many launches more. The card's products run at 600 TFLOP/s.
_DENSE_LAUNCH_S, _EXPERTS_LAUNCH_S, _RECURRENT_LAUNCH_S = 0.4e-3, 0.8e-3, 0.3e-3
_WEIGHTS_PER_S = 3e14  # weights x tokens a second, at 2 FLOP each
# Leaving out launches saves a few microseconds a layer, which does not matter in larger steps.
MOST_TOKENS_OF_FEWER = 256


def graph_sizes(spec: ModelSpec, max_tokens: int) -> tuple[int, ...]:
    """The sizes to capture, up to `max_tokens`: all up to FEW_TOKENS, and those of steps that take
    longer to launch than to compute. A larger step keeps the device busy while the host launches.

    Llama-3.1-8B: up to 1,024 tokens, Llama-3.2-1B: 1,920, Qwen3-30B-A3B and Qwen3.6-35B-A3B: 4,096.
    """
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)
    launch_s = _EXPERTS_LAUNCH_S if has_experts else _DENSE_LAUNCH_S
    if spec.recurrences:
        launch_s += _RECURRENT_LAUNCH_S
    launch_bound = spec.num_layers * launch_s * _WEIGHTS_PER_S / spec.num_layer_params
    most = min(max_tokens, max(launch_bound, FEW_TOKENS))
    return tuple(size for size in GRAPH_SIZES if size <= most)


def prompt_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of the sizes that graphs of prompts have in models with recurrent layers. A prompt of
    this many tokens may be computed in half the time of its launches; fewer sizes start sooner."""
    return tuple(size for size in sizes if size % 256 == 0 or size in (64, 128))


class Piece(NamedTuple):
    """A part of a pass that can be run again. What it reads and writes has fixed addresses."""

    run: Callable[[], None]
    layers: range  # those whose attention it runs
    is_captured: bool = True


class StepGraphs:
    """Captures passes of each size at the start; a step replays the smallest that is large enough.

    A pass must read from fixed buffers: a graph remembers addresses.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        kinds: tuple[Launches, ...],
        pieces_of: Callable[[int, Launches], Sequence[Piece]],
        page_layers: Sequence[int | None],
        *,
        beside: "StepGraphs | None" = None,
    ) -> None:
        """The first of the `kinds` works for any step. `pieces_of(size, launches)` returns the
        pieces in order. `page_layers` is that of the recipe; `beside`: graphs whose memory these
        share.
        """
        self._page_layers = page_layers
        self._sizes = sizes
        self._all = kinds[0]
        self._graphs: dict[tuple[int, Launches], list[_Replay]] = {}
        # torch's handle of the memory that all graphs share
        self._pool: Any = None if beside is None else beside._pool
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            for launches in kinds if size <= MOST_TOKENS_OF_FEWER else kinds[:1]:
                self._graphs[size, launches] = self._capture(pieces_of(size, launches))

    def _capture(self, pieces: Sequence[Piece]) -> "list[_Replay]":
        # the first run compiles kernels and chooses algorithms; a capture must not do so
        for piece in pieces:
            piece.run()
        torch.cuda.synchronize()
        return [self._captured(piece) for piece in pieces]

    def _captured(self, piece: Piece) -> "_Replay":
        # layers of pages arrive in groups: each piece waits for those that begin in it
        numbers = [self._page_layers[layer] for layer in piece.layers]
        awaited = [n for n in numbers if n is not None and n % LAYERS_AT_ONCE == 0]
        if not piece.is_captured:
            return _Replay(awaited, piece.run)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may query its events during the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            piece.run()
        self._pool = graph.pool()
        return _Replay(awaited, graph.replay)

    def size_for(self, step: Step) -> int | None:
        """The size to replay; None if the step is too large or needs work that no graph has. Copies
        run before the pass, so they must not read what the step itself writes."""
        if len(step.move_to) or step.weighings:
            return None
        if len(step.copy_to) and _reads_its_own(step):
            return None
        if not self._sizes or step.num_tokens > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, step.num_tokens)]

    def replay(self, size: int, launches: Launches, gate: Gate) -> None:
        """Queue a pass that has at least these launches. Before each piece, the gate waits until
        the first layer of the piece may run.
        """
        for piece in self._graphs.get((size, launches)) or self._graphs[size, self._all]:
            for layer in piece.awaited:
                gate.before(layer)
            piece.run()


class _Replay(NamedTuple):
    """A piece of a captured pass."""

    awaited: list[int]  # layers of pages that it waits for
    run: Callable[[], None]


def _reads_its_own(step: Step) -> bool:
    """Whether a copy reads a slot that this step writes, or that is loaded while the step runs."""
    return bool(len(step.load_ids)) or bool(np.isin(step.copy_from, step.write_slots).any())
