"""The random workloads of the figures: equal arguments give equal prompts and equal spans.

Prompts are token ids. Attention cases are spans over pages in random physical order, as in
a long-running server.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mainstem.core.step import Int32s, Spans


def shared(
    groups: int, degree: int, prefix: int, distinct: int, seed: int = 0, vocab: int = 30000
) -> list[list[int]]:
    """Make groups x degree prompts: each group has a common head, and each prompt its own tail."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(groups):
        head = [rng.randrange(10, vocab) for _ in range(prefix)]
        for _ in range(degree):
            prompts.append(head + [rng.randrange(10, vocab) for _ in range(distinct)])
    return prompts


def shuffled(prompts: list[list[int]], seed: int = 1) -> list[list[int]]:
    """Return the same prompts in the order that was used for rivals."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class OfflineJob:
    """Prompts in groups with a common head, each answered with `output` tokens."""

    name: str
    model_shape: str  # a name in shapes.py
    kv_tokens: int  # as much KV memory as the rivals had
    groups: int
    degree: int
    prefix: int
    distinct: int
    output: int
    num_requests: int | None = None  # only the first ones; None: all
    most_distinct: int | None = None  # own tokens are `distinct` to this; None: all alike

    @property
    def own_tokens(self) -> float:
        """The mean length of what follows a prompt's prefix."""
        return (self.distinct + (self.most_distinct or self.distinct)) / 2

    @property
    def most_tokens(self) -> int:
        """The length of the longest prompt with its answer."""
        return self.prefix + (self.most_distinct or self.distinct) + self.output

    def group_sizes(self) -> list[int]:
        """The number of prompts in each group; only the last group may be smaller than the
        others."""
        left = self.groups * self.degree
        if self.num_requests is not None:
            left = min(left, self.num_requests)
        return [self.degree] * (left // self.degree) + [left % self.degree] * (
            left % self.degree > 0
        )

    def prompts(self, vocab: int, seed: int = 0) -> list[list[int]]:
        """Return the prompts, group by group; a smaller job has the first prompts of a larger one.
        Ids are below 30,000, as for rivals, or below `vocab` if that is less.
        """
        sizes = self.group_sizes()
        most = min(vocab, 30_000)
        longest = self.most_distinct or self.distinct
        made = shared(len(sizes), self.degree, self.prefix, longest, seed, most)[: sum(sizes)]
        if longest == self.distinct:
            return made
        rng = random.Random(seed + 1)
        return [prompt[: self.prefix + rng.randint(self.distinct, longest)] for prompt in made]


OFFLINE_JOBS = {
    job.name: job
    for job in (
        OfflineJob("b2000-sd16", "llama31-8b", 450_000, 100, 16, 2000, 200, 100),
        OfflineJob("industry", "llama31-8b", 450_000, 667, 3, 1570, 30, 100),
        OfflineJob("b16000-sd4", "llama31-8b", 450_000, 60, 4, 16000, 200, 100),
        OfflineJob("b2000-1000-sd4", "llama31-8b", 450_000, 250, 4, 2000, 1000, 100),
        OfflineJob("noshare-512", "llama31-8b", 450_000, 1000, 1, 512, 0, 128),
        OfflineJob("relay-64", "llama2-7b", 160_000, 1, 1000, 64, 64, 128),
        OfflineJob("relay-512", "llama2-7b", 160_000, 1, 1000, 512, 64, 128),
        OfflineJob("relay-1024", "llama2-7b", 160_000, 1, 1000, 1024, 64, 128),
        OfflineJob("relay-2048", "llama2-7b", 160_000, 1, 1000, 2048, 64, 128),
        # labels for rows of a table: short rows after one instruction, short answers
        OfflineJob("classify", "qwen36-35b-a3b", 450_000, 1, 4000, 1200, 30, 4, most_distinct=120),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    """One span before it has pages: which tokens read how many keys."""

    rows: tuple[int, ...]
    key_tokens: int
    is_causal: bool = False


def _depths(runs: Sequence[Run]) -> list[int]:
    """Return the position at which each run begins: after the earlier runs of its first token."""
    depth_of: dict[int, int] = {}
    depths = []
    for run in runs:
        depths.append(depth_of.get(run.rows[0], 0) if run.rows else 0)
        for row in run.rows:
            depth_of[row] = depths[-1] + run.key_tokens
    return depths


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A step's attention, with its limit and the best rival's time on an H200."""

    name: str
    runs: tuple[Run, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None  # number of keys that a token sees, including its own
    allowed_over_floor: float = 1.25  # the limit is this times the floor, plus 8 us
    rival_us: float | None = None  # best of FlashInfer decode and cascade, FlashAttention-3

    @property
    def num_tokens(self) -> int:
        return 1 + max(max(run.rows) for run in self.runs)

    def spans(self, seed: int = 0) -> Spans:
        """Return the runs as spans, with pages in random physical order; they are not clipped to
        windows yet."""
        pages = [-(-run.key_tokens // self.page_size) for run in self.runs]
        return Spans(
            query_starts=np.cumsum([0] + [len(run.rows) for run in self.runs]).astype(np.int32),
            query_rows=np.concatenate([np.array(run.rows, np.int32) for run in self.runs]),
            page_starts=np.cumsum([0, *pages]).astype(np.int32),
            page_ids=np.random.default_rng(seed).permutation(sum(pages)).astype(np.int32),
            key_tokens=np.array([run.key_tokens for run in self.runs], np.int32),
            is_causal=np.array([run.is_causal for run in self.runs]),
            key_positions=np.array(_depths(self.runs), np.int32),
        )

    def positions(self) -> Int32s:
        """Return the position of each token: that of the last key that it sees."""
        spans, positions = self.spans(), np.zeros(self.num_tokens, np.int32)
        for run, depth in zip(self.runs, spans.key_positions.tolist(), strict=True):
            last = depth + run.key_tokens - 1
            back = np.arange(len(run.rows))[::-1] if run.is_causal else 0
            rows = np.array(run.rows)
            positions[rows] = np.maximum(positions[rows], last - back)
        return positions


def grouped(batch: int, groups: int, prefix: int, own: int) -> tuple[Run, ...]:
    """Return decoding sequences in equal groups. Each group shares a prefix, and each sequence has
    its own tokens."""
    degree = batch // groups
    heads = tuple(
        Run(tuple(range(group * degree, (group + 1) * degree)), prefix) for group in range(groups)
    )
    return heads + tuple(Run((row,), own, is_causal=True) for row in range(batch))


def own_runs(lengths: list[int]) -> tuple[Run, ...]:
    return tuple(Run((row,), length, is_causal=True) for row, length in enumerate(lengths))


def unequal_groups(rng: random.Random, batch: int, own: int) -> tuple[Run, ...]:
    """Return groups of 1 to 40 sequences. Prefixes differ in length, and each sequence has its own
    tokens."""
    runs, first = [], 0
    while first < batch:
        members = min(rng.randint(1, 40), batch - first)
        runs.append(Run(tuple(range(first, first + members)), rng.randint(200, 8000)))
        first += members
    return (*runs, *own_runs([own] * batch))


def _decode_cases() -> Iterator[AttentionCase]:
    """The nine cases that rivals ran, too: one query token per sequence, bf16, pages of 16."""
    for name, batch, groups, prefix, own, kv_heads, rival_us in (
        ("gqa32/8 B256 1x2048+256", 256, 1, 2048, 256, 8, 303.5),
        ("gqa32/8 B256 16x2000+250", 256, 16, 2000, 250, 8, 304.1),
        ("gqa32/8 B256 16x16000+300", 256, 16, 16000, 300, 8, 1568.4),
        ("gqa32/8 B1024 64x2000+250", 1024, 64, 2000, 250, 8, 1146.4),
        ("gqa32/8 B64 1x32768+256", 64, 1, 32768, 256, 8, 547.7),
        ("gqa32/8 B256 64x512+512", 256, 64, 512, 512, 8, 206.9),
        ("mha32 B32 1x2048+128", 32, 1, 2048, 128, 32, 90.4),
        ("mha32 B32 1x256+128", 32, 1, 256, 128, 32, 35.6),
        ("mha32 B256 1x2048+128", 256, 1, 2048, 128, 32, 357.4),
    ):
        runs = grouped(batch, groups, prefix, own)
        yield AttentionCase(name, runs, kv_heads=kv_heads, rival_us=rival_us)


def _unshared_cases() -> Iterator[AttentionCase]:
    rng = random.Random(0)
    ragged = [rng.randint(1, 8192) for _ in range(256)]
    for name, lengths in (
        ("gqa32/8 B256 own 4096", [4096] * 256),
        ("gqa32/8 B1 own 32768", [32768]),
        ("gqa32/8 B256 ragged 1..8192", ragged),
    ):
        yield AttentionCase(name, own_runs(lengths), allowed_over_floor=1.2)


def _tree_cases() -> Iterator[AttentionCase]:
    levels = [(1, 1024), (8, 1024), (64, 512)]
    runs: list[Run] = []
    for groups, tokens in levels:
        runs.extend(grouped(256, groups, tokens, 0)[:groups])
    runs.extend(own_runs([256] * 256))
    yield AttentionCase(
        "gqa32/8 B256 tree 1x1024 8x1024 64x512 +256", tuple(runs), allowed_over_floor=1.35
    )
    unequal = unequal_groups(random.Random(0), 256, 256)
    yield AttentionCase("gqa32/8 B256 unequal groups +256", unequal, allowed_over_floor=1.4)


def prefill_runs(first_row: int) -> tuple[Run, ...]:
    """Return seven chunks of 512 tokens, each after 2,000 other tokens (BatchLLM Fig. 10)."""
    return tuple(
        Run(
            tuple(range(first_row + 512 * chunk, first_row + 512 * (chunk + 1))),
            2512,
            is_causal=True,
        )
        for chunk in range(7)
    )


def prefill_cases() -> tuple[AttentionCase, ...]:
    """Return prompts as the engine computes them: a new prompt, and chunks after long prefixes."""

    def chunks(count: int, tokens: int, before: int) -> tuple[Run, ...]:
        return tuple(
            Run(tuple(range(i * tokens, (i + 1) * tokens)), before + tokens, is_causal=True)
            for i in range(count)
        )

    return (
        AttentionCase("gqa32/8 prefill 4096 over 0", chunks(1, 4096, 0)),
        AttentionCase("gqa32/8 prefill 4x1024 over 16000", chunks(4, 1024, 16000)),
    )


def mixed_cases() -> tuple[AttentionCase, AttentionCase, AttentionCase]:
    """Return a mixed step, and its two halves as separate steps."""
    decodes = grouped(256, 16, 2000, 250)
    return (
        AttentionCase("gqa32/8 mixed 7x512 over 2000, 256 decodes", decodes + prefill_runs(256)),
        AttentionCase("gqa32/8 prefill 7x512 over 2000", prefill_runs(0)),
        AttentionCase("gqa32/8 decode B256 16x2000+250", decodes),
    )


def kernel_cases() -> list[AttentionCase]:
    """Return every decode case that has a limit."""
    return [*_decode_cases(), *_unshared_cases(), *_tree_cases()]


def relay_case(batch: int, context: int, system: int, is_shared: bool) -> AttentionCase:
    """Return a point of RelayAttention's Fig. 1 and 6: 52 heads of 128, one system prompt for the
    batch.

    Not shared stands for a prompt that is stored once and read by every sequence (vLLM-PS in the
    paper); here each sequence reads its own copy.
    """
    name = f"mha52 B{batch} 1x{system}+{context} {'reads' if is_shared else 'storage'}"
    once, each = grouped(batch, 1, system, context), own_runs([system + context] * batch)
    return AttentionCase(name, once if is_shared else each, heads=52, kv_heads=52)
