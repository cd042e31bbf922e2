# ruff: noqa: B023
"""Products with packed weights on a card, timed; `test_packed_gpu.py` runs the checks.

`PYTHONPATH=src:. python -m mainstem_bench.kernels.packed [--only PART]`

Prints one line per result: microseconds, GB/s of weights read, TFLOP/s. Copies of the INT4
weights are used in turn, so that they come from memory. A graph of several products is replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from mainstem.cli.parser import Parser
from mainstem.kernels.dense.fp8 import Fp8Linear, quantize_rows
from mainstem.kernels.dense.fp8_blocks import Fp8BlockLinear, quantize_groups
from mainstem.kernels.dense.int4 import (
    TILES,
    dequantize,
    deterministic_tile,
    multiply,
)
from mainstem.kernels.dense.nibbles import Nibbles
from mainstem.kernels.dense.split_columns import ColumnTile
from mainstem.kernels.experts import packed, products, reference
from mainstem.kernels.experts.route import Routing
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.gpu.experts import ExpertSpace, GpuExperts
from mainstem.models.gpu.packed import pack_nibbles
from mainstem.models.packed import PackedKind, PackedWeight
from mainstem.models.spec import Activation, ExpertsSpec
from mainstem_bench.kernels.fused import off_by, some, time_us

SHAPES = {"qkv": (10240, 8192), "out": (8192, 8192), "gate_up": (57344, 8192),
          "down": (8192, 28672)}  # fmt: skip
SMALL = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096),
         "down": (4096, 14336)}  # fmt: skip
TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)
GPT_OSS = ExpertsSpec(32, 4, 2880, Activation.CLAMPED_SILU, has_bias=True)
GPT_OSS_HIDDEN = 2880
CUDA = torch.device("cuda")
ROW_COUNTS = (3, 0, 8, 9, 16, 17, 1, 33)  # of each expert
TOKENS_OF_FEW = 30
_CACHE_BYTES = 150 << 20  # the copies of a weight together are larger than this
# relative error: kernels sum in fp32 and round the output once; most right answers are in fp64
LIMITS = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-6}


def some_packed(
    *shape: int,
    group: int = 128,
    kind: PackedKind = PackedKind.INT4,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> PackedWeight:
    """[.., out, in]"""
    generator = torch.Generator("cuda").manual_seed(seed)
    *lead, width = shape
    scales = (*lead, -(-width // group))

    def whole(low: int, high: int, *size: int) -> Tensor:
        made = torch.empty(size, dtype=torch.uint8, device="cuda")
        return made.random_(low, high, generator=generator)

    values = whole(0, 256, *lead, width // 2)
    if kind is PackedKind.MXFP4:
        return PackedWeight(kind, values, whole(117, 121, *scales), None, group)
    sizes = 0.004 * (1 + torch.rand(scales, generator=generator, device="cuda"))
    return PackedWeight(kind, values, sizes.to(dtype), whole(0, 16, *scales), group)


def as_nibbles(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Nibbles:
    found = pack_nibbles(weight, dtype)
    assert found is not None
    return found


def check_int4() -> None:
    """Check all dtypes and several tiles and group sizes. Each product runs twice, since split
    products must reset their counters."""
    for num_out, num_in, group, dtype, all_tokens in (
        (1024, 4096, 128, torch.bfloat16, (1, 7, 16, 33, 100, 300)),
        (520, 2880, 32, torch.bfloat16, (5, 100)),
        (4096, 1024, 64, torch.bfloat16, (5, 16)),
        (96, 5120, 5120, torch.float16, (5, 100)),
        (520, 2880, 32, torch.float16, (5,)),
        (200, 640, 128, torch.float32, (5, 100)),
    ):
        weight = some_packed(num_out, num_in, group=group, dtype=dtype)
        nibbles, dense = as_nibbles(weight, dtype), weight.dense(dtype)
        assert torch.equal(dequantize(nibbles, torch.empty_like(dense)), dense)
        bias = some(num_out, seed=1, dtype=dtype)
        for tokens in all_tokens:
            x = some(tokens, num_in, seed=tokens, dtype=dtype)
            right = x.double() @ dense.double().t() + bias.double()
            for _ in range(2):
                out = x.new_full((tokens, num_out), float("nan"))
                off = off_by(multiply(x, nibbles, bias, out), right)
                assert off < LIMITS[dtype], (num_out, num_in, dtype, tokens, off)


def check_deterministic() -> None:
    weight = as_nibbles(some_packed(1024, 8192))
    tile = deterministic_tile(torch.bfloat16, CUDA)
    x = some(700, 8192)
    together = multiply(x, weight, None, x.new_empty(700, 1024), tile)
    for first, end in ((0, 1), (5, 40), (690, 700), (0, 300)):
        part = x[first:end]
        alone = multiply(part, weight, None, x.new_empty(len(part), 1024), tile)
        assert torch.equal(alone, together[first:end])


def check_mxfp4() -> None:
    weight = some_packed(640, 2880, group=32, kind=PackedKind.MXFP4)
    nibbles, dense = as_nibbles(weight), weight.dense(torch.bfloat16)
    assert torch.equal(dequantize(nibbles, torch.empty_like(dense)), dense)
    x = some(20, 2880)
    right = x.double() @ dense.double().t()
    assert off_by(multiply(x, nibbles, None, x.new_empty(20, 640)), right) < 3e-3


def gpt_oss_layer(kind: PackedKind | None, max_tokens: int, seed: int = 0) -> GpuExperts:
    """A layer of gpt-oss-20b; with None, its weights are dequantized."""
    experts, size, hidden = GPT_OSS.num_experts, GPT_OSS.size, GPT_OSS_HIDDEN
    of = PackedKind.MXFP4 if kind is None else kind
    gate_up = some_packed(experts, 2 * size, hidden, group=32, kind=of, seed=seed)
    down = some_packed(experts, hidden, size, group=32, kind=of, seed=seed + 1)
    tensors = ExpertTensors(
        router=some(experts, hidden, seed=2) * hidden**-0.5,
        router_bias=some(experts, seed=3),
        gate_up=gate_up.dense(torch.bfloat16) if kind is None else gate_up,
        gate_up_bias=some(experts, 2 * size, seed=4),
        down=down.dense(torch.bfloat16) if kind is None else down,
        down_bias=some(experts, hidden, seed=5),
    )
    space = ExpertSpace.make(GPT_OSS, hidden, max_tokens, torch.bfloat16, CUDA)
    return GpuExperts(tensors, GPT_OSS, space, lambda weight, bias: lambda x, out: out)


def check_experts() -> None:
    """For every kind of tile, compare packed weights with dequantized ones in other kernels."""
    packed_layer, dense_layer = gpt_oss_layer(PackedKind.MXFP4, 1024), gpt_oss_layer(None, 1024)
    for tokens in (1, 50, 200, 1024):
        x = some(tokens, GPT_OSS_HIDDEN, seed=tokens)
        found = packed_layer(x, torch.full_like(x, float("nan")))
        assert off_by(found, dense_layer(x, torch.empty_like(x))) < 5e-3, tokens


def check_experts_with_few_rows() -> None:
    """Compare products of 0 to 33 rows for each expert with dequantized weights in fp64, for widths
    with and without a rest of 128 columns, and for programs with a part of a tile and with several
    tiles. Other rows stay as they were, and the same call again has the same bits."""
    for hidden, size, activation, has_bias in (
        (96, 64, "silu", False),
        (128, 320, "clamped", True),
        (416, 192, "silu", True),
        (512, 256, "clamped", False),
        (512, 3840, "clamped", True),
    ):
        experts, counts = len(ROW_COUNTS), torch.tensor(ROW_COUNTS)
        gate_up = some_packed(experts, 2 * size, hidden, group=32, kind=PackedKind.MXFP4)
        down = some_packed(experts, hidden, size, group=32, kind=PackedKind.MXFP4, seed=1)
        bias = some(experts, 2 * size, seed=2) if has_bias else None
        rows, routing = sum(ROW_COUNTS), routing_of(ROW_COUNTS)
        x = some(TOKENS_OF_FEW, hidden, seed=3)
        room = torch.full((rows + 1, size), 77.0, dtype=x.dtype, device=CUDA)
        gate_up_words, down_words = as_nibbles(gate_up), as_nibbles(down)

        def run_gate_up(room: Tensor) -> Tensor:
            return packed.packed_gate_up(
                x, routing, gate_up_words, bias, activation, packed.FEW.gate_up, room
            )

        def run_down(room: Tensor) -> Tensor:
            return packed.packed_down(act, routing, down_words, packed.FEW.down, room)

        act = run_gate_up(room[:rows])
        assert torch.equal(act, run_gate_up(torch.empty_like(act)))
        of_expert = torch.arange(experts).repeat_interleave(counts).to(CUDA)
        gathered = x[routing.sorted_tokens[:rows].long()].double()
        both = product_by_expert(gathered, gate_up, of_expert)
        both += 0.0 if bias is None else bias[of_expert].double()
        gate, up = both.chunk(2, dim=-1)
        off = off_by(act, reference.gated(gate, up, activation))
        assert off < LIMITS[torch.bfloat16], ("gate_up", hidden, size, off)
        assert (room[rows] == 77.0).all()
        out = torch.full((rows + 1, hidden), 77.0, dtype=x.dtype, device=CUDA)
        run_down(out[:rows])
        assert torch.equal(out[:rows], run_down(torch.empty_like(out[:rows])))
        off = off_by(out[:rows], product_by_expert(act.double(), down, of_expert))
        assert off < LIMITS[torch.bfloat16], ("down", hidden, size, off)
        assert (out[rows] == 77.0).all()


def routing_of(counts: Sequence[int]) -> Routing:
    """The routing of some rows of each expert, for tiles of few rows."""
    routing = Routing.make(len(counts), 1, max(sum(counts), 1), CUDA)
    tile_rows, start, tiles = packed.FEW.rows, 0, []
    for expert, count in enumerate(counts):
        for first in range(start, start + count, tile_rows):
            tiles.append((expert, first, min(first + tile_rows, start + count)))
        start += count
        routing.ends[expert] = start
    columns = torch.tensor(tiles, dtype=torch.int32, device=CUDA).t()
    routing.tile_experts.fill_(-1)
    routing.tile_count.fill_(len(tiles))
    for target, column in zip(
        (routing.tile_experts, routing.tile_starts, routing.tile_ends), columns, strict=True
    ):
        target[: len(tiles)] = column
    routing.sorted_tokens.random_(0, TOKENS_OF_FEW)
    return routing


def product_by_expert(rows: Tensor, weight: PackedWeight, of_expert: Tensor) -> Tensor:
    """Each row times its expert's dequantized weight, in fp64."""
    dense = weight.dense(torch.bfloat16)
    out = rows.new_empty(len(rows), dense.shape[1])
    for expert in range(len(dense)):
        mine = of_expert == expert
        out[mine] = rows[mine] @ dense[expert].double().t()
    return out


def check_fp8_blocks() -> None:
    """Rounded rows equal a CPU's bit for bit. Products of rounded rows are compared with those in
    fp64: rounding the output costs 0.17 %, and Hopper's sums of 128 columns in 14 bits cost 0.01 %.
    Rounding the rows costs 2.6 %, but is the same on both sides. Scales differ by 2^8 and more, so
    that one in the wrong place is seen."""
    for num_out, num_in in ((1024, 4096), (4096, 14336)):
        values = (100 * some(num_out, num_in)).clamp_(-448, 448).to(torch.float8_e4m3fn)
        exponents = some(num_out // 128, num_in // 128, seed=3, dtype=torch.float32)
        scales = torch.exp2(2 * exponents - 12)
        spread = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = values.double() * spread
        linear, bias = Fp8BlockLinear(values, scales, None, torch.bfloat16), some(num_out, seed=1)
        biased = Fp8BlockLinear(values, scales, bias, torch.bfloat16)
        for tokens in (1, 8, 9, 17, 33, 64, 77):
            loudness = torch.exp2(some(tokens, num_in // 128, seed=2)).repeat_interleave(128, 1)
            x = some(tokens, num_in, seed=tokens) * loudness
            rows, row_scales = quantize_groups(x)
            right, right_scales = quantize_groups(x.cpu())
            assert torch.equal(rows.cpu().float(), right.float()), (num_in, tokens)
            assert torch.equal(row_scales.cpu(), right_scales), (num_in, tokens)
            rounded = rows.double() * row_scales.double().repeat_interleave(128, 1)
            for made, right in (
                (linear, rounded @ weight.t()),
                (biased, rounded @ weight.t() + bias.double()),
            ):
                off = off_by(made(x), right)
                assert off < LIMITS[torch.bfloat16], (num_out, num_in, tokens, off)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (size // 128 for size in weight.shape)
    blocks = weight.float().view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    return values, scales


CHECKS = {
    "int4": check_int4,
    "deterministic": check_deterministic,
    "mxfp4": check_mxfp4,
    "experts": check_experts,
    "experts with few rows": check_experts_with_few_rows,
    "fp8 blocks": check_fp8_blocks,
}


def show(what: str, us: float, weight_bytes: float, flops: float) -> None:
    print(f"{what}: {us:.1f} us, {weight_bytes / us / 1e3:.0f} GB/s, "
          f"{flops / us / 1e6:.0f} TFLOP/s", flush=True)  # fmt: skip


def tiles_for(tokens: int) -> Iterator[ColumnTile]:
    """Tiles that hold the tokens and waste few rows, and tiles of 128 tokens or more that divide
    the number of tokens."""
    for tile in TILES:
        fits = tile.tokens >= tokens and (tile.tokens < 2 * tokens or tile.tokens <= 16)
        if fits or (tokens > tile.tokens >= 128 and tokens % tile.tokens == 0):
            yield tile


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """Time of one call; `run` gets the number of the copy to use."""
    return time_us([partial(run, index % copies) for index in range(max(copies, 8))])


def bench_int4() -> None:
    for name, (num_out, num_in) in SHAPES.items():
        copies = 1 + _CACHE_BYTES // (num_out * num_in // 2)
        weights = [as_nibbles(some_packed(num_out, num_in, seed=seed)) for seed in range(copies)]
        nbytes, flops = weights[0].nbytes, 2 * num_out * num_in
        room = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="cuda")
        dense = dequantize(weights[0], room)
        for tokens in TOKENS:
            x = some(tokens, num_in, seed=tokens)
            out = x.new_empty(tokens, num_out)
            right = torch.mm(x, dense.t())
            for tile in tiles_for(tokens):
                off = off_by(multiply(x, weights[0], None, out.fill_(float("nan")), tile), right)
                assert off < 4e-3, (name, tokens, tile, off)
                us = microseconds(lambda i: multiply(x, weights[i], None, out, tile), copies)
                shape = f"{tile.outs}x{tile.tokens} w{tile.warps} s{tile.stages}"
                what = f"int4 {name} {tokens} [{shape} p{tile.programs} b{tile.blocks}]"
                show(what, us, nbytes, flops * tokens)
            if tokens >= 128:
                us = microseconds(lambda _: torch.mm(x, room.t(), out=out), 1)
                show(f"bf16 {name} {tokens}", us, 2 * num_out * num_in, flops * tokens)
        us = microseconds(lambda i: dequantize(weights[i], room), copies)
        show(f"dequantize {name}", us, nbytes + room.nbytes, 0)


def bench_experts() -> None:
    experts, size, hidden = GPT_OSS.num_experts, GPT_OSS.size, GPT_OSS_HIDDEN
    kinds = {"mxfp4": gpt_oss_layer(PackedKind.MXFP4, 4096), "bf16": gpt_oss_layer(None, 4096)}
    params = 3 * experts * size * hidden
    for tokens in (1, 16, 64, 256, 1024, 4096):
        x = some(tokens, hidden, seed=tokens)
        out = torch.empty_like(x)
        for name, layer in kinds.items():
            module = packed if name == "mxfp4" else products
            for tiles_name in ("FEW", "SOME", "MANY"):
                layer._tiles = getattr(module, tiles_name)
                us = microseconds(lambda _: layer(x, out), 1)
                nbytes = params * (0.53 if name == "mxfp4" else 2.0)
                flops = 6 * size * hidden * tokens * GPT_OSS.top_k
                show(f"experts {name} {tokens} [{tiles_name}]", us, nbytes, flops)


def bench_fp8() -> None:
    for name, (num_out, num_in) in SMALL.items():
        weight = some(num_out, num_in)
        linear = Fp8Linear.quantize(weight)
        blocks = Fp8BlockLinear(*quantize_blocks(weight), None, torch.bfloat16)
        for tokens in (1, 16, 64, 256, 1024, 4096):
            x = some(tokens, num_in, seed=tokens)
            flops, nbytes = 2 * num_out * num_in * tokens, num_out * num_in
            us = microseconds(lambda _: torch.mm(x, weight.t()), 1)
            show(f"bf16 {name} {tokens}", us, 2 * nbytes, flops)
            rows = quantize_rows(x)
            us = microseconds(lambda _: linear(rows), 1)
            show(f"fp8 per channel {name} {tokens}", us, nbytes, flops)
            groups = quantize_groups(x)
            us = microseconds(lambda _: blocks(groups), 1)
            show(f"fp8 blocks {name} {tokens}", us, nbytes, flops)


PARTS = {"int4": bench_int4, "experts": bench_experts, "fp8": bench_fp8}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--only", choices=list(PARTS))
    only = parser.parse_args().only
    with torch.inference_mode():
        for name, run in PARTS.items():
            if only in (None, name):
                run()


if __name__ == "__main__":
    main()
