"""CUDA graphs of small steps, one per padded size, in pieces of a few layers.

A step with pages on their way waits between the pieces, as it would between the layers.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from mainstem.core.step import Step
from mainstem.models.decoder import Gate
from mainstem.runner.gates import LAYERS_AT_ONCE

# A larger step keeps the device busy for longer than its launches take.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 512, 32), *range(512, 1025, 64))


class StepGraphs:
    """Captures a pass per size at the start; a step replays the smallest that holds it.

    What a pass reads must lie in buffers that stay: a graph remembers addresses.
    """

    def __init__(
        self, sizes: tuple[int, ...], pieces_of: Callable[[int], Sequence[Callable[[], None]]]
    ) -> None:
        """`pieces_of(size)`: what runs LAYERS_AT_ONCE layers each, one piece after the other."""
        self._sizes = sizes
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        pool = None
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            pieces = pieces_of(size)
            for piece in pieces:  # compiles and chooses algorithms, which a capture must not
                piece()
            torch.cuda.synchronize()
            self._graphs[size] = []
            for piece in pieces:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    piece()
                pool = graph.pool()
                self._graphs[size].append(graph)

    def size_for(self, step: Step) -> int | None:
        """The size to replay, None where the step is too large or does what no graph holds."""
        if len(step.copy_to) or len(step.move_to):
            return None
        if not self._sizes or step.num_tokens > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, step.num_tokens)]

    def replay(self, size: int, gate: Gate) -> None:
        """Queue the pass; each piece behind what the gate says of its first layer."""
        for index, graph in enumerate(self._graphs[size]):
            gate.before(index * LAYERS_AT_ONCE)
            graph.replay()
