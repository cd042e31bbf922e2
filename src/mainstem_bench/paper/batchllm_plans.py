"""Measures what BatchLLM's planner saves and costs, without a device: Fig. 7, 8, levels,
overhead."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from mainstem.core.plan import Int64s, Prompts
from mainstem.plan.planner import PlanConfig, plan_tree
from mainstem.plan.prefix_tree import build_tree
from mainstem.plan.saving import LruCache, compare
from mainstem_bench.paper import jobs, style
from mainstem_bench.paper.item import Line, Number, Outcome, Settings, Verdict
from mainstem_bench.paper.results import one, only
from mainstem_bench.paper.rules import agreed
from mainstem_bench.paper.style import Figure
from mainstem_bench.plan import shared_prompts

KV_TOKENS = 450_000  # 8B in 16 bits on an 80 GB card leaves about this much
OUTPUT = 100
DEGREES = (2, 4, 8, 16)
PREFIXES = (1000, 2000, 4000, 8000, 16000)
REPEATS = 5
INSTRUCTION = 60  # tokens that all prompts of the industry mix begin with
VOCAB = 30_000


@dataclass(frozen=True, slots=True)
class Industry:
    """Shuffled prompts of the industry mix, and the numbers with which they were drawn."""

    prompts: Prompts
    prefixes: Int64s  # tokens before the query, by prompt
    documents: Int64s  # for each prompt, the document that it asks about


def industry(num_prompts: int, seed: int = 0) -> Industry:
    """Draw the paper's mix: one short instruction and a document, 1,570 tokens together, with 3
    queries of 30 tokens each. These are means: lengths of documents are lognormal, of queries
    Poisson, and degrees geometric."""
    rng = np.random.default_rng(seed)
    instruction = rng.integers(10, VOCAB, INSTRUCTION)
    rows: list[tuple[np.ndarray, int, int]] = []
    mean, sigma = 1570 - INSTRUCTION, 0.5
    num_documents = 0
    while len(rows) < num_prompts:
        tokens = max(16, round(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma)))
        document = rng.integers(10, VOCAB, tokens)
        for _ in range(rng.geometric(1 / 3)):
            query = rng.integers(10, VOCAB, max(1, rng.poisson(30)))
            row = np.concatenate([instruction, document, query])
            rows.append((row, INSTRUCTION + tokens, num_documents))
        num_documents += 1
    order = rng.permutation(num_prompts)
    return Industry(
        Prompts.from_lists([rows[at][0].tolist() for at in order]),
        np.array([rows[at][1] for at in order]),
        np.array([rows[at][2] for at in order]),
    )


def industry_rows(settings: Settings, count: int) -> list[list[int]]:
    """Prompts of the mix for every shape's vocabulary; short ones for a quick run."""
    drawn = industry(count).prompts
    rows = [(drawn[at] % (jobs.VOCAB - 10) + 10).tolist() for at in range(count)]
    return [row[:48] + row[-16:] for row in rows] if settings.is_quick else rows


def run_lengths(settings: Settings) -> Iterator[Line]:
    """Fig. 7: the shared and own tokens as they were drawn, and how much of the sharing the planner
    finds."""
    mix = industry(400 if settings.is_quick else 8000)
    own = mix.prompts.num_tokens - mix.prefixes
    degrees = np.bincount(mix.documents)
    for name, values in (("shared prefix", mix.prefixes), ("own context", own)):
        width = -(-int(np.ptp(values)) // 30)  # whole tokens
        heights, edges = np.histogram(values, np.arange(values.min(), values.max() + width, width))
        yield {
            "part": name,
            "mean": round(float(values.mean()), 1),
            "p95": round(float(np.percentile(values, 95)), 1),
            "counts": heights.tolist(),
            "edges": np.round(edges, 1).tolist(),
        }
    plan = plan_tree(build_tree(mix.prompts), PlanConfig(levels=1))
    found = plan.node_tokens[plan.member_nodes]
    is_shared = degrees[mix.documents[plan.members]] > 1
    is_right = found >= mix.prefixes[plan.members]
    yield {
        "part": "degree",
        "mean": round(float(degrees[degrees > 0].mean()), 2),
        "prompts": len(mix.prompts),
        "documents_found": round(float(is_right[is_shared].mean()), 4),
    }


def plot_lengths(lines: Sequence[Line], figure: Figure) -> None:
    for axes, name in zip(figure.subplots(1, 2), ("shared prefix", "own context"), strict=True):
        line = one(lines, part=name)
        axes.stairs(line["counts"], line["edges"], fill=True, color=style.OURS["color"])
        axes.axvline(line["mean"], label=f"mean {line['mean']:.0f}", **style.LIMIT)
        style.finish(axes, f"{name} of the industry mix", "tokens", "prompts")


def judge_lengths(lines: Sequence[Line]) -> Verdict:
    shared, own = one(lines, part="shared prefix")["mean"], one(lines, part="own context")["mean"]
    degree = one(lines, part="degree")
    return Verdict(
        Outcome.CANNOT,
        "the authors' data is not public. Lengths are drawn with the averages that they give, so "
        "that the averages agree shows nothing: the drawn prompts have on average "
        f"{shared:.0f} shared and {own:.0f} own tokens, with "
        f"{degree['mean']:.1f} prompts per prefix. For {degree['documents_found']:.1%} of the "
        "prompts whose document has several questions, the planner finds the whole prefix",
    )


def run_saving(settings: Settings) -> Iterator[Line]:
    """Fig. 8: prompt tokens saved by the plan and by an LRU cache, with shuffled prompts."""
    num_prompts = 160 if settings.is_quick else 6400
    for prefix in PREFIXES[:2] if settings.is_quick else PREFIXES:
        for degree in DEGREES:
            prompts = shared_prompts(num_prompts, degree, prefix, 200)
            tree = build_tree(prompts)
            kv_tokens = KV_TOKENS * num_prompts // 6400
            saved = compare(tree, plan_tree(tree), LruCache(kv_tokens, output_tokens=OUTPUT))
            yield {
                "prefix": prefix,
                "degree": degree,
                "requests": num_prompts,
                "planned": round(saved.multi_level, 4),
                "upper_bound": round(saved.upper_bound, 4),
                "lru": round(saved.lru, 4),
            }


def plot_saving(lines: Sequence[Line], figure: Figure) -> None:
    prefixes = sorted({line["prefix"] for line in lines})
    for axes, degree in zip(figure.subplots(1, 2, sharey=True), (4, 16), strict=True):
        found = only(lines, degree=degree)
        style.curve(axes, found, "prefix", "planned", "planned", style.OURS, 100)
        style.curve(axes, found, "prefix", "lru", "LRU, shuffled", style.STORED, 100)
        style.curve(axes, found, "prefix", "upper_bound", "limit", style.LIMIT, 100)
        if degree == 16:
            axes.plot([2000, 16000], [85.2, 92.6], label="BatchLLM (paper)", **style.PAPER)
            axes.plot([2000, 16000], [40.1, 6.3], label="vLLM 0.6.4 (paper)", **style.RIVAL)
        style.log2_ticks(axes, prefixes)
        axes.set_ylim(0, 105)
        title = f"{degree} requests to a prefix, {found[0]['requests']:,} shuffled"
        style.finish(axes, title, "prefix, tokens", "prompt tokens saved, %")


def judge_saving(lines: Sequence[Line]) -> Verdict:
    near, far = one(lines, prefix=2000, degree=16), one(lines, prefix=16000, degree=16)
    is_best = all(abs(line["planned"] - line["upper_bound"]) < 1e-3 for line in lines)
    numbers = (
        Number(near["planned"], 0.852, 0.1), Number(near["lru"], 0.401, 0.1),
        Number(far["planned"], 0.926, 0.1), Number(far["lru"], 0.063, 0.1),
    )  # fmt: skip
    return Verdict(
        agreed(numbers),
        f"with 16 requests per prefix of 2,000 tokens, the plan saves {near['planned']:.1%} (paper "
        f"85.2 %), and an LRU cache would save {near['lru']:.1%} (40.1 %); with prefixes of "
        f"16,000, {far['planned']:.1%} (92.6 %) and {far['lru']:.1%} (6.3 %). The plan "
        f"{'always' if is_best else 'does not always'} reach{'es' if is_best else ''} the upper "
        "bound",
        numbers,
    )


def run_levels(settings: Settings) -> Iterator[Line]:
    """Compare what one level of prefixes saves, plain and enlarged, with what many levels save."""
    prompts = industry(400 if settings.is_quick else 8000).prompts
    tree = build_tree(prompts)
    saved = compare(tree, plan_tree(tree), LruCache(KV_TOKENS, output_tokens=OUTPUT))
    yield {
        "requests": len(prompts),
        "first_level": round(saved.first_level, 4),
        "enlarged": round(saved.first_level_enlarged, 4),
        "multi_level": round(saved.multi_level, 4),
        "upper_bound": round(saved.upper_bound, 4),
        "lru": round(saved.lru, 4),
    }


def plot_levels(lines: Sequence[Line], figure: Figure) -> None:
    line, axes = lines[-1], figure.subplots()
    ways = {"LRU": "lru", "first level": "first_level", "enlarged": "enlarged"}
    ways |= {"multi-level": "multi_level"}
    paper = [35.8, None, 55.0, 56.0]
    ours = [100 * line[name] for name in ways.values()]
    series = {"here": (ours, style.OURS), "paper": (paper, style.PAPER)}
    style.bars(axes, list(ways), series, "{:.1f}")
    axes.axhline(100 * line["upper_bound"], label="limit here", **style.LIMIT)
    title = f"industry mix, {line['requests']:,} prompts"
    style.finish(axes, title, "how prefixes are found", "prompt tokens saved, %")


def judge_levels(lines: Sequence[Line]) -> Verdict:
    line = lines[-1]
    gap = 100 * (line["multi_level"] - line["enlarged"])
    return Verdict(
        Outcome.REPRODUCED if 0 <= gap <= 2 else Outcome.NOT,
        f"many levels save {line['multi_level']:.1%} of prompt tokens. One level saves "
        f"{line['enlarged']:.1%} if its prefixes are made longer by Algorithm 1 (enlarged): "
        f"{gap:.1f} points less (paper 1). It saves {line['first_level']:.1%} if each group is a "
        "child of the root. What more levels cost was not timed",
    )


def run_overhead(settings: Settings) -> Iterator[Line]:
    """Measure the seconds from token ids to groups."""
    for num_prompts in (200, 400) if settings.is_quick else (1000, 2000, 4000, 8000, 16000):
        prompts = industry(num_prompts).prompts
        times = []
        for _ in range(REPEATS):
            began_s = perf_counter()
            plan_tree(build_tree(prompts))
            times.append(perf_counter() - began_s)
        yield {
            "requests": num_prompts,
            "prompt_tokens": len(prompts.token_ids),
            "seconds": round(float(np.median(times)), 4),
            "spread": [round(min(times), 4), round(max(times), 4)],
        }


def plot_overhead(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    counts = [line["requests"] for line in lines]
    axes.errorbar(
        counts,
        [line["seconds"] for line in lines],
        [
            [line["seconds"] - line["spread"][0] for line in lines],
            [line["spread"][1] - line["seconds"] for line in lines],
        ],
        capsize=3,
        label="here, one slow core",
        **style.OURS,
    )
    axes.plot([8000], [1.51], label="paper (Python)", **style.PAPER)
    style.log_y(axes)
    style.log2_ticks(axes, counts)
    style.finish(axes, "planning the industry mix", "prompts", "seconds")


def judge_overhead(lines: Sequence[Line]) -> Verdict:
    line = one(lines, requests=8000)
    return Verdict(
        Outcome.PARTLY if line["seconds"] < 1.51 else Outcome.NOT,
        f"8,000 prompts ({line['prompt_tokens'] / 1e6:.1f}M tokens) are planned in "
        f"{line['seconds']:.3f} s ({line['spread'][0]:.3f} to {line['spread'][1]:.3f} in {REPEATS} "
        "runs; paper 1.51 s, on another processor). The 8,000 requests were not run, so the share "
        "of planning in the whole job is not shown",
    )
