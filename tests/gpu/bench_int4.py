"""Products with packed weights on a card: checked against dequantized ones, then timed.

`PYTHONPATH=src:. python -m tests.gpu.bench_int4 [--only PART] [--sweep] [--warm I/N]`

One line per figure: microseconds, achieved GB/s of packed weights, TFLOP/s. Copies of the weights
rotate, so that they come from memory, and a graph of several products is replayed. `--sweep` tries
many tiles; `--warm I/N` only compiles, its share of all, so that N processes share the compiling.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.kernels.dense.fp8 import Fp8Linear, quantize_rows
from mainstem.kernels.dense.fp8_blocks import Fp8BlockLinear, quantize_groups
from mainstem.kernels.dense.int4 import TILES, Int4Tile, dequantize, multiply
from mainstem.kernels.dense.nibbles import Nibbles

SHAPES = {"qkv": (10240, 8192), "out": (8192, 8192), "gate_up": (57344, 8192),
          "down": (8192, 28672)}  # fmt: skip
SMALL = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096),
         "down": (4096, 14336)}  # fmt: skip
TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)
GROUP = 128
_CACHE_BYTES = 150 << 20  # copies of a weight are more than this together
_SWEPT = tuple(
    Int4Tile(*sizes)
    for sizes in (
        (64, 16, 4, 4, 4), (64, 16, 4, 6, 4), (64, 16, 4, 5, 5), (64, 16, 4, 4, 8),
        (128, 16, 4, 4, 3), (128, 16, 4, 4, 4), (128, 16, 4, 6, 3), (128, 16, 8, 4, 2),
        (64, 32, 4, 5, 4), (128, 32, 4, 4, 3), (128, 32, 4, 4, 4), (128, 32, 8, 4, 2),
        (64, 64, 4, 4, 3), (128, 64, 4, 4, 2), (128, 64, 8, 4, 2), (256, 64, 8, 3, 1),
        (128, 128, 8, 3, 1), (128, 128, 8, 3, 2), (128, 128, 4, 3, 2), (256, 128, 8, 3, 1),
        (128, 256, 8, 3, 1),
    )
)  # fmt: skip


@dataclass
class Arguments:
    only: str | None
    is_sweep: bool
    part: tuple[int, int] | None


def some(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def some_int4(num_out: int, num_in: int, seed: int = 0) -> Nibbles:
    generator = torch.Generator("cuda").manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.uint8, device="cuda")
        return made.random_(low, high, generator=generator)

    scales = (0.004 + 0.004 * torch.rand(num_out, num_in // GROUP, device="cuda")).bfloat16()
    zeros = whole(0, 16, num_out, num_in // GROUP)
    return Nibbles.int4(whole(0, 256, num_out, num_in // 2), scales, zeros, GROUP)


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """Of one call, the median over replays of a graph of some."""
    calls = max(copies, 8)
    for index in range(copies):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index % copies)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[1:])


def show(what: str, us: float, weight_bytes: float, flops: float) -> None:
    print(f"{what}: {us:.1f} us, {weight_bytes / us / 1e3:.0f} GB/s, "
          f"{flops / us / 1e6:.0f} TFLOP/s", flush=True)  # fmt: skip


def tiles_for(tokens: int, args: Arguments) -> Iterator[Int4Tile]:
    """Those that waste little, the largest also for more tokens than it has."""
    for tile in _SWEPT if args.is_sweep else TILES:
        fits = tile.tokens >= tokens and (tile.tokens < 2 * tokens or tile.tokens == 16)
        if fits or (tokens > tile.tokens >= 128 and tokens % tile.tokens == 0):
            yield tile


def bench_int4(args: Arguments) -> None:
    turn = 0
    for name, (num_out, num_in) in SHAPES.items():
        copies = 1 + _CACHE_BYTES // (num_out * num_in // 2)
        weights = [some_int4(num_out, num_in, seed) for seed in range(copies)]
        nbytes, flops = weights[0].nbytes, 2 * num_out * num_in
        room = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="cuda")
        dense = dequantize(weights[0], room)
        for tokens in TOKENS:
            x = some(tokens, num_in, seed=tokens)
            out = x.new_empty(tokens, num_out)
            right = torch.mm(x, dense.t()).float()
            for tile in tiles_for(tokens, args):
                turn += 1
                if args.part is not None and turn % args.part[1] != args.part[0]:
                    continue
                found = multiply(x, weights[0], None, out.fill_(float("nan")), tile).float()
                off = float((found - right).norm() / right.norm())
                assert off < 4e-3, (name, tokens, tile, off)
                if args.part is None:
                    us = microseconds(lambda i: multiply(x, weights[i], None, out, tile), copies)  # noqa: B023
                    shape = (
                        f"{tile.outs}x{tile.tokens} w{tile.warps} s{tile.stages} p{tile.programs}"
                    )
                    show(f"int4 {name} {tokens} [{shape}]", us, nbytes, flops * tokens)
            if args.part is None and tokens >= 128:
                us = microseconds(lambda _: torch.mm(x, room.t(), out=out), 1)  # noqa: B023
                show(f"bf16 {name} {tokens}", us, 2 * num_out * num_in, flops * tokens)
        if args.part is None:
            us = microseconds(lambda i: dequantize(weights[i], room), copies)  # noqa: B023
            show(f"dequantize {name}", us, nbytes + room.nbytes, 0)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (size // 128 for size in weight.shape)
    blocks = weight.float().view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    return values, scales


def bench_fp8(args: Arguments) -> None:
    if args.part is not None:
        return
    for name, (num_out, num_in) in SMALL.items():
        weight = some(num_out, num_in)
        values, scales = quantize_blocks(weight)
        linear = Fp8Linear.quantize(weight)
        for tokens in (1, 3, 16, 64, 256, 1024, 4096):
            x = some(tokens, num_in, seed=tokens)
            right = torch.mm(x, weight.t()).float()
            flops, nbytes = 2 * num_out * num_in * tokens, num_out * num_in
            us = microseconds(lambda _: torch.mm(x, weight.t()), 1)  # noqa: B023
            show(f"bf16 {name} {tokens}", us, 2 * nbytes, flops)
            rows = quantize_rows(x)
            us = microseconds(lambda _: linear(rows), 1)  # noqa: B023
            show(f"fp8 per channel {name} {tokens}", us, nbytes, flops)
            blocks = Fp8BlockLinear(values, scales, None, torch.bfloat16)
            off = float((blocks(x).float() - right).norm() / right.norm())
            assert off < 0.05, (name, tokens, off)
            us = microseconds(lambda _: blocks(x), 1)  # noqa: B023
            show(f"fp8 blocks, rows quantized here, {name} {tokens}", us, nbytes, flops)
            us = microseconds(lambda _: quantize_groups(x), 1)  # noqa: B023
            print(f"of it to quantize rows: {us:.1f} us", flush=True)


PARTS = {"int4": bench_int4, "fp8": bench_fp8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warm", metavar="I/N")
    given = parser.parse_args()
    part = None
    if given.warm is not None:
        index, count = given.warm.split("/")
        part = int(index), int(count)
    args = Arguments(given.only, given.sweep, part)
    for name, run in PARTS.items():
        if args.only in (None, name):
            run(args)


if __name__ == "__main__":
    main()
