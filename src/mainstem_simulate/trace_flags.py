"""Flags that `mainstem simulate` and `mainstem capacity` share."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mainstem.checkpoints.hub import config_folder
from mainstem.cli.flag_types import not_negative, positive, positive_count
from mainstem.cli.parser import add_flag
from mainstem.core.config import DType
from mainstem.runner.kv_size import kv_size
from mainstem_simulate.service import Prices, ServiceRates
from mainstem_simulate.trace_records import Outgrown, ReadOptions, Trace, TraceFormat


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the trace and how to read it."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, plain or gzip")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--kv-bytes-per-token",
        type=positive,
        metavar="N",
        help="K and V of all layers: 131072 for Llama-3-8B in 16 bits",
    )
    size.add_argument(
        "--model",
        metavar="NAME",
        help="compute these bytes from a model's config.json: a folder, a hub id or smollm2",
    )
    parser.add_argument(
        "--dtype",
        choices=[dtype.value for dtype in DType],
        default=DType.AUTO.value,
        help="type of K and V, with --model (auto: the checkpoint's)",
    )
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--format",
        choices=[member.value for member in TraceFormat],
        help="format of the trace (default: found from its first line)",
    )
    flag = partial(add_flag, group)
    flag(
        "--page-tokens",
        positive_count,
        "tokens per page; if the trace has page ids, their page size (mooncake 512, qwen 16, "
        "weka 64, others 128)",
    )
    group.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="sessions, weka, chitchat: session starts per second (1); others: requests per second "
        "(as recorded)",
    )
    flag(
        "--context-tokens",
        positive_count,
        "leave out requests with more tokens, and the rest of their session (no limit)",
    )
    group.add_argument(
        "--overflow",
        choices=[member.value for member in Outgrown],
        default=Outgrown.LEFT_OUT.value,
        help="sessions, chitchat: what happens to a session beyond --context-tokens. keep: its "
        "first half is dropped and the KV of the rest stays valid; invalidate: the rest is "
        "computed again (leave-out)",
    )
    group.add_argument("--limit", type=positive_count, metavar="N", help="read N requests (all)")
    for name, what in (("--prompt-tokens", "prompt"), ("--answer-tokens", "answer")):
        flag(
            name, positive_count, f"tokens of every {what}, for a trace without lengths (servegen)"
        )
    flag("--think-times", Path, "file with the gaps between turns (the shipped table)")
    group.add_argument("--seed", type=int, default=0, help="seed of random arrivals (0)")
    add_flag(parser, "--ttl", positive, "drop pages that were unused for S seconds", metavar="S")


def kv_bytes_per_token(args: argparse.Namespace) -> float:
    """Return the number that was given. If none was, compute it from the model and print it."""
    if args.model is None:
        given: float = args.kv_bytes_per_token
        return given
    with config_folder(args.model) as folder:
        size = kv_size(folder, DType(args.dtype))
    said = f"K and V of {args.model} take {size.bytes_per_token:,} bytes a token"
    print(f"{said} in {size.dtype.value}", file=sys.stderr)
    return size.bytes_per_token


def add_rate_flags(group: argparse._ActionsContainer, names: Sequence[str]) -> None:
    """Flags for the speed of the device and its links."""
    flags = {
        "prefill_tokens_per_s": ("--prefill-rate", "tokens/s"),
        "decode_tokens_per_s": ("--decode-rate", "tokens/s, all requests together"),
        "host_gb_per_s": ("--host-bandwidth", "GB/s to the device"),
        "disk_gb_per_s": ("--disk-bandwidth", "GB/s to host memory"),
    }
    rates = ServiceRates()
    for name in names:
        flag, unit = flags[name]
        default = getattr(rates, name)
        group.add_argument(
            flag, dest=name, type=positive, default=default, help=f"{unit} ({default:g})"
        )


def add_storage_prices(group: argparse._ActionsContainer) -> None:
    """Flags for prices of storage."""
    prices = Prices()
    for name, default, what in (
        ("dram", prices.dram_gb, "host memory"), ("disk", prices.disk_gb, "disk")
    ):  # fmt: skip
        words = f"US dollars per GB of {what} and hour"
        add_flag(group, f"--{name}-price", not_negative, words, default, metavar="$")


def read_options(args: argparse.Namespace) -> ReadOptions:
    return ReadOptions(
        format=None if args.format is None else TraceFormat(args.format),
        page_tokens=args.page_tokens,
        rate=args.rate,
        context_tokens=args.context_tokens,
        outgrown=Outgrown(args.overflow),
        limit=args.limit,
        seed=args.seed,
        think_times=args.think_times,
        prompt_tokens=args.prompt_tokens,
        answer_tokens=args.answer_tokens,
    )


def warn_if_nothing_is_shared(trace: Trace) -> None:
    if not trace.can_share:
        print(
            "this trace has no contents of prompts, so nothing in it can be shared",
            file=sys.stderr,
        )
