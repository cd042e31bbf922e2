"""Puts load on any OpenAI-compatible chat server, and measures what its clients see.

Conversations begin at random at a given rate (--rate, Poisson: a slow server does not slow the
arrivals), or a fixed number is kept in flight (--concurrency). They come from a file or are
generated with a shared system prompt of --prefix words. The turns of a conversation follow each
other; each contains the earlier answers.

ttft_ms        from sending a request to its first text
itl_ms         from one piece of text to the next
e2e_ms         from sending a request to the end of its answer
norm_ms        e2e over output tokens: the normalized latency of the vLLM and RelayAttention papers
minute_ttft_ms_p99 and later_ttft_ms_p99: of the requests sent in the first minute, which a server
that compiles or warms up answers late, and of the others
goodput_per_s  requests per second whose TTFT and mean ITL are within the --slo limits
"""

import argparse
import asyncio
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from mainstem.cli.flag_types import not_negative_count, positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError, MainstemError
from mainstem.core.tables import table
from mainstem_bench.conversations import Dialogue, DialogueShape, Message, from_file, made_up
from mainstem_bench.report import line, load_average, spread
from mainstem_bench.sse_client import (
    Endpoint,
    ServerRefused,
    StreamedAnswer,
    find_model,
    stream_chat,
)

MINUTE_S = 60.0


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench serve", description=__doc__)
    made.add_argument("--url", default="http://127.0.0.1:8000", help="with or without /v1")
    made.add_argument("--model", help="default: the first model that the server lists")
    made.add_argument("--api-key-file", type=Path, help="a file with the server's API key")
    flag = partial(add_flag, made)
    flag("--requests", positive_count, "total number of requests", 64)
    pace = made.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=float, help="conversations begun per second; inf: all at once")
    add_flag(pace, "--concurrency", positive_count, "conversations in flight (default 8)")
    made.add_argument("--dataset", type=Path, help="JSON lines: prompt, turns, messages, ...")
    flag("--prefix", not_negative_count, "words of the shared system prompt", 512)
    made.add_argument("--own", type=positive_count, default=32, help="words of each question")
    made.add_argument("--groups", type=positive_count, default=1, help="different system prompts")
    flag("--turns", positive_count, "questions of one conversation", 1)
    made.add_argument("--max-tokens", type=positive_count, default=64)
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument(
        "--ignore-eos",
        action="store_true",
        help="answers of exactly --max-tokens, if the server supports `ignore_eos`",
    )
    made.add_argument("--seed", type=int, default=0, help="seed of arrivals and generated text")
    flag("--warmup", not_negative_count, "requests before the measurement", 1)
    made.add_argument("--timeout-s", type=float, default=600.0, help="longest wait for one answer")
    made.add_argument("--slo-ttft-ms", type=float, default=math.inf)
    made.add_argument("--slo-itl-ms", type=float, default=math.inf)
    made.add_argument("--json", action="store_true")
    return made


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load: the server, the requests and their rate."""

    endpoint: Endpoint
    model: str
    sampling: dict[str, object]
    timeout_s: float
    rate: float | None  # conversations per second; None: a closed loop
    concurrency: int
    seed: int


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The latencies up to which a request counts for goodput."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    def are_kept(self, answer: StreamedAnswer) -> bool:
        gaps = answer.gaps_s
        mean_gap_s = sum(gaps) / len(gaps) if gaps else 0.0
        return answer.first_s <= self.ttft_s and mean_gap_s <= self.itl_s


class ServerUnreachable(MainstemError):
    """The server does not answer, or is not OpenAI-compatible."""


def main(argv: list[str]) -> int:
    """Return exit status 1 if a request failed, since the numbers of a server that refuses work are
    misleading."""
    args = parser().parse_args(argv)
    if args.rate is not None and not args.rate > 0:
        raise ConfigError(f"--rate must be above 0, got {args.rate}")
    endpoint = Endpoint.parse(args.url, _read_key(args.api_key_file))
    try:
        result, errors = asyncio.run(_measure(args, endpoint))
    except (OSError, EOFError, ValueError, ServerRefused) as error:  # a timeout is an OSError
        raise ServerUnreachable(f"{args.url}: {str(error) or 'no answer'}") from None
    if args.json:
        print(line("serve", result))
    else:
        print(table(["", "value"], [[name, _shown(value)] for name, value in result.items()]))
    for reason, times in errors.most_common(5):
        print(f"{times} failed: {reason}", file=sys.stderr)
    return 1 if errors else 0


def _read_key(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {type(error).__name__}") from None


async def _measure(
    args: argparse.Namespace, endpoint: Endpoint
) -> tuple[dict[str, object], Counter[str]]:
    model = args.model or await find_model(endpoint, args.timeout_s)
    sampling: dict[str, object] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    if args.ignore_eos:
        sampling["ignore_eos"] = True
    load = ServerLoad(
        endpoint, model, sampling, args.timeout_s, args.rate, args.concurrency or 8, args.seed
    )
    hello = Dialogue((), ("Hello",))
    await run_load(load, [hello] * args.warmup)
    before = load_average()
    began_s = perf_counter()
    answers = await run_load(load, take(_source(args), args.requests))
    seconds = perf_counter() - began_s
    limits = LoadLimits(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3)
    pace = {"rate": args.rate} if args.rate else {"concurrency": load.concurrency}
    asked = {"url": args.url, "model": model, **pace, "max_tokens": args.max_tokens}
    workload: dict[str, object] = (
        {"dataset": args.dataset.name}
        if args.dataset
        else {name: getattr(args, name) for name in ("prefix", "own", "groups", "turns")}
    )
    result = summary(answers, seconds, limits)
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    return {**asked, **workload, **result, "load_before": before}, errors


def _source(args: argparse.Namespace) -> Iterator[Dialogue]:
    """Return conversations without end."""
    if args.dataset is not None:
        return cycle(from_file(args.dataset))
    return made_up(DialogueShape(args.prefix, args.own, args.groups, args.turns), args.seed)


def take(source: Iterator[Dialogue], num_requests: int) -> list[Dialogue]:
    """Take conversations with `num_requests` questions in total; the last may be cut short."""
    taken: list[Dialogue] = []
    while num_requests > 0:
        conversation = next(source)
        questions = conversation.questions[:num_requests]
        taken.append(Dialogue(conversation.opening, questions))
        num_requests -= len(questions)
    return taken


async def run_load(load: ServerLoad, conversations: Sequence[Dialogue]) -> list[StreamedAnswer]:
    """Run the load; returns all answers, including failed ones. A conversation ends at its first
    failure."""
    total = sum(len(conversation.questions) for conversation in conversations)
    with tqdm(total=total, unit="req", disable=None, dynamic_ncols=True) as bar:
        if load.rate is None:
            waiting = iter(conversations)
            workers = [_worker(load, waiting, bar.update) for _ in range(load.concurrency)]
            found: Iterable[list[StreamedAnswer]] = await asyncio.gather(*workers)
        else:
            found = await _arrive(load, load.rate, conversations, bar.update)
    return list(chain.from_iterable(found))


async def _worker(
    load: ServerLoad, waiting: Iterator[Dialogue], on_answer: Callable[[], object]
) -> list[StreamedAnswer]:
    answers = []
    for conversation in waiting:
        answers += await _converse(load, conversation, on_answer)
    return answers


async def _arrive(
    load: ServerLoad,
    rate: float,
    conversations: Sequence[Dialogue],
    on_answer: Callable[[], object],
) -> list[list[StreamedAnswer]]:
    """Begin each conversation at its own time, independent of the others."""
    rng = random.Random(load.seed)
    began_s = perf_counter()
    due_s = 0.0
    tasks = []
    for conversation in conversations:
        await asyncio.sleep(max(0.0, due_s - (perf_counter() - began_s)))
        tasks.append(asyncio.create_task(_converse(load, conversation, on_answer)))
        due_s += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return await asyncio.gather(*tasks)


async def _converse(
    load: ServerLoad, conversation: Dialogue, on_answer: Callable[[], object]
) -> list[StreamedAnswer]:
    messages: list[Message] = list(conversation.opening)
    answers: list[StreamedAnswer] = []
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        body = {"model": load.model, "messages": messages, **load.sampling}
        answer = await stream_chat(load.endpoint, body, load.timeout_s)
        answers.append(answer)
        on_answer()
        if answer.error is not None:
            break
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def summary(
    answers: Sequence[StreamedAnswer], seconds: float, limits: LoadLimits
) -> dict[str, object]:
    """Return the numbers of a run that took `seconds`. A failed request counts only in the number
    of failures."""
    good = [answer for answer in answers if answer.error is None]
    output = sum(answer.num_output for answer in good)
    prompt = sum(answer.prompt_tokens or 0 for answer in good)
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    kept = sum(limits.are_kept(answer) for answer in good)
    made: dict[str, object] = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "goodput_per_s": round(kept / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 1),
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output,
    }
    e2e_s = [answer.total_s for answer in good]
    per_token_s = [answer.total_s / max(1, answer.num_output) for answer in good]
    gaps_s = [gap for answer in good for gap in answer.gaps_s]
    made |= spread("ttft_ms", [answer.first_s for answer in good])
    minute_ends_s = min((answer.sent_s for answer in answers), default=0.0) + MINUTE_S
    minute = [answer.first_s for answer in good if answer.sent_s < minute_ends_s]
    later = [answer.first_s for answer in good if answer.sent_s >= minute_ends_s]
    for name, first_s in (("minute_ttft_ms", minute), ("later_ttft_ms", later)):
        made[f"{name}_p99"] = spread(name, first_s)[f"{name}_p99"]
    made |= spread("itl_ms", gaps_s)
    made |= spread("e2e_ms", e2e_s)
    made |= spread("norm_ms", per_token_s)
    return made


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
