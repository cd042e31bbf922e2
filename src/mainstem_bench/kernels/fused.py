# ruff: noqa: B023
"""Kernels around attention on a card: checked against torch, then timed at Llama-8B's shapes.

`PYTHONPATH=src:. python -m mainstem_bench.kernels.fused [--checks-only] [--json FILE]`

Prints one JSON line per result, in microseconds. Inputs are used in turn, so that weights come from
memory and not from the cache.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mainstem.cli.parser import Parser
from mainstem.core.request import SamplingParams
from mainstem.core.step import SampleBatch
from mainstem.kernels.dense import invariant, reference
from mainstem.kernels.dense.activations import (
    Act,
    activate,
    activate_fp8,
    activate_gated,
    activate_gated_fp8,
)
from mainstem.kernels.dense.fp8 import Fp8Linear, quantize_weight
from mainstem.kernels.dense.fp8_blocks import quantize_groups
from mainstem.kernels.dense.fp8_rows import Fp8Per
from mainstem.kernels.dense.head_norms import HeadNorms, joint_norm_
from mainstem.kernels.dense.logits import scale_logits_
from mainstem.kernels.dense.norms import (
    Delta,
    Norm,
    add_,
    norm_rows,
    norm_rows_fp8,
)
from mainstem.kernels.dense.rows import quantize_rows
from mainstem.kernels.memory import reference as memory_reference
from mainstem.kernels.memory.append import rope_append
from mainstem.kernels.sampling.sample import argmax, draw, sample
from mainstem.runner.sampler import choice_of, choose
from mainstem_bench.kernels.samples import a_sample_batch, some_keys

EPS = 1e-5
HIDDEN, MLP, VOCAB = 4096, 14336, 128256
LINEARS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096),
           "down": (4096, 14336)}  # fmt: skip
TOKENS = (16, 256, 1024, 4096)
COPY_BYTES_PER_US = 4.3e6


def some(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Numbers that are complete on return: kernels read gains before the previous kernel ends."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    torch.cuda.synchronize()
    return made


def a_norm(kind: str, size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 10) -> Norm:
    gain = some(size, dtype=torch.float32 if kind == "rms, fp32 gain" else dtype, seed=seed)
    bias = some(size, dtype=dtype, seed=seed + 1) if kind == "layer" else None
    return Norm(gain, EPS, kind == "layer", bias)


def right_norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.is_layer:
        return reference.layer_norm(x, norm.gain, norm.bias, norm.eps)
    return reference.rms_norm(x, norm.gain, norm.eps)


def off_by(found: Tensor, right: Tensor) -> float:
    """Norm of the difference divided by the norm of the right answer."""
    return float((found.double() - right.double()).norm() / right.double().norm())


# If a sum has another order, a few elements are rounded differently, by 2^-9 in bf16.
LIMITS = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 2e-6}
SHAPES = ((1, 576), (37, 4096), (5, 2880), (300, 5120), (3, 16384))
KINDS = ("rms", "rms, fp32 gain", "layer")


def check_norms() -> None:
    for tokens, size in SHAPES:
        for dtype, limit in LIMITS.items():
            x, rows, more = (some(tokens, size, dtype=dtype, seed=seed) for seed in range(3))
            for kind in KINDS:
                norm, after = a_norm(kind, size, dtype), a_norm(kind, size, dtype, seed=20)
                assert off_by(norm_rows(x, norm), right_norm(x, norm)) < limit, (kind, dtype, size)
                residual = x.clone()
                found = norm_rows(residual, norm, Delta(rows))
                assert torch.equal(residual, x + rows)
                assert off_by(found, right_norm(residual, norm)) < limit
                residual = x.clone()
                found = norm_rows(residual, norm, Delta(rows, more))
                assert torch.equal(residual, x + (rows + more))
                assert off_by(found, right_norm(residual, norm)) < limit
                residual = x.clone()
                add_(residual, Delta(rows, after=after, scale=0.22))
                right = x + right_norm(rows, after) * 0.22
                assert off_by(residual, right) < limit, (kind, dtype, size)


def check_head_norms() -> None:
    for heads, kv_heads, dim in (
        (32, 8, 128),
        (32, 32, 80),
        (16, 8, 256),
        (40, 8, 128),
        (5, 1, 64),
    ):
        q_size, k_size = heads * dim, kv_heads * dim
        qkv = some(50, q_size + 2 * k_size)
        queries, keys, values = torch.split(qkv, [q_size, k_size, k_size], 1)
        for kind in KINDS:
            is_layer = kind == "layer"
            wide = [Norm(a_norm(kind, size, seed=20).gain, EPS, is_layer)
                    for size in (q_size, k_size)]  # fmt: skip
            found = qkv.clone()
            joint_norm_(found, wide[0], wide[1], heads, kv_heads, dim)
            right = torch.cat([right_norm(queries, wide[0]), right_norm(keys, wide[1]), values], 1)
            assert off_by(found, right) < 1e-3, (heads, kv_heads, dim, kind)
            if is_layer:
                continue
            norms = HeadNorms(a_norm(kind, dim, seed=20), a_norm(kind, dim, seed=21))
            parts, pages = qkv.clone().view(50, -1, dim), some(2, 4, kv_heads, 16, dim)
            q, k, v = torch.split(parts, [heads, kv_heads, kv_heads], 1)
            slots = torch.arange(50, device="cuda")
            rope_append(q, k, v, pages[0], pages[1], slots, slots, None, norms)
            stored = pages[0].transpose(1, 2).reshape(64, kv_heads, dim)[:50]
            assert off_by(q, right_norm(queries.reshape(50, -1, dim), norms.q)) < 1e-3
            assert off_by(stored, right_norm(keys.reshape(50, -1, dim), norms.k)) < 1e-3
            assert torch.equal(v.reshape(50, -1), values)


def check_activations() -> None:
    for tokens, size in SHAPES:
        for dtype, limit in LIMITS.items():
            x = some(tokens, 2 * size, dtype=dtype, seed=3) * 3
            for act in Act:
                right = reference.gated(x, act.value)
                assert off_by(activate_gated(x, act), right) < 2 * limit, (act, dtype, size)
                if act is not Act.CLAMPED_SILU:
                    right = reference.activation(x, act.value)
                    assert off_by(activate(x, act), right) < 2 * limit, (act, dtype, size)


def check_logits() -> None:
    for vocab, dtype in ((201088, torch.bfloat16), (262144, torch.float32), (49155, torch.float16)):
        for scale, cap in ((0.125, None), (1.0, 30.0), (2.0, 50.0)):
            logits = some(9, vocab, dtype=dtype) * 10
            right = logits.float() * scale
            if cap is not None:
                right = cap * torch.tanh(right / cap)
            scale_logits_(logits, scale, cap)
            assert off_by(logits, right.to(dtype)) < LIMITS[dtype], (vocab, scale, cap)


def check_rope_append() -> None:
    """Check heads of other sizes, rotated partly or not at all. Torch's sines differ by an ulp."""
    cases = ((32, 32, 80, 16), (71, 1, 64, 32), (128, 8, 64, 32), (16, 8, 256, 128),
             (32, 32, 96, 48), (16, 4, 128, 0))  # fmt: skip
    for heads, kv_heads, dim, half in cases:
        qkv = some(20, heads + 2 * kv_heads, dim)
        pages = torch.zeros(2, 4, kv_heads, 16, dim, dtype=torch.bfloat16, device="cuda")
        positions = torch.arange(20, device="cuda", dtype=torch.int32) * 301
        slots = torch.randperm(64, device="cuda")[:20]
        inv_freq = 10000.0 ** (-torch.arange(half, device="cuda").float() / max(half, 1))
        torch.cuda.synchronize()
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        right_q = memory_reference.rope(q, positions, inv_freq)
        right_k = memory_reference.rope(k, positions, inv_freq)
        right = memory_reference.append(pages[0], pages[1], right_k, v, slots)
        rope_append(q, k, v, pages[0], pages[1], positions, slots, inv_freq if half else None)
        assert off_by(q, right_q) < 1e-3, (heads, dim, half)
        assert off_by(pages[0], right[0]) < 1e-3, (heads, dim, half)
        assert torch.equal(pages[1], right[1])
        assert torch.equal(q[..., 2 * half :], right_q[..., 2 * half :])


def check_fp8_rows() -> None:
    """The fp8 output of the kernels is their plain output quantized by torch, up to rounding: torch
    may multiply by a reciprocal where the kernels divide. So a few values may differ by one step of
    fp8 (1/8). With groups, the kernels quantize both, and bits are equal."""
    x, rows, gate_up = some(100, HIDDEN), some(100, HIDDEN, seed=2), some(100, 2 * MLP)
    layer, rms = a_norm("layer", HIDDEN), a_norm("rms", HIDDEN)
    for found, plain in (
        (quantize_rows(x), x),
        (norm_rows_fp8(x, rms), norm_rows(x, rms)),
        (norm_rows_fp8(x.clone(), rms, Delta(rows)), norm_rows(x.clone(), rms, Delta(rows))),
        (norm_rows_fp8(x.clone(), layer, Delta(rows)), norm_rows(x.clone(), layer, Delta(rows))),
        (activate_gated_fp8(gate_up, Act.SILU), activate_gated(gate_up, Act.SILU)),
        (activate_fp8(gate_up, Act.GELU_TANH), activate(gate_up, Act.GELU_TANH)),
    ):
        values, scale = quantize_weight(plain)
        apart = (found[0].float() - values.float()).abs()
        assert float((apart > 0).float().mean()) < 3e-3
        assert bool((apart <= values.float().abs() / 7 + 2**-8).all())
        torch.testing.assert_close(found[1][:, 0], scale, rtol=1e-6, atol=0)
    per = Fp8Per.GROUP
    for groups, plain in (
        (norm_rows_fp8(x, rms, per=per), norm_rows(x, rms)),
        (activate_gated_fp8(gate_up, Act.SILU, per=per), activate_gated(gate_up, Act.SILU)),
    ):
        alone = quantize_groups(plain)
        assert torch.equal(groups[0].float(), alone[0].float())
        assert torch.equal(groups[1], alone[1])


def check_fp8_linear() -> None:
    for num_out, num_in in (
        (6144, 4096),
        (1000, 584),
        (48, 1016),
        (2880, 4096),
        (5120, 2880),
        (7680, 2560),
    ):
        weight, bias = some(num_out, num_in), some(num_out, seed=1)
        linear = Fp8Linear.quantize(weight, bias)
        emulated = Fp8Linear.quantize(weight.cpu(), bias.cpu())
        for tokens in (1, 8, 9, 17, 33, 64, 65, 200):
            x = some(tokens, num_in, seed=tokens)
            assert off_by(linear(x).cpu(), emulated(x.cpu())) < 5e-3, (num_out, num_in, tokens)
            assert torch.equal(linear(quantize_rows(x)), linear(x))
    half = Fp8Linear.quantize(weight.half(), bias.half(), torch.float16)
    assert half(x.half()).dtype == torch.float16
    assert off_by(half(x.half()), linear(x)) < 5e-3


def check_rows_are_independent() -> None:
    """In norms, activations and the product of deterministic mode a row has the same bits alone,
    among 200 and among 3,000."""
    x, weight, bias = some(3000, HIDDEN), some(6144, HIDDEN, seed=1), some(6144, seed=3)
    rms, layer = a_norm("rms", HIDDEN), a_norm("layer", HIDDEN)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "rms": lambda x: norm_rows(x, rms),
        "layer": lambda x: norm_rows(x.clone(), layer, Delta(x * 0.5, x, layer, 0.3)),
        "add": lambda x: norm_rows(x * 0.5, rms, Delta(x)),
        "gated": lambda x: activate_gated(x, Act.SILU),
        "matmul": lambda x: invariant.matmul(x, weight, bias),
    }
    for name, run in runs.items():
        whole = run(x)
        for first, last in ((0, 1), (5, 21), (100, 300), (2990, 3000)):
            assert torch.equal(run(x[first:last]), whole[first:last]), name
    wide, wide_weight = x[:300].float(), weight[:500].float()
    whole = invariant.matmul(wide, wide_weight)
    assert torch.equal(invariant.matmul(wide[7:8], wide_weight), whole[7:8])


def check_matmul() -> None:
    """In 16 bits the output is rounded; in fp32 thousands of terms are added one after the other.
    The error of TF32 would be 3e-4."""
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)):
        for tokens, num_out, num_in in (
            (1, 6144, 4096), (200, 1000, 584), (1000, 4096, 1536), (300, 2560, 2560),
            (70, 5120, 2880), (9, 51200, 2560), (3, 201088, 2880), (2, 262144, 1152),
        ):  # fmt: skip
            x, weight = some(tokens, num_in, dtype=dtype), some(num_out, num_in, dtype=dtype)
            bias = some(num_out, dtype=dtype, seed=2)
            right = x.double() @ weight.double().t() + bias
            assert off_by(invariant.matmul(x, weight, bias), right) < limit


def check_argmax() -> None:
    for rows, vocab in ((1, VOCAB), (7, 49152), (100, VOCAB), (1500, 32000), (3, 50)):
        for dtype in (torch.bfloat16, torch.float32):
            logits = some(rows, vocab, dtype=dtype, seed=rows)
            for _ in range(2):
                assert torch.equal(argmax(logits).cpu(), logits.cpu().argmax(dim=-1))


SETTINGS = [
    SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(top_p=0.9),
    SamplingParams(top_k=50), SamplingParams(top_k=50, top_p=0.8, temperature=0.7),
    SamplingParams(min_p=0.05), SamplingParams(top_p=0.99, temperature=1.5),
    SamplingParams(top_k=20000, top_p=0.98), SamplingParams(temperature=0.0),
    SamplingParams(top_k=5, min_p=0.2, top_p=0.95),
]  # fmt: skip


def check_sample() -> None:
    """The CPU's sorted draw and the card's search round exponents differently. So one of 200 draws
    may differ, where two scores, or a token and a limit, are equal within rounding."""
    for spread in (0.5, 3.0):
        settings = SETTINGS * 20
        logits = some(len(settings), VOCAB, dtype=torch.float32) * spread
        batch = a_sample_batch(settings, VOCAB, some_keys(len(settings)))
        run = _drawer(batch)
        found = run(logits)
        drawn = torch.from_numpy(np.flatnonzero(batch.temperature > 0))
        right = logits.cpu().argmax(dim=-1)
        right[drawn] = choose(logits.cpu()[drawn], choice_of(batch).of(drawn))
        different = int((found.cpu() != right).sum())
        assert different <= 1, f"{different} of {len(settings)} draws differ at spread {spread}"
        assert torch.equal(found, run(logits))


def check_draw() -> None:
    """Without limits, two launches give the same tokens as four, for a row alone and in a batch."""
    settings = [SamplingParams(temperature=t, min_p=p) for t in (0, 0.4, 1, 2) for p in (0, 0.1)]
    for rows, vocab in ((1, VOCAB), (8, VOCAB), (100, 49152), (1500, 32000), (3, 50)):
        logits = some(rows, vocab, dtype=torch.float32, seed=rows) * 3
        batch = a_sample_batch((settings * rows)[:rows], vocab, some_keys(rows))
        names = ("temperature", "top_k", "top_p", "min_p", "noise_keys")
        columns = {name: torch.from_numpy(getattr(batch, name)).cuda() for name in names}
        whole = sample(logits, *columns.values())
        del columns["top_k"], columns["top_p"]
        for _ in range(2):
            assert torch.equal(draw(logits, *columns.values()), whole)
        for row in range(0, rows, 37):
            alone = (column[row : row + 1].clone() for column in columns.values())
            assert int(draw(logits[row : row + 1], *alone)) == int(whole[row])


def _drawer(batch: SampleBatch) -> Callable[[Tensor], Tensor]:
    """Draws like the sampler, with settings that are already on the card."""
    is_limited = (batch.top_k < VOCAB) | (batch.top_p < 1.0)
    limits = (batch.top_k, batch.top_p) if is_limited.any() else ()
    columns = (batch.temperature, *limits, batch.min_p, batch.noise_keys)
    settings = [torch.from_numpy(column).cuda() for column in columns]
    run = sample if is_limited.any() else draw
    return lambda logits: run(logits, *settings)


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def time_us(runs: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Median time of one of `runs`, which are captured together as a graph; outputs are dropped."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times: list[float] = []
    for _ in range(replays + 2):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(times[2:])


class TimingLines:
    """Prints results and keeps them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, tokens: int, **figures: float) -> None:
        rounded = {key: float(f"{value:.4g}") for key, value in figures.items()}
        self.lines.append(json.dumps({"name": name, "tokens": tokens, **rounded}))
        print(self.lines[-1], flush=True)


def over(inputs: Sequence[Tensor], run: Callable[[Tensor], object]) -> list[Callable[[], object]]:
    return [lambda x=x: run(x) for x in inputs]  # type: ignore[misc]


def time_rows(report: TimingLines) -> None:
    norm, q_norm, layer = a_norm("rms", HIDDEN), a_norm("rms", 128), a_norm("layer", HIDDEN)
    gemma = a_norm("rms, fp32 gain", HIDDEN)
    for tokens in TOKENS:
        copies = 8 if tokens <= 256 else 4
        xs = [some(tokens, HIDDEN, seed=seed) for seed in range(copies)]
        residual, out = some(tokens, HIDDEN), torch.empty(tokens, HIDDEN, device="cuda")
        out = out.bfloat16()
        floor = 4 * residual.nbytes / COPY_BYTES_PER_US
        report(
            "add_norm", tokens, floor=floor,
            ours=time_us(over(xs, lambda x: norm_rows(residual, norm, Delta(x), out))),
            fp8=time_us(over(xs, lambda x: norm_rows_fp8(residual, norm, Delta(x)))),
            groups=time_us(over(xs, lambda x: norm_rows_fp8(residual, norm, Delta(x),
                                                            per=Fp8Per.GROUP))),
            layer=time_us(over(xs, lambda x: norm_rows(residual, layer, Delta(x), out))),
            gemma=time_us(over(xs, lambda x: norm_rows(residual, gemma, Delta(x, after=gemma),
                                                       out))),
            torch=time_us(over(xs, lambda x: F.rms_norm(residual.add_(x), (HIDDEN,), norm.gain,
                                                        EPS))),
        )  # fmt: skip
        qkvs = [some(tokens, 6144, seed=seed) for seed in range(copies)]
        pages = some(2, tokens, 8, 16, 128)
        slots = torch.arange(tokens, device="cuda")
        inv_freq = 10000.0 ** (-torch.arange(64, device="cuda") / 64)

        def append(qkv: Tensor, norms: HeadNorms | None) -> None:
            parts = qkv.view(len(qkv), -1, 128)
            q, k, v = torch.split(parts, [32, 8, 8], 1)
            rope_append(q, k, v, pages[0], pages[1], slots, slots, inv_freq, norms)

        report(
            "rope_append", tokens, floor=2 * qkvs[0].nbytes / COPY_BYTES_PER_US,
            ours=time_us(over(qkvs, lambda x: append(x, None))),
            normed=time_us(over(qkvs, lambda x: append(x, HeadNorms(q_norm, q_norm)))),
        )  # fmt: skip
        gates = [some(tokens, 2 * MLP, seed=seed) for seed in range(copies)]
        out = torch.empty(tokens, MLP, device="cuda").bfloat16()
        report(
            "silu_mul", tokens, floor=3 * out.nbytes / COPY_BYTES_PER_US,
            ours=time_us(over(gates, lambda x: activate_gated(x, Act.SILU, out))),
            gelu_tanh=time_us(over(gates, lambda x: activate_gated(x, Act.GELU_TANH, out))),
            fp8=time_us(over(gates, lambda x: activate_gated_fp8(x, Act.SILU))),
            groups=time_us(over(gates, lambda x: activate_gated_fp8(x, Act.SILU,
                                                                    per=Fp8Per.GROUP))),
            torch=time_us(over(gates, lambda x: F.silu(x[:, :MLP]) * x[:, MLP:])),
        )  # fmt: skip


def time_sampling(report: TimingLines) -> None:
    for rows in (1, 16, 256, 1000):
        logits = [some(rows, VOCAB, seed=seed) for seed in range(2)]
        report("argmax", rows, floor=logits[0].nbytes / COPY_BYTES_PER_US,
               ours=time_us(over(logits, argmax)),
               torch=time_us(over(logits, lambda x: x.argmax(dim=-1))))  # fmt: skip
        for spread in (0.7, 3.0):
            wide = [some(rows, VOCAB, dtype=torch.float32, seed=seed) * spread for seed in range(2)]
            figures = {}
            for name, sampling in (
                ("plain", SamplingParams()), ("top_k", SamplingParams(top_k=50)),
                ("top_p", SamplingParams(top_p=0.9)),
            ):  # fmt: skip
                batch = a_sample_batch([sampling] * rows, VOCAB, some_keys(rows))
                figures[name] = time_us(over(wide, _drawer(batch)))
            if rows <= 256 and spread > 1:
                figures["torch_sort"] = time_us(over(wide, lambda x: x.sort(dim=-1)))
            report(f"sample spread {spread}", rows, floor=wide[0].nbytes / COPY_BYTES_PER_US,
                   **figures)  # fmt: skip


def time_products(report: TimingLines) -> None:
    for name, (num_out, num_in) in LINEARS.items():
        weights = [some(num_out, num_in, seed=seed) for seed in range(3)]
        linears = [Fp8Linear.quantize(weight) for weight in weights]
        for tokens in TOKENS:
            x = some(tokens, num_in)
            rows = quantize_rows(x)
            figures = {"cublas": time_us(over(weights, lambda w: F.linear(x, w)))}
            for fast in (True, False):
                runs = [
                    lambda linear=linear: torch._scaled_mm(
                        rows[0], linear.values.t(), scale_a=rows[1], scale_b=linear.scale[None, :],
                        out_dtype=torch.bfloat16, use_fast_accum=fast)
                    for linear in linears
                ]  # fmt: skip
                figures["fp8_fast" if fast else "fp8_slow"] = time_us(runs)
            figures["ours"] = time_us(over(weights, lambda w: invariant.matmul(x, w)))
            report(f"linear {name}", tokens, **figures)


TILES = [
    invariant.Tile(64, 32, 128, 4, 4), invariant.Tile(64, 64, 128, 4, 4),
    invariant.Tile(64, 128, 64, 4, 5), invariant.Tile(64, 64, 256, 4, 2),
    invariant.Tile(128, 128, 64, 8, 4), invariant.Tile(128, 128, 64, 4, 4),
    invariant.Tile(128, 64, 128, 4, 3), invariant.Tile(256, 128, 64, 8, 3),
]  # fmt: skip


def check_tiles_agree() -> None:
    """A row has the same bits with every tile."""
    for num_in in (HIDDEN, 2880):  # 2880 is no multiple of 128
        x, weight = some(300, num_in), some(6144, num_in, seed=1)
        right = invariant.matmul(x, weight)
        for tile in TILES:
            assert torch.equal(invariant.multiply(x, weight, tile), right), tile


CHECKS["tiles_agree"] = check_tiles_agree


def run_checks(checks: Mapping[str, Callable[[], None]]) -> int:
    """Run all checks, also after one that fails; returns how many failed."""
    failed = 0
    for name, check in checks.items():
        try:
            check()
            print(f"check {name}: right", flush=True)
        except Exception as error:
            failed += 1
            print(f"check {name}: {type(error).__name__} {error}", flush=True)
    return failed


def main() -> None:
    parser = Parser()
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    failed = run_checks(CHECKS)
    report = TimingLines()
    if not arguments.checks_only:
        with torch.inference_mode():
            for part in (time_rows, time_sampling, time_products):
                part(report)
    if arguments.json:
        arguments.json.write_text("\n".join(report.lines) + "\n")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
