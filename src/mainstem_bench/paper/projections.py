"""Projects the throughput of cards that we do not have.

The limit follows from 9/10 of the data sheet's bandwidth and 2/3 of its FLOP/s, which are the
shares that an H200 sustains. A job reaches about 9/10 of that limit (`mainstem bench offline`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mainstem.plan.cost import H200, Card
from mainstem_bench.paper.engines import Size
from mainstem_bench.paper.item import Line, Outcome, Settings, Verdict
from mainstem_bench.paper.jobs import limit_per_s
from mainstem_bench.paper.results import one

SHARE_OF_LIMIT = 0.9
# bytes/s, dense 16-bit FLOP/s, KV tokens left for Llama2-7B and Llama-3.1-8B
SHEETS = {
    "A40": (0.696e12, 149.7e12, 56_000, 200_000),
    "A100-SXM4-80GB": (2.039e12, 312e12, 112_000, 425_000),
    "MI200, one of its two dies": (1.6e12, 191.5e12, 84_000, 317_000),
}


def _card(name: str) -> Card:
    bytes_per_s, flops_per_s, _, _ = SHEETS[name]
    return replace(H200, name=name, bytes_per_s=0.9 * bytes_per_s, flops_per_s=flops_per_s * 2 / 3)


def _line(name: str, size: Size, job: tuple[int, int], lengths: tuple[int, int, int]) -> Line:
    limit = limit_per_s(size, *job, lengths, _card(name))
    prefix, own, answer = lengths
    return {
        "card_name": name,
        "model_shape": size.shape,
        "prefix": prefix,
        "own": own,
        "answer": answer,
        "degree": job[1],
        "limit_per_s": round(limit, 2),
        "projected_per_s": round(SHARE_OF_LIMIT * limit, 2),
    }


def run_relay(_: Settings) -> Iterator[Line]:
    """RelayAttention's cards: Llama2-7B after a system prompt."""
    for name, sheet in SHEETS.items():
        if not name.startswith("MI"):
            kv_tokens = sheet[2]
            yield _line(name, Size("llama2-7b", kv_tokens), (1, 1000), (2048, 64, 128))


def run_batch(_: Settings) -> Iterator[Line]:
    """BatchLLM's cards: 8B over documents, and the industry mix."""
    for name, sheet in SHEETS.items():
        if name != "A40":
            size = Size("llama31-8b", sheet[3])
            yield _line(name, size, (100, 16), (2000, 200, 100))
            yield _line(name, size, (667, 3), (1570, 30, 100))


def judge_batch(lines: Sequence[Line]) -> Verdict:
    amd, a100 = (
        one(lines, card_name=name, degree=16)["projected_per_s"] for name in list(SHEETS)[:0:-1]
    )
    return Verdict(
        Outcome.CANNOT,
        "the kernels are written in Triton, except on Hopper, and nothing was run on an AMD card. "
        "Projected for 8B, prefixes of 2,000 tokens with 16 prompts each, and 200 own tokens: "
        f"{amd:.1f} requests/s on one die of an MI200, {a100:.1f} on an A100, for which "
        "the paper reports 18",
    )
