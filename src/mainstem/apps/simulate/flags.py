"""Flags that `mainstem simulate` and `mainstem capacity` share."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mainstem.apps.simulate.traces import ReadOptions, Trace, TraceFormat

T = TypeVar("T")


def positive(text: str) -> float:
    """A finite number above zero."""
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """A finite number of zero or more."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def not_negative_count(text: str) -> int:
    """A whole number of zero or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def positive_count(text: str) -> int:
    """A whole number of one or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def comma_list(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """One or more values with commas between them."""
    return lambda text: [parse(part) for part in text.split(",")]


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """What to read, and how."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, plain or gzip")
    parser.add_argument(
        "--kv-bytes-per-token",
        type=positive,
        required=True,
        metavar="N",
        help="K and V of all layers: 131072 for Llama-3-8B in 16 bits",
    )
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--format",
        choices=[member.value for member in TraceFormat],
        help="format of the trace (told by its first line)",
    )
    group.add_argument(
        "--page-tokens",
        type=positive_count,
        metavar="N",
        help="tokens of a page: mooncake 512, qwen 16, others 128",
    )
    group.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="sessions: starts a second (1); others: requests a second (as recorded)",
    )
    group.add_argument(
        "--context-tokens",
        type=positive_count,
        metavar="N",
        help="leave out what is longer, and the rest of its session (no limit)",
    )
    group.add_argument("--limit", type=positive_count, metavar="N", help="read N requests (all)")
    group.add_argument(
        "--think-times", type=Path, metavar="FILE", help="gaps between turns (the shipped table)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the drawn arrivals (0)")
    parser.add_argument("--ttl", type=positive, metavar="S", help="drop what is unused so long")


def read_options(args: argparse.Namespace) -> ReadOptions:
    return ReadOptions(
        format=None if args.format is None else TraceFormat(args.format),
        page_tokens=args.page_tokens,
        rate=args.rate,
        context_tokens=args.context_tokens,
        limit=args.limit,
        seed=args.seed,
        think_times=args.think_times,
    )


def warn_if_nothing_is_shared(trace: Trace) -> None:
    if not trace.can_share:
        print("this trace has lengths only: nothing in it can be shared", file=sys.stderr)
