"""Runs recorded requests of a server (`mainstem serve --record FILE`) on the engine alone.

The same token ids arrive at the same times, in one process, without HTTP, detokenizing or JSON. The
difference to the times that a client sees is the server's own cost. Pauses divide the record into
parts, which are measured one by one.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from mainstem.checkpoints.hub import resolve_model
from mainstem.checkpoints.progress import StageBar
from mainstem.cli.flag_types import positive
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem_bench.arrivals import Arrival, TimedAnswer, answer_arrivals
from mainstem_bench.feed import StepLog
from mainstem_bench.report import line, spread

DEFAULT_TOKENS = 128  # for requests without max_tokens


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench replay", description=__doc__)
    made.add_argument("record", type=Path, help="what `mainstem serve --record` has written")
    add_flag(
        made, "--pause-s", positive, "a pause of this length separates two parts", 1.2, metavar="S"
    )
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    """Print one JSON line for each part."""
    args = parser().parse_args(argv)
    parts = read_parts(args.record, args.pause_s)
    config = engine_config(args)
    with StageBar() as bar:
        folder = resolve_model(config.model.model, bar)
    engine = build_engine(folder, config, EventBus())
    for place, part in enumerate(parts):
        print(line("replay", {"part": place} | measure(engine, part)), flush=True)
    engine.check()
    engine.close()
    return 0


def read_parts(path: Path, pause_s: float) -> list[list[Arrival]]:
    """Return the arrivals of a record, cut into parts where nothing arrived for `pause_s`. The
    times of each part begin at 0."""
    try:
        entries = [json.loads(text) for text in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a record of `mainstem serve`: {error}") from None
    entries.sort(key=lambda entry: entry["at_s"])
    parts: list[list[Arrival]] = []
    first_s = last_s = float("-inf")
    for entry in entries:
        if entry["at_s"] - last_s > pause_s:
            first_s = entry["at_s"]
            parts.append([])
        last_s = entry["at_s"]
        ids = np.array(entry["prompt_ids"], np.int32)
        parts[-1].append(Arrival(last_s - first_s, ids, entry["max_tokens"] or DEFAULT_TOKENS))
    return parts


def measure(engine: Engine, part: list[Arrival]) -> dict[str, object]:
    """Return latencies as a client would see them. The time between tokens is the mean of a
    request."""
    counters, steps = Counters().attach(engine.bus), StepLog.attach(engine)
    answers = answer_arrivals(engine, part)
    seconds = max(answer.token_s[-1] for answer in answers)
    return {
        "requests": len(part),
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(part) / seconds, 2),
        **spread("ttft_ms", [answer.first_token_s for answer in answers]),
        **spread("itl_ms", [_gap_s(answer) for answer in answers if len(answer.token_s) > 1]),
        **spread("e2e_ms", [answer.total_s for answer in answers]),
        "cached": round(counters.saving_ratio, 3),
        "steps": steps.num_steps,
        "device_ms_per_step": round(1e3 * steps.device_s / steps.num_steps, 3),
        "host_ms_per_step": round(1e3 * steps.host_s / steps.num_steps, 3),
        "gpu_busy": round(steps.busy, 3),
    }


def _gap_s(answer: TimedAnswer) -> float:
    return (answer.token_s[-1] - answer.token_s[0]) / (len(answer.token_s) - 1)
