"""Prompts through one layer of the gated delta rule on a GPU: its two products and everything
between them, checked before it is timed. Part of `mainstem bench recurrent`.

The limit is the arithmetic of the two products at the card's sustained rate; the bar is LIMIT_SHARE
of it. Times by kernel are from a trace of the same calls; kernels overlap a little, so they may add
up to more than the whole layer.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mainstem.kernels.recurrent import gpu as kernels
from mainstem.kernels.recurrent.segments import Segments, make_segments
from mainstem.models.recurrence import DeltaSpec
from mainstem.plan.cost import H200
from mainstem_bench.kernel import Bench as AttentionBench
from mainstem_bench.profile import read_trace, self_us
from mainstem_bench.shapes import SHAPES

DTYPE = torch.bfloat16
DEVICE = "cuda"
LIMIT_SHARE = 0.5
TOLERANCE = 0.03  # largest error / largest value: bf16, over thousands of tokens
NUM_TIMED, WARM_UPS, NUM_TRACED = 7, 3, 5
EPS = 1e-6


@dataclass(frozen=True)
class PromptCase:
    """Prompts of these lengths in one step; `is_forked`: all start from one state."""

    name: str
    lengths: tuple[int, ...]
    is_forked: bool = False


PROMPT_CASES = (
    PromptCase("1 x 4,096", (4096,)),
    PromptCase("4 x 1,024", (1024,) * 4),
    PromptCase("54 x 30 to 120 after one state", tuple(map(int, np.linspace(30, 120, 54))), True),
)
PROMPT_SHAPES = ("qwen36-35b-a3b", "qwen36-27b")


def delta_spec(shape: str) -> DeltaSpec:
    found = next(spec for spec in SHAPES[shape].recurrences if isinstance(spec, DeltaSpec))
    return found


def limit_us(spec: DeltaSpec, hidden: int, tokens: int) -> float:
    """The time of the layer's two products at the card's sustained rate."""
    weights = hidden * (spec.first_width + spec.out_width)
    return 1e6 * 2 * tokens * weights / H200.flops_per_s


class PromptLayer:
    """One case on the card, with random numbers. `run` does what an engine does in a layer."""

    def __init__(self, case: PromptCase, spec: DeltaSpec, hidden: int) -> None:
        torch.manual_seed(0)
        seqs, tokens = len(case.lengths), sum(case.lengths)
        self.case, self.spec = case, spec
        self.segments = _segments(case)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=DEVICE, dtype=DTYPE) * scale

        heads, channels = spec.value_heads, spec.conv_channels
        self.x = draw(tokens, hidden)
        self.first_weight = draw(spec.first_width, hidden, scale=hidden**-0.5)
        self.out_weight = draw(hidden, spec.out_width, scale=spec.out_width**-0.5)
        self.conv_weight = draw(channels, spec.kernel, scale=spec.kernel**-0.5)
        self.a_log = torch.rand(heads, device=DEVICE)
        self.dt_bias = torch.full((heads,), -2.0, device=DEVICE)
        self.gain = torch.ones(spec.value_dim, device=DEVICE)
        # the last slot is the state that forked prompts read; each prompt writes one of its own
        self.conv = draw(seqs + 1, spec.kernel - 1, channels)
        matrix = torch.randn(seqs + 1, *spec.matrix_shape, device=DEVICE)
        self.matrix = matrix.mul_(0.1)
        self.first = draw(tokens, spec.first_width)
        self.mixed = draw(tokens, channels)
        self.out = draw(tokens, heads, spec.value_dim)
        self.answer = draw(tokens, hidden)

    def run(self) -> None:
        torch.mm(self.x, self.first_weight.T, out=self.first)
        self.run_between()
        torch.mm(self.out.view(len(self.out), -1), self.out_weight.T, out=self.answer)

    def run_between(self) -> None:
        inputs, gate, b, a = self._parts()
        kernels.convolve(
            inputs, self.conv_weight, None, self.segments, self.conv, self.mixed, activation=True
        )
        self.run_rule(b, a)
        out = self.out.view(len(self.out), -1)
        group = self.spec.value_dim
        kernels.gated_norm(out, gate, self.gain, EPS, out, group=group, gate_first=False)

    def run_rule(self, b: Tensor, a: Tensor) -> None:
        kernels.delta_rule(
            *self.heads(), a, b, self.a_log, self.dt_bias, self.segments, self.matrix, self.out
        )

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [tokens, heads, dim]."""
        spec, tokens = self.spec, len(self.mixed)
        keys = spec.key_heads * spec.key_dim
        q, k, v = torch.split(self.mixed, [keys, keys, spec.out_width], dim=1)
        return (
            q.view(tokens, -1, spec.key_dim),
            k.view(tokens, -1, spec.key_dim),
            v.view(tokens, -1, spec.value_dim),
        )

    def _parts(self) -> tuple[Tensor, ...]:
        spec, heads = self.spec, self.spec.value_heads
        return torch.split(self.first, [spec.conv_channels, spec.out_width, heads, heads], dim=1)

    def check(self) -> float:
        """Run the rule once; the largest error / the largest value of outputs and states, against
        fp32, token by token."""
        _, _, b, a = self._parts()
        old = self.matrix.clone()
        self.out.fill_(float("nan"))
        self.run_rule(b, a)
        group = self.spec.value_heads // self.spec.key_heads
        q, k, v = (part.float() for part in self.heads())
        q, k = (part * torch.rsqrt((part**2).sum(-1, keepdim=True) + EPS) for part in (q, k))
        q, k = (part.repeat_interleave(group, 1) for part in (q * self.spec.key_dim**-0.5, k))
        decays = -self.a_log.exp() * torch.nn.functional.softplus(a.float() + self.dt_bias)
        decays, beta = decays.exp(), b.float().sigmoid()
        right, states = torch.empty_like(v), old[self.segments.reads.long()]
        states[self.segments.reads < 0] = 0.0
        starts = self.segments.starts[:-1].long()
        lengths = torch.tensor(self.case.lengths, device=DEVICE)
        for index in range(max(self.case.lengths)):
            seqs = (lengths > index).nonzero()[:, 0]
            at = starts[seqs] + index
            state = states[seqs] * decays[at][..., None, None]
            u = v[at] - torch.einsum("shk,shkv->shv", k[at], state)
            state += k[at][..., None] * (u * beta[at][..., None])[:, :, None]
            right[at] = torch.einsum("shk,shkv->shv", q[at], state)
            states[seqs] = state
        pairs = ((self.out, right), (self.matrix[: len(starts)], states))
        return max(float((x.float() - y).abs().max() / y.abs().max()) for x, y in pairs)


def _segments(case: PromptCase) -> Segments:
    seqs = len(case.lengths)
    numbers = np.arange(seqs + 1, dtype=np.int32)
    starts = np.cumsum([0, *case.lengths]).astype(np.int32)
    reads = np.full(seqs, seqs if case.is_forked else -1, np.int32)
    return make_segments(starts, numbers[:-1], numbers, reads, 0, DEVICE)


def prompt_line(clock: AttentionBench, shape: str, case: PromptCase) -> dict[str, object]:
    """Check and time one case."""
    spec, hidden = delta_spec(shape), SHAPES[shape].hidden_size
    layer = PromptLayer(case, spec, hidden)
    layer.run()
    error = layer.check()
    if not error < TOLERANCE:
        raise AssertionError(f"{shape}, {case.name}: error {error}, allowed {TOLERANCE}")
    by_kernel = traced_us(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    us = clock.time_us(graph.replay, NUM_TIMED, WARM_UPS)
    limit = limit_us(spec, hidden, sum(case.lengths))
    return {
        "case": f"{shape}, prompts, {case.name}",
        "us": round(us, 1),
        "limit_us": round(limit, 1),
        "share": round(limit / us, 3),
        "is_within_bar": limit / us >= LIMIT_SHARE,
        "max_error": float(f"{error:.2g}"),
        "kernels": by_kernel,
    }


def traced_us(layer: PromptLayer) -> dict[str, float]:
    """Microseconds of each kernel of a layer; products of the library are `gemm`."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(NUM_TRACED):
            layer.run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        works = read_trace(path)
    return by_kernel_us(self_us(works), NUM_TRACED)


def by_kernel_us(spent: list[tuple[str, float]], num_runs: int) -> dict[str, float]:
    """Sum the time of each of our kernels in a run, and that of all others as `gemm`."""
    sums: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, own_us in spent:
        ours = re.fullmatch(r"_(\w+)_kernel", name)
        sums[ours[1] if ours else "gemm"] += own_us / num_runs
        calls[ours[1] if ours else "gemm"] += 1
    found = {f"{name} x{calls[name] // num_runs}": round(us, 1) for name, us in sums.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
