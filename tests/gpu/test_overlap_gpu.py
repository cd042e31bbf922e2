# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Kernels that are launched while the previous one still runs read and write nothing too early;
needs CUDA, run with `make test-gpu`.

The previous kernel is the worst case: it lets the next one start at once, and does its own work
much later. With unrelated launches between the two, the tests check that waiting for the last of
these also waits for all kernels before it.
"""

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    # Skip before the kernels are imported: other tests need them in Triton's interpreter.
    pytest.skip("no CUDA device", allow_module_level=True)

import triton
import triton.language as tl
from torch import Tensor

from mainstem.kernels import AttentionLimits, SpanAttention
from mainstem.kernels.attention.plan import ALL_LAUNCHES
from mainstem.kernels.dense.activations import Act, activate, activate_gated, activate_gated_fp8
from mainstem.kernels.dense.fp8_rows import Fp8Per
from mainstem.kernels.dense.head_norms import HeadNorms, joint_norm_
from mainstem.kernels.dense.logits import scale_logits_
from mainstem.kernels.dense.norms import Delta, Norm, norm_rows, norm_rows_fp8
from mainstem.kernels.dense.rows import quantize_rows
from mainstem.kernels.memory.append import rope_append
from mainstem.kernels.overlap import can_overlap
from mainstem_bench.kernels.fused import some
from mainstem_bench.workloads import AttentionCase, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not can_overlap(torch.device("cuda")), reason="needs Hopper or later"),
]

EPS, TOKENS, HEADS, KV_HEADS, DIM = 1e-5, 40, 32, 8, 128
HIDDEN, QKV = HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM
LATE_NS = 300_000  # a launch takes a few thousand
BLOCK = 8192


@triton.jit
def _copy_at_once_kernel(target_ptr, source_ptr, size, BLOCK: tl.constexpr):
    """Does not wait for any other kernel."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + lanes, tl.load(source_ptr + lanes, mask=lanes < size), mask=lanes < size)


@triton.jit
def _copy_late_kernel(target_ptr, source_ptr, size, NS: tl.constexpr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now < begin + NS:
        now = tl.extra.cuda.globaltimer()
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + tl.where(now < begin, BLOCK, 0)
    tl.store(target_ptr + lanes, tl.load(source_ptr + lanes, mask=lanes < size), mask=lanes < size)


def copy_late(target: Tensor, source: Tensor) -> None:
    grid = (triton.cdiv(source.numel(), BLOCK),)
    _copy_late_kernel[grid](target, source, source.numel(), NS=LATE_NS, BLOCK=BLOCK)


def copy_at_once(target: Tensor, source: Tensor) -> None:
    grid = (triton.cdiv(source.numel(), BLOCK),)
    _copy_at_once_kernel[grid](target, source, source.numel(), BLOCK=BLOCK, launch_pdl=True)


def eagerly(run: Callable[[], None]) -> None:
    run()


def as_a_graph(run: Callable[[], None]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()


NORM = Norm(some(HIDDEN, seed=1), EPS)
LAYER_NORM = Norm(NORM.gain, EPS, is_layer=True, bias=some(HIDDEN, seed=10))
HEAD_NORMS = HeadNorms(Norm(some(DIM, seed=2), EPS), Norm(some(DIM, seed=12), EPS))
K_NORM = Norm(some(KV_HEADS * DIM, seed=11), EPS)
ASIDE = some(TOKENS, HIDDEN, seed=3)
POSITIONS = torch.arange(TOKENS, device="cuda") * 7
SLOTS = torch.arange(TOKENS, device="cuda") + 3
FREQUENCIES = 10000.0 ** (-torch.arange(0, DIM // 2, device="cuda").float() / (DIM // 2))
PAGES = torch.zeros(2, 4, KV_HEADS, 16, DIM, dtype=torch.bfloat16, device="cuda")
for copy in (copy_late, copy_at_once):
    copy(torch.empty_like(ASIDE), ASIDE)  # compiled before any capture
torch.cuda.synchronize()


def _joint_norm(x: Tensor) -> Tensor:
    joint_norm_(x, NORM, K_NORM, HEADS, KV_HEADS, DIM)
    return x


def _scale_logits(x: Tensor) -> Tensor:
    scale_logits_(x, 3.0, 5.0)
    return x


def _add_norm(x: Tensor) -> Tensor:
    norm_rows(x, NORM, Delta(ASIDE))
    return x


def _rope_append(x: Tensor, norms: HeadNorms | None = None) -> Tensor:
    parts = x.view(TOKENS, -1, DIM)
    k, v = parts[:, HEADS : HEADS + KV_HEADS], parts[:, HEADS + KV_HEADS :]
    rope_append(parts[:, :HEADS], k, v, PAGES[0], PAGES[1], POSITIONS, SLOTS, FREQUENCIES, norms)
    return torch.cat([x.flatten(), PAGES.flatten()])


# These functions must launch nothing before the kernel that is tested; an allocation of zeros would
# be a launch.
READERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "norm": (HIDDEN, lambda x: norm_rows(x, NORM)),
    "norm_fp8": (HIDDEN, lambda x: norm_rows_fp8(x, NORM)[0].float()),
    "norm_fp8, groups": (HIDDEN, lambda x: norm_rows_fp8(x, NORM, per=Fp8Per.GROUP)[0].float()),
    "norm, delta": (HIDDEN, lambda x: norm_rows(x, NORM, Delta(x))),
    "norm, residual": (HIDDEN, _add_norm),
    "norm, parallel": (HIDDEN, lambda x: norm_rows(x, NORM, Delta(ASIDE, x, NORM, 0.5))),
    "norm, layer": (HIDDEN, lambda x: norm_rows(x, LAYER_NORM)),
    "activate": (HIDDEN, lambda x: activate(x, Act.GELU)),
    "activate_gated": (2 * HIDDEN, lambda x: activate_gated(x, Act.SILU)),
    "activate_gated_fp8": (2 * HIDDEN, lambda x: activate_gated_fp8(x, Act.SILU)[0].float()),
    "quantize_rows": (HIDDEN, lambda x: quantize_rows(x)[0].float()),
    "scale_logits": (HIDDEN, _scale_logits),
    "joint_norm": (QKV, _joint_norm),
    "rope_append": (QKV, _rope_append),
    "rope_append, norms": (QKV, lambda x: _rope_append(x, HEAD_NORMS)),
    "joint_norm, rope_append": (QKV, lambda x: _rope_append(_joint_norm(x))),
}
WRITERS: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "norm": (HIDDEN, lambda x: norm_rows(ASIDE, NORM, out=x)),
    "norm, residual": (HIDDEN, _add_norm),
    "activate": (HIDDEN, lambda x: activate(ASIDE, Act.RELU, out=x)),
    "activate_gated": (HIDDEN // 2, lambda x: activate_gated(ASIDE, Act.SILU, out=x)),
    "scale_logits": (HIDDEN, _scale_logits),
    "joint_norm": (QKV, _joint_norm),
    "rope_append": (QKV, _rope_append),
    "rope_append, norms": (QKV, lambda x: _rope_append(x, HEAD_NORMS)),
}


@pytest.mark.parametrize("launch", [eagerly, as_a_graph])
def test_a_kernel_that_does_not_wait_reads_too_early(
    launch: Callable[[Callable[[], None]], None],
) -> None:
    """Otherwise the other tests here could not fail."""
    target, found = torch.zeros_like(ASIDE), torch.ones_like(ASIDE)
    torch.cuda.synchronize()

    def chain() -> None:
        copy_late(target, ASIDE)
        copy_at_once(found, target)

    launch(chain)
    torch.cuda.synchronize()
    assert torch.equal(target, ASIDE)
    assert not found.any()


@pytest.mark.parametrize("launch", [eagerly, as_a_graph])
@pytest.mark.parametrize("between", [0, 1, 2])
@pytest.mark.parametrize("name", list(READERS))
def test_nothing_is_read_before_it_is_written(
    name: str, between: int, launch: Callable[[Callable[[], None]], None]
) -> None:
    width, read = READERS[name]
    source = some(TOKENS, width, seed=4)
    right = read(source.clone())
    quantize_rows(ASIDE)  # compiled
    PAGES.zero_()
    target, found = torch.zeros_like(source), torch.zeros_like(right)
    torch.cuda.synchronize()

    def chain() -> None:
        copy_late(target, source)
        for _ in range(between):
            quantize_rows(ASIDE)
        found.copy_(read(target))

    launch(chain)
    torch.cuda.synchronize()
    assert torch.equal(found, right)


@pytest.mark.parametrize("launch", [eagerly, as_a_graph])
@pytest.mark.parametrize("between", [0, 1, 2])
@pytest.mark.parametrize("name", list(WRITERS))
def test_nothing_is_written_before_it_is_read(
    name: str, between: int, launch: Callable[[Callable[[], None]], None]
) -> None:
    width, write = WRITERS[name]
    before = some(TOKENS, width, seed=5)
    write(before.clone())  # compiled
    quantize_rows(ASIDE)
    source, target = before.clone(), torch.zeros_like(before)
    torch.cuda.synchronize()

    def chain() -> None:
        copy_late(target, source)
        for _ in range(between):
            quantize_rows(ASIDE)
        write(source)

    launch(chain)
    torch.cuda.synchronize()
    assert torch.equal(target, before)
    assert not torch.equal(source, before), "nothing was written at all"


@pytest.mark.parametrize("behind", [0, 1])
def test_an_event_between_two_launches_is_waited_for(behind: int) -> None:
    """Layers wait like this for pages that another stream loads."""
    source = some(TOKENS, HIDDEN, seed=9)
    right = norm_rows(source, NORM)
    quantize_rows(ASIDE)  # compiled
    target, loads = torch.zeros_like(source), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(loads):
        copy_late(target, source)
        event = loads.record_event()
    quantize_rows(ASIDE)
    torch.cuda.current_stream().wait_event(event)
    for _ in range(behind):
        quantize_rows(ASIDE)
    found = norm_rows(target, NORM)
    torch.cuda.synchronize()
    assert torch.equal(found, right)


CASES = {
    "small": tuple(Run((row,), 300, is_causal=True) for row in range(TOKENS)),
    "small, merged": (Run((0,), 20000, is_causal=True), Run((1,), 30, is_causal=True)),
    "large": (Run(tuple(range(TOKENS)), 600, is_causal=True),),
    "large and small, merged": (
        Run(tuple(range(TOKENS)), 3000),
        *(Run((row,), 100 + row, is_causal=True) for row in range(TOKENS)),
    ),
}


@pytest.mark.parametrize("launch", [eagerly, as_a_graph])
@pytest.mark.parametrize("has_all", [False, True], ids=["as planned", "all launches"])
@pytest.mark.parametrize("name", list(CASES))
def test_attention_waits_for_queries_and_the_next_kernel_waits_for_attention(
    name: str, has_all: bool, launch: Callable[[Callable[[], None]], None]
) -> None:
    """Late queries, rope, attention and the quantization of its output, in the order of a layer."""
    case = AttentionCase(name, CASES[name], HEADS, KV_HEADS, DIM, page_size=16)
    spans = case.spans()
    shape = (int(spans.page_ids.max()) + 5, KV_HEADS, 16, DIM)
    k_pages, v_pages = (some(*shape, seed=seed) for seed in (6, 7))
    attention = SpanAttention(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, page_size=16, dtype=torch.bfloat16,
        device=torch.device("cuda"), limits=AttentionLimits(TOKENS, len(spans.page_ids)),
    )  # fmt: skip
    launches = attention.plan(spans)
    unwritten = torch.full((TOKENS,), -1, device="cuda")
    source = some(TOKENS, QKV, seed=8)
    out = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16, device="cuda")

    def layer(qkv: Tensor) -> Tensor:
        parts = qkv.view(TOKENS, -1, DIM)
        q, k, v = parts.split([HEADS, KV_HEADS, KV_HEADS], 1)
        rope_append(q, k, v, k_pages, v_pages, POSITIONS, unwritten, FREQUENCIES)
        wanted = ALL_LAUNCHES if has_all else launches
        attention.run(q, k_pages, v_pages, out=out, launches=wanted)
        return quantize_rows(out.view(TOKENS, -1))[0].float()

    right = layer(source.clone()).clone()
    target, found = torch.zeros_like(source), torch.zeros_like(right)
    out.zero_()
    torch.cuda.synchronize()

    def chain() -> None:
        copy_late(target, source)
        found.copy_(layer(target))

    launch(chain)
    torch.cuda.synchronize()
    assert torch.equal(found, right)
