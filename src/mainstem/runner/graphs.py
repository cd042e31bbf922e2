"""CUDA graphs of decode steps, one per padded batch size."""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from mainstem.core.step import Step

# A larger batch keeps the device busy for longer than its launches take.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 512, 32), *range(512, 1025, 64))


class DecodeGraphs:
    """Captures a pass per size at the start; a step replays the smallest that holds it.

    What a pass reads must lie in buffers that stay: a graph remembers addresses.
    """

    def __init__(self, sizes: tuple[int, ...], run: Callable[[int], None]) -> None:
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            run(size)  # compiles and chooses algorithms, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(size)
            pool = graph.pool()
            self._graphs[size] = graph

    def size_for(self, step: Step) -> int | None:
        """The size to replay, None where the step is not of decodes alone or too large."""
        tokens = step.num_tokens
        if tokens != step.num_decodes or tokens > self._sizes[-1]:
            return None
        if len(step.copy_to) or len(step.move_to):
            return None
        if len(step.sample_rows) != tokens or len(step.prompt_logprob_rows):
            return None
        if not np.array_equal(step.sample_rows, np.arange(tokens)):
            return None
        return self._sizes[bisect_left(self._sizes, tokens)]

    def replay(self, size: int) -> None:
        self._graphs[size].replay()
