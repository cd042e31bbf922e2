"""Attention over pages in fp8 on a card, read directly and expanded; run with `make test-gpu`."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Skip before the kernels are imported: other tests need them in Triton's interpreter.
    pytest.skip("no CUDA device", allow_module_level=True)

from mainstem.core.config import DType
from mainstem.core.events import EventBus
from mainstem.engine.build import join
from mainstem.kernels import AttentionLimits
from mainstem.kernels.attention import reference
from mainstem.kernels.attention.expanded import NEVER, ExpandingAttention
from mainstem.kernels.attention.plan import Launches
from mainstem.kernels.attention.shape import tiles_for_rounded
from mainstem.kernels.attention.triton.open_pages import attend_open_pages
from mainstem.kernels.attention.tuning import SPLIT_TILES
from mainstem.kernels.attention.window import clip_spans
from mainstem.kernels.memory.expand import expand_rounded_pages
from mainstem.runner import gpu
from mainstem.runner.gpu_load import load_gpu_runner
from mainstem.runner.gpu_rounded import before_own_pages
from mainstem_bench.kernel_fp8 import Pair, make_rounded, round_kv
from tests.gpu.test_span_gpu import TOLERANCE
from tests.runner.recipes import RECIPES, RecipeOrigin, a_config
from tests.runner.steps import Seq, Work, a_step
from tests.runner.test_rounded_gpu import prompts
from tests.runner.test_rounded_pages import ask, rounded

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
NUM_PAGES = 1000
WAYS = {"direct": NEVER, "expanded": 0.0}
UNWRITTEN = 1e3  # scale of pages that are not full; nothing may show it


@dataclass(frozen=True)
class Case:
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "Llama 3": Case(),
    "fp16": Case(dtype=torch.float16),
    "pages of 32": Case(page_size=32),
    "pages of 64": Case(page_size=64),
    "as many KV heads": Case(16, 16),
    "one KV head": Case(16, 1),
    "odd groups": Case(28, 4),
    "two KV heads": Case(16, 2),
    "large groups, pages of 32": Case(64, 2, page_size=32),
    "heads of 64": Case(32, 8, 64),
    "heads of 64, pages of 32": Case(9, 3, 64, 32),
    "heads of 80": Case(13, 1, 80, 32),
    "heads of 96": Case(12, 4, 96, 64),
    "heads of 256": Case(8, 4, 256),
    "heads of 256, one KV head": Case(8, 1, 256, 32),
    "a short window": Case(window=10),
    "Mistral": Case(window=300),
    "Gemma 2": Case(16, 8, 256, 16, 200, 50.0),
    "Gemma 2, full": Case(32, 16, 128, 16, None, 50.0),
    "Gemma 3": Case(8, 4, 256, 16, 512),
    "gpt-oss": Case(64, 8, 64, 16, 128, has_sinks=True),
    "gpt-oss, full": Case(64, 8, 64, 16, has_sinks=True),
    "Falcon 7B": Case(71, 1, 64),
    "all at once": Case(71, 1, 80, 32, 90, 20.0, has_sinks=True),
}


def works_of(size: int) -> list[Work]:
    """Prompts and decodes that begin and end at, before and after the ends of pages; some share
    eight pages, with enough rows for large units."""
    shapes = [  # tokens before, tokens of the step
        (0, 1), (0, size - 1), (0, size), (0, size + 1), (size - 1, 1), (size - 1, 2), (size, 1),
        (size, size), (3 * size, 5 * size + 3), (2 * size + 5, 300), (0, 520), (1000, 1),
        (1000 // size * size, 130),
    ]  # fmt: skip
    pages = iter(range(NUM_PAGES))
    works: list[Work] = []
    for before, tokens in shapes:
        own = [next(pages) for _ in range(-(-(before + tokens) // size))]
        works.append(Work(Seq(len(works), [0] * 2000, own, before), tokens))
    shared = [next(pages) for _ in range(8)]
    for before, tokens in (
        (8 * size, 1),
        (8 * size + 3, 40),
        (9 * size, 2 * size),
        (8 * size, 200),
        *((8 * size + i * size // 2, 1) for i in range(40)),
    ):
        own = [next(pages) for _ in range(-(-(before + tokens) // size) - 8)]
        seq = Seq(len(works), [0] * 2000, [*shared, *own], before, num_shared_pages=8)
        works.append(Work(seq, tokens))
    return works


class Setup:
    """A step, its pages as computed and rounded, and queries."""

    def __init__(self, case: Case, works: list[Work], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.works, size = case, works, case.page_size
        self.step = a_step(works, size, 99)
        shape = (2, NUM_PAGES, case.kv_heads, size, case.dim)
        self.exact = torch.randn(shape, device="cuda").to(case.dtype)
        self.opened: Pair = (self.exact[0], self.exact[1])
        self.kv = round_kv(*self.opened)
        for work in works:  # pages that are not full have never been rounded
            done = work.seq.num_done + work.num_tokens
            if done % size:
                for scales in self.kv.scales:
                    scales[work.seq.pages[done // size]] = UNWRITTEN
        self.spans = before_own_pages(self.step.spans, self.step.positions, size)
        if case.window is not None:
            self.spans = clip_spans(self.spans, self.step.positions, case.window, size)
        self.q = torch.randn(self.step.num_tokens, case.heads, case.dim, device="cuda").to(
            case.dtype
        )
        self.sinks = 2 * torch.randn(case.heads, device="cuda") if case.has_sinks else None

    def attention(self) -> ExpandingAttention:
        case, tokens = self.case, self.step.num_tokens
        limits = AttentionLimits(tokens, len(self.spans.page_ids), max_partials=12 * tokens + 500)
        attention = make_rounded(
            (case.heads, case.kv_heads, case.dim, case.page_size), limits,
            dtype=case.dtype, has_window=case.window is not None, softcap=case.softcap,
        )  # fmt: skip
        if torch.cuda.get_device_capability()[0] == 9:
            assert attention._expanded._hopper is not None
            usual = SPLIT_TILES[case.dim]
            group = case.heads // case.kv_heads
            tiles = tiles_for_rounded(usual, group, case.kv_heads, case.dim, case.page_size)
            assert (attention._direct._hopper is not None) == tiles.is_split
        return attention

    def run(self, attention: ExpandingAttention, way: str) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over the pages before each token's own."""
        launches = attention.plan(self.spans, WAYS[way])
        return self.run_planned(attention, launches)

    def run_planned(
        self, attention: ExpandingAttention, launches: Launches
    ) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.q, float("nan"))
        lse = torch.full(self.q.shape[:2], float("nan"), device="cuda")
        attention.run(self.q, *self.kv.numbers, out, lse, scales=self.kv.scales, launches=launches)
        return out, lse

    def right(self) -> tuple[Tensor, Tensor]:
        """The same in plain PyTorch."""
        k, v = self.kv.expanded
        return reference.span_attention(
            self.q.float(), k, v, self.spans, self.case.dim**-0.5,
            softcap=self.case.softcap, before_own_page=True,
        )  # fmt: skip


def check(out: Tensor, right: Tensor, seen: Tensor, dtype: torch.dtype) -> None:
    assert not out[seen].isnan().any()
    error = (out[seen].float() - right[seen]).abs().max() / right[seen].abs().max()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_tokens_read_the_pages_before_their_own(name: str, way: str) -> None:
    """Both ways agree with the reference, and each with itself a second time."""
    setup = Setup(CASES[name], works_of(CASES[name].page_size))
    attention = setup.attention()
    out, lse = setup.run(attention, way)
    assert attention.is_expanding == (way == "expanded")
    right, right_lse = setup.right()
    seen = right_lse[:, 0].isfinite()
    assert seen.sum() > 500
    check(out, right, seen, setup.case.dtype)
    assert float((lse - right_lse)[seen].abs().max()) < 0.02
    again, _ = setup.run(attention, way)
    assert torch.equal(out[seen], again[seen])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_with_their_own_page_tokens_read_all_that_they_may(name: str, way: str) -> None:
    """As in a layer: the second kernel adds own pages, as computed, and sinks."""
    setup = Setup(CASES[name], works_of(CASES[name].page_size))
    case, size = setup.case, setup.case.page_size
    out, lse = setup.run(setup.attention(), way)
    positions = torch.from_numpy(setup.step.positions).cuda().long()
    slots = torch.from_numpy(setup.step.write_slots).cuda()
    attend_open_pages(
        setup.q, *setup.opened, out, lse, positions, slots,
        scale=case.dim**-0.5, window=case.window, softcap=case.softcap, sinks=setup.sinks,
    )  # fmt: skip
    before, row = torch.stack(setup.kv.expanded), 0
    right = torch.empty_like(out, dtype=torch.float32)
    for work in setup.works:
        for position in range(work.seq.num_done, work.seq.num_done + work.num_tokens):
            own = position // size
            keys = torch.cat(
                (
                    before[:, work.seq.pages[:own]].transpose(1, 2).flatten(2, 3),
                    setup.exact[:, work.seq.pages[own], :, : position % size + 1].float(),
                ),
                dim=2,
            )
            if case.window is not None:
                keys = keys[:, :, max(0, position - case.window + 1) :]
            right[row] = read(case, keys, setup.q[row].float(), setup.sinks)
            row += 1
    check(out, right, torch.ones(len(out), dtype=torch.bool, device="cuda"), case.dtype)


def read(case: Case, keys: Tensor, q: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of one token over `keys` [K and V, kv_heads, keys, dim]."""
    k, v = keys.repeat_interleave(case.heads // case.kv_heads, 1).unbind()
    scores = torch.einsum("hd,hkd->hk", q, k) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None]), 1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), v)


@pytest.mark.parametrize("tokens", [4096, 8000])
def test_a_long_prompt_agrees(tokens: int) -> None:
    """Many units of each program, and Partials."""
    works = [Work(Seq(0, [0] * tokens, list(range(-(-tokens // 16)))), tokens)]
    setup = Setup(Case(), works)
    out, _ = setup.run(setup.attention(), "expanded")
    direct, _ = setup.run(setup.attention(), "direct")
    check(out[16:], direct[16:].float(), torch.ones(tokens - 16, dtype=torch.bool), torch.bfloat16)


def test_steps_that_expand_and_others_follow_each_other_without_a_pause() -> None:
    """Layers of several steps: none reads pages that another has expanded."""
    case = Case()
    setups = [Setup(case, works_of(16), seed) for seed in range(4)]
    attention = setups[0].attention()
    found = []
    for _ in range(10):
        for expand_rows in WAYS.values():
            launches = attention.plan(setups[0].spans, expand_rows)  # that of all of them
            found += [(setup, setup.run_planned(attention, launches)[0]) for setup in setups]
    for setup in setups:
        right, right_lse = setup.right()
        seen = right_lse[:, 0].isfinite()
        for other, out in found:
            if other is setup:
                check(out, right, seen, case.dtype)


@pytest.mark.parametrize("name", ["GraniteForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"])
def test_engines_answer_alike_if_pages_are_expanded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the graphs of decodes, and prompts outside of graphs."""
    origin, config = RecipeOrigin(RECIPES[name]), rounded(a_config(DType.BF16))
    calls: list[int] = []

    def counted(numbers: Pair, scales: Pair, pages: Tensor, count: int, out: Tensor) -> None:
        calls.append(count)
        real(numbers, scales, pages, count, out)

    real = expand_rounded_pages
    monkeypatch.setattr(f"{ExpandingAttention.__module__}.expand_rounded_pages", counted)
    answers = []
    for expands in (False, True):
        monkeypatch.setattr(gpu, "EXPAND_ROWS", 4.0 if expands else NEVER)
        monkeypatch.setattr("mainstem.runner.gpu_load.graph_sizes", lambda *_: (1, 2, 4))
        runner, facts = load_gpu_runner(origin, config, DEVICE)
        calls.clear()  # the first run of each kernel, when it starts
        engine = join(runner, facts, config, EventBus())
        answers.append(ask(engine, prompts(), 1))
        engine.close()
        assert any(calls) == expands
    logprobs = [np.concatenate([each[0][1] for each in answer]) for answer in answers]
    assert np.abs(logprobs[1] - logprobs[0]).max() < 0.2
