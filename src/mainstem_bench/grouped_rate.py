"""Measures the speed of the vendor's library for the products of all experts of a layer, each with
many rows."""

import time

import torch

from mainstem.models.spec import ExpertsSpec, ModelSpec

ROWS = 512  # rows per expert
_RUNS = 20


def grouped_flops_per_s(spec: ModelSpec) -> float | None:
    """Return the FLOP/s of gate, up and down with `ROWS` rows per expert, in bf16; None without
    experts or a GPU."""
    mlp = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)), None)
    if mlp is None or not torch.cuda.is_available():
        return None
    experts, hidden, size = mlp.num_experts, spec.hidden_size, mlp.size

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    x, act = some(ROWS * experts, hidden), some(ROWS * experts, size)
    first, down = some(experts, 2 * size, hidden), some(experts, hidden, size)
    ends = torch.arange(ROWS, ROWS * experts + 1, ROWS, device="cuda", dtype=torch.int32)

    def run() -> None:
        torch._grouped_mm(x, first.transpose(1, 2), offs=ends)
        torch._grouped_mm(act, down.transpose(1, 2), offs=ends)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_RUNS):
        run()
    torch.cuda.synchronize()
    flops = 2 * 3 * hidden * size * ROWS * experts * _RUNS
    return flops / (time.perf_counter() - began)
