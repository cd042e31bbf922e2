"""Measures how long streams stop while a server computes the prompt of another client.

A few streams run; then one prompt after the other is sent, each when the one before it is answered.
One line for each prompt, and first one for the streams without it:

gap_ms        from one piece of text to the next, in any of the streams
prompt_ttft_s from sending the prompt to its first text
"""

import argparse
import asyncio
from dataclasses import dataclass
from random import Random
from time import perf_counter

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser
from mainstem.core.json import JsonView
from mainstem_bench.report import line, load_average, spread
from mainstem_bench.serve import ServerUnreachable
from mainstem_bench.sse_client import (
    Endpoint,
    ServerRefused,
    StreamedAnswer,
    find_model,
    stream_chat,
)

TIMEOUT_S = 1800.0  # longest time of a stream
WORDS = ("tree", "river", "stone", "light", "field", "road", "house", "water", "bird", "cloud")


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench gaps", description=__doc__)
    made.add_argument("--url", default="http://127.0.0.1:8000", help="with or without /v1")
    made.add_argument("--streams", type=positive_count, default=4)
    made.add_argument(
        "--prompts", type=_counts, default=[750, 3900], help="words of each prompt (750,3900)"
    )
    made.add_argument(
        "--alone-s", type=float, default=10.0, help="seconds of streams before the first prompt"
    )
    return made


def _counts(text: str) -> list[int]:
    return [positive_count(each) for each in text.split(",")]


def main(argv: list[str]) -> int:
    """Print one JSON line for each part."""
    args = parser().parse_args(argv)
    run = _Run(Endpoint.parse(args.url), args.streams, args.prompts, args.alone_s)
    try:
        asyncio.run(run.measure())
    except (OSError, EOFError, ValueError, ServerRefused) as error:
        raise ServerUnreachable(f"{args.url}: {error}") from None
    return 0


@dataclass(slots=True)
class _Run:
    """The streams of one measurement, and what is measured beside them."""

    endpoint: Endpoint
    num_streams: int
    prompts: list[int]
    alone_s: float

    async def measure(self) -> None:
        model = await find_model(self.endpoint, TIMEOUT_S)
        streams = [StreamedAnswer(perf_counter()) for _ in range(self.num_streams)]
        tasks = [
            asyncio.ensure_future(
                stream_chat(self.endpoint, _body(model, 20, place, None), TIMEOUT_S, stream)
            )
            for place, stream in enumerate(streams)
        ]
        while not all(stream.piece_s for stream in streams):
            _check(streams)
            await asyncio.sleep(0.01)
        began_s = perf_counter()
        await asyncio.sleep(self.alone_s)
        _show(streams, began_s, {"prompt_tokens": 0})
        for place, words in enumerate(self.prompts):
            body = _body(model, words, 100 + place, 1)
            answer = await stream_chat(self.endpoint, body, TIMEOUT_S)
            _check([answer, *streams])
            facts = {
                "prompt_tokens": answer.prompt_tokens,
                "prompt_ttft_s": round(answer.first_s, 2),
            }
            _show(streams, answer.sent_s, facts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _body(model: str, words: int, seed: int, max_tokens: int | None) -> dict[str, object]:
    text = " ".join(Random(seed).choices(WORDS, k=words))
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "ignore_eos": True,
        "seed": seed,
    }
    return body if max_tokens is None else body | {"max_tokens": max_tokens}


def _check(answers: list[StreamedAnswer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise ServerRefused(f"an answer failed: {answer.error}")


def _show(streams: list[StreamedAnswer], began_s: float, facts: JsonView) -> None:
    """Print the gaps between pieces of which the later came after `began_s`."""
    gaps = [
        later_s - earlier_s
        for stream in streams
        for earlier_s, later_s in zip(stream.piece_s, stream.piece_s[1:], strict=False)
        if later_s > began_s
    ]
    measured = {"streams": len(streams), **facts, **spread("gap_ms", gaps)}
    measured["gap_ms_max"] = round(max(gaps, default=0.0) * 1e3, 1)
    measured["load_average"] = load_average()
    print(line("gaps", measured), flush=True)
