"""Mixtures of experts on a card: timed at the shapes of three models, or checked against torch.

`PYTHONPATH=src:. python -m mainstem_bench.kernels.experts [--checks-only] [--seconds 60]
[--methods ours,hopper,library] [--json FILE]`

Prints one JSON line per number of tokens, in microseconds:

    products   both grouped products alone, by our kernels (`ours` and `hopper`, gate_up with its
               activation) and by torch._grouped_mm (`library`), with their `tflops`
    the rest   the routing, and the sum over experts
    layer      the whole layer, by the method of `choose` and by each method

`weights_us` is the time to read the weights of the experts in use at the card's speed. `busiest` is
the load of the busiest expert divided by the average. Inputs are used in turn, so that in small
steps the weights come from memory, not from the cache. --checks-only only checks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mainstem.cli.parser import Parser
from mainstem.kernels.dense.invariant import matmul
from mainstem.kernels.experts import reference
from mainstem.kernels.experts.choose import choose, hopper_kernels
from mainstem.kernels.experts.combine import combine
from mainstem.kernels.experts.products import (
    FEW,
    GROUPED,
    HOPPER,
    MANY,
    SOME,
    ExpertTiles,
    Method,
    down,
    gate_up,
    grouped_product,
)
from mainstem.kernels.experts.route import route
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.gpu.experts import ExpertSpace, GpuExperts, Linear
from mainstem.models.packed import Weight, as_tensor
from mainstem.models.spec import Activation, ExpertsSpec
from mainstem_bench.kernels.fused import (
    COPY_BYTES_PER_US,
    TimingLines,
    off_by,
    run_checks,
    some,
    time_us,
)

TOKENS = (8192, 16, 1, 512, 128, 2048)  # the most informative first
COPIES = 4  # inputs that are used in turn
BF16 = torch.bfloat16
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class ExpertsShape:
    name: str
    hidden: int
    spec: ExpertsSpec


QWEN3 = ExpertsShape("qwen3-30b-a3b", 2048, ExpertsSpec(128, 8, 768, Activation.SILU))
GPT_OSS = ExpertsShape(
    "gpt-oss-20b", 2880, ExpertsSpec(32, 4, 2880, Activation.CLAMPED_SILU, has_bias=True)
)
MIXTRAL = ExpertsShape("mixtral-8x7b", 4096, ExpertsSpec(8, 2, 14336, Activation.SILU))
QWEN2 = ExpertsShape(
    "qwen1.5-moe-a2.7b",
    2048,
    ExpertsSpec(
        60, 4, 1408, Activation.SILU, is_normalized=False, shared_size=5632, has_shared_gate=True
    ),
)
SHAPES = (QWEN3, GPT_OSS, MIXTRAL)
OF_METHOD = {Method.HOPPER: HOPPER, Method.LIBRARY: GROUPED}
ALL_TILES = (FEW, SOME, MANY, GROUPED, *([HOPPER] if hopper_kernels(CUDA) else []))


def some_weights(shape: ExpertsShape, is_skewed: bool = False) -> ExpertTensors:
    """Skewed: later experts have longer router rows and are chosen more often."""
    spec, hidden = shape.spec, shape.hidden
    experts, size, shared = spec.num_experts, spec.size, spec.shared_size

    def weight(*shape: int, seed: int) -> Tensor:
        made = torch.empty(shape, dtype=BF16, device="cuda")
        generator = torch.Generator("cuda").manual_seed(seed)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    router = weight(experts, hidden, seed=0)
    if is_skewed:
        router *= torch.linspace(0.2, 3.0, experts, device="cuda", dtype=BF16)[:, None]
    tensors = ExpertTensors(
        router=router,
        router_bias=weight(experts, seed=1) if spec.has_bias else None,
        gate_up=weight(experts, 2 * size, hidden, seed=2),
        gate_up_bias=weight(experts, 2 * size, seed=3) if spec.has_bias else None,
        down=weight(experts, hidden, size, seed=4),
        down_bias=weight(experts, hidden, seed=5) if spec.has_bias else None,
        shared_gate_up=None if shared is None else weight(2 * shared, hidden, seed=6),
        shared_down=None if shared is None else weight(hidden, shared, seed=7),
        shared_gate=weight(1, hidden, seed=8) if spec.has_shared_gate else None,
    )
    torch.cuda.synchronize()
    return tensors


def plain_linear(weight: Weight, bias: Tensor | None) -> Linear:
    assert bias is None
    return lambda x, out: torch.mm(x, as_tensor(weight).t(), out=out)


def invariant_linear(weight: Weight, bias: Tensor | None) -> Linear:
    return lambda x, out: matmul(x, as_tensor(weight), bias, out=out)


def a_space(shape: ExpertsShape, max_tokens: int) -> ExpertSpace:
    return ExpertSpace.make(shape.spec, shape.hidden, max_tokens, BF16, CUDA)


def right_answer(
    x: Tensor, tensors: ExpertTensors, space: ExpertSpace, shape: ExpertsShape
) -> Tensor:
    """The exact output in fp32, of the experts that the kernel chose; check_routing checks the
    choice."""
    spec, routing = shape.spec, space.routing
    ids, weights = routing.ids[: len(x)], routing.weights[: len(x)]
    out = torch.zeros(x.shape, device="cuda")
    for expert in range(spec.num_experts):
        token, slot = torch.where(ids == expert)
        if len(token) == 0:
            continue
        found = reference.gated_mlp(
            x[token],
            as_tensor(tensors.gate_up)[expert],
            as_tensor(tensors.down)[expert],
            spec.activation.value,
            None if tensors.gate_up_bias is None else tensors.gate_up_bias[expert],
            None if tensors.down_bias is None else tensors.down_bias[expert],
        )
        out.index_add_(0, token, weights[token, slot, None] * found)
    if tensors.shared_gate_up is not None and tensors.shared_down is not None:
        shared = reference.gated_mlp(
            x,
            as_tensor(tensors.shared_gate_up),
            as_tensor(tensors.shared_down),
            spec.activation.value,
        )
        if tensors.shared_gate is not None:
            shared = shared * torch.sigmoid(x.float() @ tensors.shared_gate.float().t())
        out += shared
    return out


def check_routing() -> None:
    """The chosen experts are the best ones within rounding, their weights match, and rows are
    sorted."""
    for shape in (QWEN3, GPT_OSS, MIXTRAL, QWEN2):
        tensors, space, spec = some_weights(shape), a_space(shape, 3000), shape.spec
        layer = GpuExperts(tensors, spec, space, plain_linear)
        for tokens in (1, 16, 17, 256, 257, 3000):
            x = some(tokens, shape.hidden, seed=tokens)
            layer(x, torch.empty_like(x))
            routing = space.routing
            logits = x.double() @ tensors.router.double().t()
            if tensors.router_bias is not None:
                logits += tensors.router_bias.double()
            ids = routing.ids[:tokens].long()
            found, best = logits.gather(1, ids), logits.topk(spec.top_k, dim=-1).values
            torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-5)
            shares = logits.softmax(dim=-1).gather(1, ids)
            if spec.is_normalized:
                shares /= shares.sum(dim=-1, keepdim=True)
            torch.testing.assert_close(
                routing.weights[:tokens].double(), shares, rtol=1e-4, atol=1e-6
            )
            order = ids.flatten().argsort(stable=True)
            rows = tokens * spec.top_k
            assert torch.equal(routing.sorted_tokens[:rows].long(), order // spec.top_k)
            assert torch.equal(routing.positions[:tokens].flatten()[order].long().cpu(),
                               torch.arange(rows))  # fmt: skip
            counts = torch.bincount(ids.flatten(), minlength=spec.num_experts)
            assert torch.equal(routing.ends.long(), counts.cumsum(0))


def check_layer() -> None:
    """Activations, rows and output are rounded to bf16, each with a relative error of 2^-9."""
    for shape in (QWEN3, GPT_OSS, MIXTRAL, QWEN2):
        for is_skewed in (False, True):
            tensors, space = some_weights(shape, is_skewed), a_space(shape, 3000)
            for tiles in (None, *ALL_TILES):
                layer = GpuExperts(tensors, shape.spec, space, plain_linear, tiles=tiles)
                for tokens in (1, 37, 3000):
                    x = some(tokens, shape.hidden, seed=tokens)
                    out = layer(x, torch.full_like(x, float("nan")))
                    apart = off_by(out, right_answer(x, tensors, space, shape))
                    assert apart < 1e-2, f"{shape.name} {tiles} {tokens} tokens: {apart}"


def in_dtype(tensors: ExpertTensors, dtype: torch.dtype) -> ExpertTensors:
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    found: dict[str, Any] = {
        name: value.to(dtype) for name, value in values.items() if isinstance(value, Tensor)
    }
    return replace(tensors, **found)


def check_fp32() -> None:
    shape = replace(QWEN2, spec=replace(QWEN2.spec, num_experts=7, size=264))
    wide = in_dtype(some_weights(shape), torch.float32)
    space = ExpertSpace.make(shape.spec, shape.hidden, 200, torch.float32, CUDA)
    x = some(200, shape.hidden, dtype=torch.float32)
    layer = GpuExperts(wide, shape.spec, space, invariant_linear)
    out = layer(x, torch.empty_like(x))
    assert off_by(out, right_answer(x, wide, space, shape)) < 1e-5


def check_rows_are_independent() -> None:
    """A row has the same bits alone and in batches with other tiles and other parts of router
    sums."""
    for shape in (QWEN3, GPT_OSS, QWEN2):
        tensors, space = some_weights(shape), a_space(shape, 4000)
        layer = GpuExperts(tensors, shape.spec, space, invariant_linear, is_deterministic=True)
        x = some(4000, shape.hidden)
        whole = layer(x, torch.empty_like(x)).clone()
        for first, last in ((0, 1), (5, 21), (100, 357), (1000, 3000), (3990, 4000)):
            part = x[first:last]
            found = layer(part, torch.empty_like(part))
            assert torch.equal(found, whole[first:last]), f"{shape.name} {first}..{last}"


def check_graphs_and_no_waiting() -> None:
    """A replayed graph of a layer reads its new input, and no call waits for the device."""
    shape = QWEN3
    tensors, space = some_weights(shape), a_space(shape, 1024)
    for tiles in (None, *ALL_TILES):
        layer = GpuExperts(tensors, shape.spec, space, plain_linear, tiles=tiles)
        for tokens in (1, 13, 1024):
            x = some(tokens, shape.hidden, seed=1)
            out = torch.empty_like(x)
            layer(x, out)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            layer(x, out)
            torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer(x, out)
            for seed in (2, 3):
                x.copy_(some(tokens, shape.hidden, seed=seed))
                graph.replay()
                found = out.clone()
                assert torch.equal(found, layer(x, torch.empty_like(x)))


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


class Timing:
    """One layer of a shape; measures the times of its parts."""

    def __init__(self, shape: ExpertsShape, is_skewed: bool) -> None:
        self.name = f"{shape.name} {'skewed' if is_skewed else 'uniform'}"
        self.shape = shape
        self.tensors = some_weights(shape, is_skewed)
        self.space = a_space(shape, max(TOKENS))

    def inputs(self, tokens: int) -> list[Tensor]:
        return [some(tokens, self.shape.hidden, seed=seed) for seed in range(COPIES)]

    def layer_us(self, tokens: int, tiles: ExpertTiles | None) -> float:
        layer = GpuExperts(self.tensors, self.shape.spec, self.space, plain_linear, tiles=tiles)
        out = torch.empty(tokens, self.shape.hidden, dtype=BF16, device="cuda")
        return time_us([lambda x=x: layer(x, out) for x in self.inputs(tokens)])  # type: ignore[misc]

    def parts_us(
        self, tokens: int, tiles: ExpertTiles, methods: Sequence[Method]
    ) -> dict[str, float]:
        """Times of the products alone. Their routing is always the same, so weights of small steps
        are in the L2 cache; in `layer_us` they come from memory."""
        spec, routing, tensors = self.shape.spec, self.space.routing, self.tensors
        x, rows = self.inputs(tokens)[0], tokens * spec.top_k
        out = torch.empty_like(x)
        router = GpuExperts(tensors, spec, self.space, plain_linear).router
        route(x, router, routing, tiles.rows)
        act, answers = self.space.act[:rows], self.space.rows[:rows]
        figures = self._load_of(tokens)
        if Method.OURS in methods:
            figures["ours_gate_up"] = time_us([
                lambda: gate_up(x, routing, as_tensor(tensors.gate_up), tensors.gate_up_bias,
                                spec.activation.value, tiles.gate_up, act)
            ] * COPIES)  # fmt: skip
            figures["ours_down"] = time_us(
                [lambda: down(act, routing, as_tensor(tensors.down), tiles.down, answers)] * COPIES
            )
        kernels = hopper_kernels(CUDA)
        if Method.HOPPER in methods and kernels is not None:
            route(x, router, routing, HOPPER.rows)
            hopper = kernels.HopperProducts(
                as_tensor(tensors.gate_up), as_tensor(tensors.down), self.space.act
            )
            bias, activation = tensors.gate_up_bias, spec.activation.value
            figures["hopper_gate_up"] = time_us(
                [lambda: hopper.gate_up(x, routing, bias, activation)] * COPIES
            )
            figures["hopper_down"] = time_us([lambda: hopper.down(routing, answers)] * COPIES)
        if Method.LIBRARY in methods:
            answers.copy_(x[routing.sorted_tokens[:rows]])
            figures["library_gate_up"] = time_us(
                [lambda: grouped_product(answers, routing, as_tensor(tensors.gate_up))] * COPIES
            )
            figures["library_down"] = time_us(
                [lambda: grouped_product(act, routing, as_tensor(tensors.down))] * COPIES
            )
        figures["combine"] = time_us(
            [lambda: combine(answers, routing, tensors.down_bias, None, False, out)] * COPIES
        )
        figures["route"] = time_us([lambda: route(x, router, routing, tiles.rows)] * COPIES)
        return figures | self._rates(tokens, figures)

    def _load_of(self, tokens: int) -> dict[str, float]:
        spec = self.shape.spec
        ids = self.space.routing.ids[:tokens].flatten().long()
        counts = torch.bincount(ids, minlength=spec.num_experts)
        expert_bytes = 3 * spec.size * self.shape.hidden * 2
        return {
            "rows_per_expert": len(ids) / spec.num_experts,
            "busiest": float(counts.max()) * spec.num_experts / len(ids),
            "weights_us": int((counts > 0).sum()) * expert_bytes / COPY_BYTES_PER_US,
        }

    def _rates(self, tokens: int, figures: dict[str, float]) -> dict[str, float]:
        """TFLOP/s: 1e6 operations a microsecond are one."""
        spec = self.shape.spec
        flops = 2 * tokens * spec.top_k * spec.size * self.shape.hidden
        return {
            f"{name}_tflops": flops * (2 if name.endswith("gate_up") else 1) / us / 1e6
            for name, us in figures.items()
            if name.endswith(("gate_up", "down"))
        }


def time_all(report: TimingLines, methods: Sequence[Method], deadline: float) -> None:
    for shape in SHAPES:
        for is_skewed in (False, True):
            timing = Timing(shape, is_skewed)
            for tokens in TOKENS:
                if time.monotonic() > deadline:
                    print(f"time is up: {timing.name} with {tokens} tokens and the rest left out")
                    return
                time_one(report, timing, tokens, methods)


def time_one(report: TimingLines, timing: Timing, tokens: int, methods: Sequence[Method]) -> None:
    spec = timing.shape.spec
    chosen = tiles_of(tokens, timing.shape)
    figures = {"layer": timing.layer_us(tokens, None)}
    for method in methods:
        if method is not chosen.method and OF_METHOD.get(method, MANY) in ALL_TILES:
            tiles = OF_METHOD.get(method) or ours_of(tokens, timing.shape)
            figures[f"{method.value}_layer"] = timing.layer_us(tokens, tiles)
    flops = 6 * tokens * spec.top_k * spec.size * timing.shape.hidden
    figures["layer_tflops"] = flops / figures["layer"] / 1e6
    report(timing.name, tokens, **figures,
           **timing.parts_us(tokens, ours_of(tokens, timing.shape), methods))  # fmt: skip


def tiles_of(tokens: int, shape: ExpertsShape) -> ExpertTiles:
    """The tiles that `choose` chooses."""
    x, spec = torch.empty(1, shape.hidden, dtype=BF16, device=CUDA), shape.spec
    return choose(tokens * spec.top_k, spec.num_experts, x, is_deterministic=False)


def ours_of(tokens: int, shape: ExpertsShape) -> ExpertTiles:
    """The tiles of the method that runs on any card."""
    tiles = tiles_of(tokens, shape)
    return tiles if tiles.method is Method.OURS else MANY


def main() -> None:
    parser = Parser()
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--methods", default="ours,hopper,library")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    failed = 0
    report = TimingLines()
    with torch.inference_mode():
        if arguments.checks_only:
            failed = run_checks(CHECKS)
        else:
            methods = [Method(name) for name in arguments.methods.split(",")]
            time_all(report, methods, deadline)
    if arguments.json:
        arguments.json.write_text("\n".join(report.lines) + "\n")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
