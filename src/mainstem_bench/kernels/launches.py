"""How long the host takes to launch a layer, without a card.

`python -m mainstem_bench.kernels.launches [SHAPE] [TOKENS]`: microseconds that the host needs for a
layer of a model's shape on Hopper, and that Triton needs for each of its launches. Nothing
is computed: weights are zeros that are never read, products of the vendor's library return at once,
and the driver's own part of a launch is left out (`no_launch.py`). Each number is the least of
many, since other processes only make it larger; it differs by a few per cent from run to run.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mainstem.core.config import Quantize
from mainstem.kernels import host, overlap
from mainstem.kernels.attention import ops
from mainstem.kernels.attention.plan import ALL_LAUNCHES
from mainstem.kernels.attention.tuning import SPLIT_TILES
from mainstem.kernels.experts import choose, hopper, route
from mainstem.models.block import OpenGate
from mainstem.models.gpu import experts
from mainstem.models.gpu.decoder import load_gpu_decoder
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.weights import RandomWeights, part_shape
from mainstem.runner.gpu import _one_key_each
from mainstem.runner.gpu_attention import GpuAttention, LayerSpans, SpanSettings
from mainstem.runner.gpu_inputs import InputBuffers
from mainstem.runner.gpu_pages import GpuPages
from mainstem_bench.kernels.no_launch import NoLaunch
from mainstem_bench.shapes import SHAPES

CPU = torch.device("cpu")
NUM_LAYERS = 2
PAGE_SIZE, NUM_PAGES = 16, 4096
ROUNDS = 2000


class _Zeros(RandomWeights):
    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        return torch.zeros(part_shape(tuple(shape), at), dtype=self.dtype)


class _Silent(NoLaunch):
    """Keeps nothing."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: None


def _pretend_to_be_hopper(head_dim: int) -> None:
    """Make a CPU choose the kernels and tiles that Hopper would use."""
    card: Any = SimpleNamespace(multi_processor_count=132)
    vars(torch.cuda)["get_device_properties"] = lambda _=None: card
    vars(torch)["mm"] = lambda x, columns, out: out
    vars(torch)["addmm"] = lambda bias, x, columns, out: out
    tiles, kernels = SPLIT_TILES[head_dim], ops._hopper()
    for module in (overlap, ops, route):
        vars(module)["can_overlap"] = lambda _: True
    for module in (choose, experts):
        vars(module)["hopper_kernels"] = lambda _: hopper
    vars(ops)["_with_kernel"] = lambda *_: (tiles, kernels)
    vars(ops)["INTERPRETER_PROGRAMS"] = 132


def _layers_of(name: str, tokens: int) -> Callable[[], None]:
    """Return a function that launches NUM_LAYERS layers of a step."""
    spec = replace(SHAPES[name], layers=SHAPES[name].layers[-NUM_LAYERS:])
    _pretend_to_be_hopper(spec.head_dim)
    dtype = torch.bfloat16
    space = Workspace.make(spec, tokens, dtype, CPU)
    decoder = load_gpu_decoder(
        _Zeros(dtype, CPU, 0), spec, space, quantize=Quantize.NONE, is_deterministic=False
    )
    limits = ops.AttentionLimits(tokens, max_pages=tokens, max_partials=5 * tokens)
    spans = LayerSpans(spec, SpanSettings(PAGE_SIZE, dtype, CPU, limits, None))
    pages = GpuPages(spec, NUM_PAGES, PAGE_SIZE, dtype, CPU)
    attention = GpuAttention(
        spec, pages, spans, space, decoder.head_norms, decoder.sinks, decoder.query_gains
    )
    attention.plan(_one_key_each(tokens), np.zeros(tokens, np.int32))
    attention.bind(InputBuffers(tokens, CPU).views(tokens), ALL_LAUNCHES)
    normed, gate = space.normed[:tokens], OpenGate()

    def run() -> None:
        decoder.run_layers(normed, tokens, None, (0, NUM_LAYERS), attention, gate)

    return run


def _least_us(run: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        begin = perf_counter()
        run()
        least = min(least, perf_counter() - begin)
    return least * 1e6


@torch.inference_mode()
def main(name: str, tokens: int) -> None:
    """Print the table."""
    driver.set_active(_Silent())
    run = _layers_of(name, tokens)
    run()  # compiles
    host.forget_constants()
    whole = _least_us(run) / NUM_LAYERS
    launch, calls = JITFunction.run, []

    def keep(kernel: Any, *args: Any, **options: Any) -> None:
        calls.append((kernel, args, options))

    JITFunction.run = keep
    run()
    of_a_layer = calls[: len(calls) // NUM_LAYERS]
    JITFunction.run = lambda *_, **__: None
    ours = _least_us(run) / NUM_LAYERS
    JITFunction.run = launch
    print(f"{name}, {tokens} tokens, Triton {triton.__version__}")
    print(f"{f'a layer, {len(of_a_layer)} launches':28}{whole:8.1f} us")
    print(f"{'  without Triton':28}{ours:8.1f}")
    for kernel, args, options in of_a_layer:
        alone = _least_us(lambda k=kernel, a=args, o=options: k.run(*a, **o))  # type: ignore[misc]
        print(f"{'  ' + kernel.__name__.strip('_'):28}{alone:8.1f}")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has other launches"
    name, tokens = (*sys.argv[1:], *("qwen3-30b-a3b", "4096")[len(sys.argv) - 1 :])
    main(name, int(tokens))
