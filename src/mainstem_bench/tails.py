"""The slowest requests of a served load, by the longest step: what others' prompts cost a client.

The real scheduler and store serve requests that arrive at random; times come from a cost model of
an H200, not from a device, and no time is spent on HTTP or on the host. As in the engine, a step is
made while the one before it runs, so that a request that arrives waits for both.

    plain    prompts of 200 to 800 tokens, nothing shared
    apps     4 system prompts of 2,000 tokens, questions of 26 to 160
    docs     12 documents of 5,300 tokens, questions of 13 to 53; nothing is cached at first
    chat     4 system prompts of 800 tokens, 4 turns of 66 to 400, each after the answer before it

`token_ms` is a request's mean time between two tokens; its mean and quantiles are over requests.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np

from mainstem.cli.flag_types import positive, positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import SchedConfig
from mainstem.core.ids import RequestId
from mainstem.core.request import Output, Request
from mainstem.core.step import Int32s
from mainstem_bench.arrivals import TimedAnswer, arrival_times
from mainstem_bench.feed import greedy
from mainstem_bench.limit import ModelCost
from mainstem_bench.report import show_all
from mainstem_bench.shapes import SHAPES
from mainstem_bench.virtual_engine import ELEMENT_BYTES, VirtualEngine


@dataclass(slots=True)
class Conversation:
    """What was said, and the questions to come."""

    said: Int32s
    questions: list[Int32s]
    output: int  # tokens of an answer
    answers: list[TimedAnswer] = field(default_factory=list)

    def ask(self, name: str, due_s: float) -> Request:
        """The next question."""
        self.said = np.concatenate((self.said, self.questions[len(self.answers)]))
        self.answers.append(TimedAnswer(due_s))
        return Request(RequestId(name), self.said, greedy(self.output))

    def hear(self, news: Output, now_s: float) -> bool:
        """Take in a part of the answer; returns whether another question follows it at once."""
        self.answers[-1].token_s += [now_s] * len(news.token_ids)
        self.said = np.concatenate((self.said, np.array(news.token_ids, np.int32)))
        return news.finish_reason is not None and len(self.answers) < len(self.questions)


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """Conversations that begin with one of a few texts. Numbers are tokens."""

    shared: tuple[int, int]  # number and length of the texts
    own: tuple[int, int]  # shortest and longest question
    output: int
    turns: int = 1

    def conversations(self, count: int, num_ids: int, seed: int) -> list[Conversation]:
        rng = np.random.default_rng(seed)
        low, high = self.own

        def text(length: int) -> Int32s:
            return rng.integers(0, num_ids, length).astype(np.int32)

        num_texts, length = self.shared
        texts = [text(length) for _ in range(num_texts)]
        return [
            Conversation(
                texts[rng.integers(num_texts)],
                [text(int(rng.integers(low, high + 1))) for _ in range(self.turns)],
                self.output,
            )
            for _ in range(count)
        ]


LOADS = {
    "plain": ServedLoad((1, 0), (200, 800), 128),
    "apps": ServedLoad((4, 2000), (26, 160), 128),
    "docs": ServedLoad((12, 5300), (13, 53), 64),
    "chat": ServedLoad((4, 800), (66, 400), 100, turns=4),
}


def serve(
    engine: VirtualEngine, conversations: Sequence[Conversation], arrivals: Sequence[float]
) -> dict[str, float]:
    """Ask all questions, each when it is due: the first of a conversation when it arrives, the
    others when the answer before them has ended."""
    coming = [(due_s, place) for place, due_s in enumerate(arrivals)]
    heapify(coming)
    while coming or engine.has_work:
        if not engine.has_work:
            engine.wait_until(coming[0][0])
        while coming and coming[0][0] <= engine.now_s:
            due_s, place = heappop(coming)
            engine.submit(conversations[place].ask(str(place), due_s))
        for news in engine.step():
            place = int(news.request_id)
            if conversations[place].hear(news, engine.now_s):
                heappush(coming, (engine.now_s, place))
    engine.scheduler.check()
    answers = [answer for conversation in conversations for answer in conversation.answers]
    return summary(answers) | {
        "seconds": round(engine.now_s, 2),
        "steps": engine.counters.steps,
        "saving_ratio": round(engine.counters.saving_ratio, 4),
        "preemptions": engine.counters.preemptions,
    }


def summary(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Means and quantiles over requests."""
    gaps_ms = [1e3 * np.diff(answer.token_s) for answer in answers]
    first_ms = [1e3 * answer.first_token_s for answer in answers]
    token_ms = [float(gaps.mean()) for gaps in gaps_ms]
    found = {
        "ttft_ms_mean": np.mean(first_ms),
        "ttft_ms_p50": np.percentile(first_ms, 50),
        "ttft_ms_p99": np.percentile(first_ms, 99),
        "token_ms_mean": np.mean(token_ms),
        "token_ms_p99": np.percentile(token_ms, 99),
        "gap_ms_max": max(gaps.max() for gaps in gaps_ms),
    }
    return {"requests": len(answers)} | {name: round(float(ms), 2) for name, ms in found.items()}


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench tails", description=__doc__)
    made.add_argument(
        "--load", choices=list(LOADS), nargs="+", default=list(LOADS), metavar="LOAD",
        help="one run for each (all)",
    )  # fmt: skip
    made.add_argument("--model-shape", choices=list(SHAPES), default="llama31-8b")
    flag = partial(add_flag, made)
    flag("--rate", positive, "conversations that begin in a second", 20.0, metavar="R")
    flag("--conversations", positive_count, "of each load", 400)
    made.add_argument(
        "--step-ms", type=float, nargs="+", default=[0.0, 250.0, 100.0, 50.0, 25.0], metavar="MS",
        help="one run for each (0: no limit, 250, 100, 50, 25)",
    )  # fmt: skip
    flag("--chunk-tokens", positive_count, "largest step", 2048)
    flag("--kv-tokens", positive_count, "of KV", 450_000)
    flag("--seed", int, "seed of arrivals and lengths", 0)
    made.add_argument("--json", action="store_true", help="one JSON line for each run")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    model = ModelCost.of(SHAPES[args.model_shape], ELEMENT_BYTES)
    vocab_size = SHAPES[args.model_shape].vocab_size
    arrivals = arrival_times(args.conversations, args.rate, args.seed)

    def run(load: ServedLoad, step_ms: float) -> dict[str, float]:
        conversations = load.conversations(args.conversations, vocab_size, args.seed)
        config = SchedConfig(chunk_tokens=args.chunk_tokens, step_ms=step_ms or None)
        engine = VirtualEngine(model, vocab_size, args.kv_tokens, config)
        return serve(engine, conversations, arrivals)

    results = (
        {"load": name, "step_ms": step_ms, **run(LOADS[name], step_ms)}
        for name in args.load
        for step_ms in args.step_ms
    )
    about = {
        "rate": args.rate, "conversations": args.conversations, "model": args.model_shape,
        "chunk_tokens": args.chunk_tokens, "kv_tokens": args.kv_tokens, "seed": args.seed,
    }  # fmt: skip
    show_all("tails", results, args.json, about)
    return 0
