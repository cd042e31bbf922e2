"""The rows of the table of results.

Each names a file of results and picks its latest matching line; rivals' numbers are in that file
too, or in `rivals.json` with version and setting.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem_bench.paper.rivals import rival as known
from mainstem_bench.paper.rivals import rivals
from mainstem_bench.scaled import step_bytes, token_flops
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import OFFLINE_JOBS

RESULTS = Path(__file__).resolve().parent / "results"

Line = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One measurement: what it is, its file, and how to show our value and the rival's."""

    what: str
    file: str
    ours: Callable[[Line], bool]
    value: str  # format string over the line
    rival: Callable[[Line], bool] | None = None
    rival_value: str | None = None  # format string for the rival; None: `value`
    rival_name: str = ""
    rival_text: str | None = None  # the rival's value, if it is not in the file
    hardware: str = "2 Neoverse-N1 cores"
    command: str = ""
    headline: str | None = None  # what it is called in the README; None: not there
    is_rate: bool = False  # more is better; else it is a time


def _is(**wanted: object) -> Callable[[Line], bool]:
    return lambda line: all(line.get(name) == value for name, value in wanted.items())


def _case(name: str, what: str, headline: str | None = None) -> Row:
    """A line of the kernel benchmark beside the best rival on the same kind of card."""
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


def _job(workload: str, what: str, headline: str | None = None) -> Row:
    """A whole job; rivals ran the same one, with as many requests, on the same kind of card."""
    job = OFFLINE_JOBS[workload]
    rival = max(known("offline", workload, order) for order in orders(workload))
    return Row(
        what=f"{what}, requests/s",
        file="offline-h200.jsonl",
        ours=lambda line: (
            line["workload"] == workload
            and _form(line) == "16 bits"
            and line["model_shape"] == job.model_shape
            and line["requests"] == job.groups * job.degree
        ),
        value="{requests_per_s:.1f}",
        rival_text=f"{rival} (vLLM 0.24, its best setting)",
        hardware="H200",
        command=f"mainstem bench offline --workload {workload}",
        headline=headline,
        is_rate=True,
    )


def _turn(number: int, headline: str | None = None) -> Row:
    """Sessions that come back, their history in host memory."""
    offload = known("sessions", "vllm_native_cpu_offload")
    # of several runs in one process the first, as in a call of the benchmark
    return Row(
        what=f"8B, 24 sessions of 2,000 tokens come back at once, first token in turn {number}",
        file="sessions-h200.jsonl",
        ours=lambda line: _is(part="turns", tier="host", turn=number)(line) and not line.get("run"),
        value="{mean_ttft_ms:.0f} ms",
        rival_text=f"{offload:.0f} ms (vLLM 0.24 with CPU offload)",
        hardware="H200",
        command="mainstem bench sessions",
        headline=headline,
    )


def orders(workload: str) -> list[str]:
    """The ways in which vLLM ran a job."""
    names = ("default", "sorted", "cascade")
    return [name for name in names if name in rivals()["offline"][workload]]


def _form(line: Line) -> object:
    """How a job's weights are stored and, if they are quantized when loaded, to what."""
    settings = line["settings"]
    assert isinstance(settings, dict)
    stored = line.get("weights", "16 bits")
    return f"{stored}, quantized to fp8" if settings["model"]["quantize"] == "fp8" else stored


def _model_job(shape: str, form: str, what: str, options: str = "") -> Row:
    """A whole job with another model, or with smaller weights."""
    command = f"mainstem bench offline --workload b2000-sd16 --model-shape {shape}"
    return Row(
        what=f"{what}, 16 requests to each 2,000-token document, requests/s",
        file="offline-h200.jsonl",
        ours=lambda line: (
            line["workload"] == "b2000-sd16"
            and line["model_shape"] == shape
            and _form(line) == form
        ),
        value="{requests_per_s:.1f} ({requests:,} requests)",
        hardware="H200",
        command=f"{command} {options}",
    )


ROWS = [
    _job(
        "b2000-sd16",
        "8B, 1,600 requests, 16 to each 2,000-token document",
        "a job of an 8B model, 16 requests to each document of 2,000 tokens",
    ),
    _job(
        "industry",
        "8B, 3 requests to each 1,570-token document",
        "the same with 3 requests to each document of 1,570 tokens",
    ),
    _job("b16000-sd4", "8B, 4 requests to each 16,000-token document"),
    _job("b2000-1000-sd4", "8B, 2,000 shared and 1,000 own tokens, 4 requests to each document"),
    _job(
        "noshare-512",
        "8B, nothing shared",
        "the same with nothing shared: prompts of 512 tokens",
    ),
    _job(
        "relay-2048",
        "7B, one system prompt of 2,048 tokens",
        "a 7B model, one system prompt of 2,048 tokens for all",
    ),
    _job("relay-64", "7B, one system prompt of 64 tokens"),
    _model_job("llama31-8b", "16 bits, quantized to fp8", "8B quantized to FP8", "--quantize fp8"),
    _model_job(
        "llama31-8b", "fp8", "8B from an FP8 checkpoint, a scale per channel", "--weights fp8"
    ),
    _model_job(
        "llama31-8b", "fp8-blocks", "8B, FP8 in blocks of 128 x 128", "--weights fp8-blocks"
    ),
    _model_job(
        "llama31-8b",
        "fp8-blocks, quantized to fp8",
        "the same blocks, rounded to a scale per channel",
        "--weights fp8-blocks --quantize fp8",
    ),
    _model_job(
        "llama31-70b",
        "gptq",
        "70B in 4 bits (GPTQ), 40 documents",
        "--weights gptq --kv-tokens 250000 --groups 40",
    ),
    _model_job("qwen3-30b-a3b", "16 bits", "Qwen3-30B-A3B (128 experts)"),
    _model_job("gpt-oss-20b", "mxfp4", "gpt-oss-20b, experts in MXFP4", "--weights mxfp4"),
    *(
        Row(
            what=f"{what}, one sequence alone, tokens/s",
            file="decode-h200.jsonl",
            ours=_is(model_shape=shape, weights=weights, seqs=1),
            value="{tokens_per_s:.1f}",
            hardware="H200",
            command=f"mainstem bench decode --model-shape {shape} --weights {weights}{options} "
            "--seqs 1",
        )
        for shape, weights, what, options in (
            ("llama31-8b", "fp8-blocks", "8B in FP8, scales of blocks", ""),
            ("llama31-70b", "gptq", "70B in 4 bits (GPTQ)", " --kv-tokens 250000"),
            ("gpt-oss-20b", "mxfp4", "gpt-oss-20b, experts in MXFP4", ""),
        )
    ),
    Row(
        what="8B, 8 choices of 4 tokens scored after each context of 1,210 tokens, contexts/s",
        file="score-h200.jsonl",
        ours=_is(bench="score", model_shape="llama31-8b"),
        value="{contexts_per_s:.1f}",
        hardware="H200",
        command="mainstem bench score",
    ),
    *(
        Row(
            what=f"{what}, requests/s (of the card's limit)",
            file="hybrids-h200.jsonl",
            ours=_is(workload=workload, model_shape=shape),
            value="{requests_per_s:.1f} ({share_of_limit:.0%})",
            hardware="H200",
            command=f"mainstem bench offline --workload {workload} --model-shape {shape} {options}",
        )
        for workload, shape, what, options in (
            (
                "b2000-sd16",
                "qwen36-35b-a3b",
                "Qwen3.6-35B-A3B, 16 requests to each of 40 documents",
                "--groups 40 --kv-tokens 450000 --states 780",
            ),
            (
                "b2000-sd16",
                "qwen36-27b",
                "Qwen3.6-27B, 16 requests to each of 15 documents",
                "--groups 15 --kv-tokens 440000 --states 200 --siblings on",
            ),
            (
                "classify",
                "qwen36-35b-a3b",
                "Qwen3.6-35B-A3B, labels for 4,000 short rows after one instruction",
                "--siblings off --states 780",
            ),
        )
    ),
    _turn(2, "24 conversations of 2,000 tokens come back at once, time to the first token"),
    _turn(3),
    Row(
        what="SmolLM2-135M, 102 real conversations come back, first token in turns 2 to 5",
        file="conversations.jsonl",
        ours=_is(turn="later"),
        value="{mean_ttft_ms:.0f} ms",
        rival=_is(turn="later"),
        rival_value="{recomputed_mean_ttft_ms:.0f} ms",
        rival_name="computed again in the same run",
        command="mainstem bench sessions --conversations FILE",
    ),
    Row(
        what="SmolLM2-135M in fp32, 64 requests over one 1,024-token prefix",
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
        what="SmolLM2-135M in fp32, one conversation, tokens/s",
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
    _case("gqa32/8 B256 16x16000+300", "256 sequences over 16 prefixes of 16,000 tokens"),
    _case(
        "gqa32/8 B1024 64x2000+250",
        "1,024 sequences over 64 prefixes of 2,000 tokens",
        "decode attention alone, 1,024 sequences over 64 prefixes of 2,000 tokens",
    ),
    _case("gqa32/8 B64 1x32768+256", "64 sequences over one prefix of 32,768 tokens"),
    _case("gqa32/8 B256 64x512+512", "256 sequences over 64 prefixes of 512 tokens"),
    _case("mha32 B32 1x256+128", "32 sequences over one prefix of 256 tokens, MHA"),
]


def latest(file: str, matches: Callable[[Line], bool]) -> Line:
    """The newest line that matches; raises LookupError if there is none."""
    texts = (RESULTS / file).read_text().splitlines()
    found = [line for line in map(json.loads, texts) if matches(line)]
    if not found:
        raise LookupError(f"{file} has no line for a row of the table")
    return found[-1]


def measured(row: Row) -> tuple[str, str]:
    """Our value and the rival's as they are shown."""
    ours = latest(row.file, row.ours)
    shown = row.rival_text or "-"
    if row.rival is not None:
        theirs = (row.rival_value or row.value).format(**latest(row.file, row.rival))
        shown = f"{theirs} ({row.rival_name})"
    return row.value.format(**ours), shown


def table() -> str:
    """Every row with its values and the command that measured it."""
    lines = [
        "| what | mainstem | rival | machine | command |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        ours, rival = measured(row)
        lines.append(f"| {row.what} | **{ours}** | {rival} | {row.hardware} | `{row.command}` |")
    return "\n".join(lines)


MODEL_NAMES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B (experts)",
    "llama31-8b": "8B",
    "gpt-oss-20b": "gpt-oss-20b (experts)",
}
SERVED_UNITS = {
    "ttft": "first token, ms",
    "ttft_p99": "first token, p99, ms",
    "itl": "between tokens, ms",
    "requests_per_s": "requests/s",
    "ready_s": "s",
}


def models_table() -> str:
    """Expert, FP8 and 4-bit models beside vLLM, also where vLLM is faster."""
    lines = ["| model | weights | load | mainstem | vLLM 0.24 |", "| --- | --- | --- | --- | --- |"]
    for line in beside("models"):
        ours, theirs = line["mainstem"], line.get("vllm", line.get("vllm_sorted"))
        if "vllm_sorted" in line:
            shown = f"{line['vllm_shuffled']:,} shuffled, {theirs:,} sorted"
        else:
            shown = f"{theirs:,}"
        load = line["about"] if "seqs" not in line else f"{line['seqs']} at once, decoding"
        ours, shown = _bold(f"{ours:,}", shown, is_ours=ours > theirs)
        name = MODEL_NAMES[line["model_shape"]]
        what = f"{load}, {line['unit']}"
        lines.append(f"| {name} | {line['weights']} | {what} | {ours} | {shown} |")
    return "\n".join(lines)


def served_table() -> str:
    """Served requests beside vLLM."""
    lines = ["| load | what | mainstem | vLLM 0.24 |", "| --- | --- | --- | --- |"]
    for line in beside("served"):
        for name, ours in line["mainstem"].items():
            theirs = line["vllm"][name]
            is_ours = ours > theirs if name == "requests_per_s" else ours < theirs
            values = " | ".join(_bold(f"{ours:g}", f"{theirs:g}", is_ours=is_ours))
            lines.append(f"| {line['about']} | {SERVED_UNITS[name]} | {values} |")
    return "\n".join(lines)


HYBRID_LOADS = {
    "apps": "4 system prompts of about 1,830 tokens, 128 answer tokens",
    "docs": "12 documents of about 4,900 tokens, 64 answer tokens",
}
FP8_BYTES = 1.0  # of a weight of the layers


def hybrid_table() -> str:
    """A served hybrid beside a smaller model, whose times are scaled to the hybrid's size."""
    lines = [
        "| load | what | 8B | scaled to the 27B | Qwen3.6-27B | of it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for load, about in HYBRID_LOADS.items():
        small, large = (
            latest("hybrids-h200.jsonl", _is(bench="served", model_shape=shape, load=load, seed=1))
            for shape in ("llama31-8b", "qwen36-27b")
        )
        what = f"{about}; {small['rate']:g} and {large['rate']:.2f} requests/s"
        flops, moved = _flops(large) / _flops(small), _moved(large) / _moved(small)
        for field, name, ratio in (
            ("ttft_ms_mean", "first token, mean, ms", flops),
            ("ttft_ms_p50", "median", flops),
            ("ttft_ms_p99", "p99", flops),
            ("itl_ms_mean", "a token, mean, ms", moved),
        ):
            ours, of = float(str(large[field])), float(str(small[field]))
            row = f"{name} | {of:g} | {of * ratio:.1f} | {ours:g} | {ours / (of * ratio):.2f}"
            lines.append(f"| {what} | {row} |")
            what = ""
    return "\n".join(lines)


def _flops(line: Line) -> float:
    return token_flops(SHAPES[str(line["model_shape"])], int(str(line["prompt_tokens"])))


def _moved(line: Line) -> float:
    running, keys = (int(str(line[name])) for name in ("running", "keys_per_step"))
    return step_bytes(SHAPES[str(line["model_shape"])], FP8_BYTES, running, keys)


def beside(bench: str) -> list[dict[str, Any]]:
    """The stored lines of both engines."""
    texts = (RESULTS / "beside-vllm-h200.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, texts) if line["bench"] == bench]


def _bold(ours: str, theirs: str, *, is_ours: bool) -> tuple[str, str]:
    """Mark the better value."""
    return (f"**{ours}**", theirs) if is_ours else (ours, f"**{theirs}**")


def headlines() -> str:
    """The rows with a headline, as ratios."""
    lines = ["| on one H200 | speedup | over |", "| --- | --- | --- |"]
    for row in ROWS:
        if row.headline is not None:
            assert row.hardware == "H200", "the head of the table names the card"
            shown = measured(row)
            ours, rival = map(_number, shown)
            ratio = ours / rival if row.is_rate else rival / ours
            name = re.findall(r"\((.*)\)", shown[1])[0]
            lines.append(f"| {row.headline} | **{ratio:.1f}x** | {name} |")
    return "\n".join(lines)


def _number(shown: str) -> float:
    return float(shown.split(maxsplit=1)[0])
