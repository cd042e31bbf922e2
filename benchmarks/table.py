"""Write the tables of results: `python benchmarks/table.py [--check]`.

docs/results.md gets every row, README.md the ratios of those that have a headline. Each row names a
file of results and picks its latest matching line.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: python benchmarks/table.py -->", "<!-- end of results -->"

Line = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One measurement: what, where it is kept, and how to show ours and the rival's."""

    what: str
    file: str
    ours: Callable[[Line], bool]
    value: str  # format string over the line
    rival: Callable[[Line], bool] | None = None
    rival_value: str | None = None  # where it is shown otherwise
    rival_name: str = ""
    rival_text: str | None = None  # where it is not in the file
    hardware: str = "2 Neoverse-N1 cores"
    command: str = ""
    headline: str | None = None  # what it is called in the README; None: not there
    is_rate: bool = False  # more is better; else it is a time


def _is(**wanted: object) -> Callable[[Line], bool]:
    return lambda line: all(line.get(name) == value for name, value in wanted.items())


def _case(name: str, what: str, headline: str | None = None) -> Row:
    """A line of the kernel benchmark beside the best rival measured on the same card."""
    return Row(
        what=f"decode attention, {what}",
        file="kernel-h200.jsonl",
        ours=_is(case=name),
        value="{us} us",
        rival=_is(case=name),
        rival_value="{rival_us} us",
        rival_name="best of FlashInfer and FlashAttention-3",
        hardware="H200",
        command="mainstem bench kernel",
        headline=headline,
    )


def _job(workload: str, what: str, rival: float, headline: str | None = None) -> Row:
    """A whole job; rivals ran the same one on the same card."""
    return Row(
        what=f"{what}, requests/s",
        file="offline-h200.jsonl",
        ours=lambda line: line["workload"] == workload and not _is_fp8(line),
        value="{requests_per_s:.1f}",
        rival_text=f"{rival} (vLLM 0.24, its best setting)",
        hardware="H200",
        command=f"mainstem bench offline --workload {workload}",
        headline=headline,
        is_rate=True,
    )


def _turn(number: int, headline: str | None = None) -> Row:
    """Sessions that come back, their history in host memory."""
    return Row(
        what=f"8B, 24 sessions of 2,000 tokens come back at once, first token in turn {number}",
        file="sessions-h200.jsonl",
        ours=_is(part="turns", tier="host", turn=number),
        value="{mean_ttft_ms:.0f} ms",
        rival_text="275 ms (vLLM 0.24 with CPU offload)",
        hardware="H200",
        command="mainstem bench sessions",
        headline=headline,
    )


def _served(what: str, value: str, rival: str) -> Row:
    """Streaming chats over HTTP, 30 a second, four system prompts of 1,500 words."""
    return Row(
        what=f"8B over HTTP, 30 chats/s over 4 long system prompts, {what}",
        file="serve-h200.jsonl",
        ours=_is(rate=30.0, groups=4),
        value=value,
        rival_text=f"{rival} (vLLM 0.24, a like load)",
        hardware="H200",
        command="mainstem bench serve --rate 30 --groups 4 --prefix 1500 --own 70 --max-tokens 128",
    )


def _is_fp8(line: Line) -> bool:
    settings = line["settings"]
    assert isinstance(settings, dict)
    return bool(settings["model"]["quantize"] == "fp8")


ROWS = [
    _job(
        "b2000-sd16",
        "8B, 1,600 requests, 16 to each 2,000-token document",
        61.0,
        "a job of an 8B model, 16 requests to each document of 2,000 tokens",
    ),
    _job(
        "industry",
        "8B, 3 requests to each 1,570-token document",
        46.4,
        "the same with 3 requests to each document of 1,570 tokens",
    ),
    _job("b16000-sd4", "8B, 4 requests to each 16,000-token document", 5.77),
    _job("b2000-1000-sd4", "8B, 2,000 shared and 1,000 own tokens, 4 to a document", 20.3),
    _job(
        "noshare-512",
        "8B, nothing shared",
        46.2,
        "the same with nothing shared: prompts of 512 tokens",
    ),
    _job(
        "relay-2048",
        "7B, one system prompt of 2,048",
        93.0,
        "a 7B model, one system prompt of 2,048 tokens for all",
    ),
    _job("relay-64", "7B, one system prompt of 64", 103.0),
    _served("between tokens", "{itl_ms_mean:.1f} ms", "7.5 ms"),
    _served("first token", "{ttft_ms_mean:.0f} ms", "61 ms"),
    Row(
        what="8B, 8 choices of 4 tokens scored after each context of 1,210, contexts/s",
        file="score-h200.jsonl",
        ours=_is(bench="score", model_shape="llama31-8b"),
        value="{contexts_per_s:.1f}",
        hardware="H200",
        command="mainstem bench score",
    ),
    _turn(2, "24 conversations of 2,000 tokens come back at once, time to the first token"),
    _turn(3),
    Row(
        what="102 real conversations come back, first token in turns 2 to 5",
        file="conversations.jsonl",
        ours=_is(turn="later"),
        value="{mean_ttft_ms:.0f} ms",
        rival=_is(turn="later"),
        rival_value="{recomputed_mean_ttft_ms:.0f} ms",
        rival_name="computed again in the same run",
        command="mainstem bench sessions --conversations FILE",
    ),
    Row(
        what="64 requests over one 1,024-token prefix, fp32",
        file="cpu.jsonl",
        ours=_is(engine="mainstem", requests=64, quantize="none"),
        value="{seconds} s",
        rival=_is(engine="vllm"),
        rival_name="vLLM CPU 0.32, same machine",
        command="mainstem bench cpu --chunk-tokens 1024 --page-size 64",
    ),
    Row(
        what="the same with int8 weights",
        file="cpu.jsonl",
        ours=_is(engine="mainstem", requests=64, quantize="int8"),
        value="{seconds} s",
        command="mainstem bench cpu --chunk-tokens 3072 --page-size 64 --quantize int8",
    ),
    Row(
        what="one conversation, tokens/s",
        file="cpu.jsonl",
        ours=_is(engine="mainstem", requests=1),
        value="{decode_tokens_per_s}",
        command="mainstem bench cpu --batch-1",
    ),
    Row(
        what="planning the industry mix, 8,000 prompts",
        file="plan.jsonl",
        ours=_is(workload="industry"),
        value="{plan_seconds} s",
        command="mainstem bench plan",
    ),
    Row(
        what="host work per step, 1,000 sequences in 64 groups",
        file="host.jsonl",
        ours=_is(bench="host"),
        value="{total_ms} ms",
        command="mainstem bench host",
    ),
    _case("gqa32/8 B256 16x16000+300", "256 sequences over 16 prefixes of 16,000"),
    _case(
        "gqa32/8 B1024 64x2000+250",
        "1,024 sequences over 64 prefixes of 2,000",
        "decode attention alone, 1,024 sequences over 64 prefixes of 2,000 tokens",
    ),
    _case("gqa32/8 B64 1x32768+256", "64 sequences over one prefix of 32,768"),
    _case("gqa32/8 B256 64x512+512", "256 sequences over 64 prefixes of 512"),
    _case("mha32 B32 1x256+128", "32 sequences over one prefix of 256, MHA"),
]


def latest(file: str, matches: Callable[[Line], bool]) -> Line | None:
    path = RESULTS / file
    if not path.is_file():
        return None
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    found = [line for line in lines if matches(line)]
    return found[-1] if found else None


def _measured(row: Row) -> tuple[str, str] | None:
    """Our value and the rival's as they are shown; None if ours is not in the results."""
    ours = latest(row.file, row.ours)
    if ours is None:
        return None
    rival = latest(row.file, row.rival) if row.rival else None
    value = row.rival_value or row.value
    shown = f"{value.format(**rival)} ({row.rival_name})" if rival else row.rival_text or "-"
    return row.value.format(**ours), shown


def table() -> str:
    """Every row with its values and the command that measured it."""
    lines = [
        "| what | mainstem | rival | machine | command |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        if (measured := _measured(row)) is not None:
            ours, rival = measured
            lines.append(
                f"| {row.what} | **{ours}** | {rival} | {row.hardware} | `{row.command}` |"
            )
    return "\n".join(lines)


def headlines() -> str:
    """The rows with a headline, as ratios."""
    lines = ["| on one H200 | speedup | over |", "| --- | --- | --- |"]
    for row in ROWS:
        if row.headline is not None and (measured := _measured(row)) is not None:
            assert row.hardware == "H200", "the head of the table names the card"
            ours, rival = map(_number, measured)
            ratio = ours / rival if row.is_rate else rival / ours
            name = re.findall(r"\((.*)\)", measured[1])[0]
            lines.append(f"| {row.headline} | **{ratio:.1f}x** | {name} |")
    return "\n".join(lines)


def _number(shown: str) -> float:
    return float(shown.split(maxsplit=1)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of results.")
    parser.add_argument("--check", action="store_true", help="only check that they are up to date")
    is_check = parser.parse_args().check
    is_fresh = True
    for name, made in (("README.md", headlines()), ("docs/results.md", table())):
        path = ROOT / name
        text = path.read_text()
        head, rest = text.split(BEGIN)
        _, tail = rest.split(END)
        fresh = f"{head}{BEGIN}\n{made}\n{END}{tail}"
        is_fresh = is_fresh and fresh == text
        if not is_check:
            path.write_text(fresh)
    return 1 if is_check and not is_fresh else 0


if __name__ == "__main__":
    sys.exit(main())
