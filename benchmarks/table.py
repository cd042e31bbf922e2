"""Write the README's results table: `python benchmarks/table.py [--check]`.

Each row of the table names a file of results and picks its latest matching line.
"""

import json
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
    hardware: str = "2 Neoverse-N1 cores"
    command: str = ""


def _is(**wanted: object) -> Callable[[Line], bool]:
    return lambda line: all(line.get(name) == value for name, value in wanted.items())


def _case(name: str, what: str) -> Row:
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
    )


ROWS = [
    Row(
        what="64 requests over one 1,024-token prefix, fp32",
        file="cpu.jsonl",
        ours=_is(engine="mainstem", requests=64, quantize="none"),
        value="{seconds} s",
        rival=_is(engine="vllm"),
        rival_name="vLLM CPU 0.32, same run",
        command="mainstem bench cpu --chunk-tokens 2048 --page-size 64 --rivals vllm",
    ),
    Row(
        what="the same with int8 weights",
        file="cpu.jsonl",
        ours=_is(engine="mainstem", requests=64, quantize="int8"),
        value="{seconds} s",
        command="mainstem bench cpu --chunk-tokens 1024 --page-size 64 --quantize int8",
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
    _case("gqa32/8 B1024 64x2000+250", "1,024 sequences over 64 prefixes of 2,000"),
    _case("gqa32/8 B64 1x32768+256", "64 sequences over one prefix of 32,768"),
]


def latest(file: str, matches: Callable[[Line], bool]) -> Line | None:
    path = RESULTS / file
    if not path.is_file():
        return None
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    found = [line for line in lines if matches(line)]
    return found[-1] if found else None


def table() -> str:
    lines = [
        "| what | mainstem | rival | machine | command |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        ours = latest(row.file, row.ours)
        if ours is None:
            continue
        rival = latest(row.file, row.rival) if row.rival else None
        value = row.rival_value or row.value
        shown = f"{value.format(**rival)} ({row.rival_name})" if rival else "-"
        ours_shown = row.value.format(**ours)
        lines.append(
            f"| {row.what} | **{ours_shown}** | {shown} | {row.hardware} | `{row.command}` |"
        )
    return "\n".join(lines)


def main() -> int:
    path = ROOT / "README.md"
    text = path.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    fresh = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in sys.argv:
        return 0 if fresh == text else 1
    path.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
