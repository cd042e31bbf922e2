"""Measures the milliseconds of a decode step on random weights, with or without common prefixes.

All sequences are prefilled first; then steps are timed in which each sequence gets a token. This is
done twice and the faster run counts, since other processes may slow one down.
"""

import argparse
from dataclasses import replace
from functools import partial
from time import perf_counter

from mainstem.cli.flag_types import comma_list, not_negative_count, positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError
from mainstem.core.ids import RequestId
from mainstem.core.metrics import Counters
from mainstem.core.tables import table
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem_bench.feed import submit_all
from mainstem_bench.packed import add_weights_flag, shape_with
from mainstem_bench.report import line, load_average
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import shared

NAME = "decode"  # begins the names of requests
NUM_RUNS = 2
WARM_STEPS = 20  # steps that decode all sequences before the timed ones
LEAST_CHUNK = 128  # `num_outputs` assumes steps of at least this many prompt tokens


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench decode", description=__doc__)
    made.add_argument("--model-shape", choices=list(SHAPES), default="llama31-8b")
    add_weights_flag(made)
    made.add_argument(
        "--seqs", type=comma_list(positive_count), default=[1, 8, 32], metavar="N,N",
        help="sequences at once; a line each (1,8,32)",
    )  # fmt: skip
    made.add_argument("--own", type=positive_count, default=300, help="own tokens (%(default)s)")
    flag = partial(add_flag, made)
    flag("--prefix", not_negative_count, "tokens of each prefix", 0)
    made.add_argument("--degree", type=positive_count, help="sequences that share a prefix (all)")
    made.add_argument("--steps", type=positive_count, default=100, help="timed steps (%(default)s)")
    made.add_argument("--json", action="store_true", help="one line for each of --seqs")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    for seqs in args.seqs:
        if seqs % (args.degree or seqs):
            raise ConfigError(f"--seqs {seqs} is not a multiple of --degree {args.degree}")
    tokens = max(
        seqs * (args.prefix + args.own + num_outputs(args, seqs) + 64) for seqs in args.seqs
    )
    config = random_config(args, args.model_shape, tokens)
    if config.cache.states is None:
        config = replace(config, cache=replace(config.cache, states=2 * max(args.seqs) + 2))
    load = load_average()
    begin = perf_counter()
    shape = shape_with(args.model_shape, args.weights)
    engine = build_random_engine(shape, config)
    start_s = round(perf_counter() - begin, 2)
    rows, counters = [], Counters().attach(engine.bus)
    for seqs in args.seqs:
        runs = [decode(engine, counters, args, seqs, seed) for seed in range(NUM_RUNS)]
        result = min(runs, key=lambda run: run["ms_per_step"])
        rows.append([str(seqs), *(str(value) for value in result.values())])
        if args.json:
            about = {"model_shape": args.model_shape, "seqs": seqs, "prefix": args.prefix}
            about |= {"degree": args.degree or seqs, "own": args.own, "steps": args.steps}
            about |= {} if args.weights is None else {"weights": args.weights}
            where = {"start_s": start_s} | measured_on(config, load)
            print(line("decode", about | result | where))
    engine.close()
    if not args.json:
        print(table(["sequences", "ms a step", "host ms", "device ms", "tokens/s"], rows))
    return 0


def num_outputs(args: argparse.Namespace, seqs: int) -> int:
    """Return an answer length with which the first sequence still decodes when the last step is
    timed."""
    num_prompt_tokens = seqs * (args.prefix + args.own)
    return int(args.steps) + 2 * WARM_STEPS + int(num_prompt_tokens) // LEAST_CHUNK


def _submit(engine: Engine, args: argparse.Namespace, seqs: int, seed: int) -> None:
    degree, output = args.degree or seqs, num_outputs(args, seqs)
    most = min(SHAPES[args.model_shape].vocab_size, 30_000)
    prompts = shared(seqs // degree, degree, args.prefix, args.own, seed, most)
    submit_all(engine, NAME, prompts, [output] * seqs)


def decode(
    engine: Engine, counters: Counters, args: argparse.Namespace, seqs: int, seed: int
) -> dict[str, float]:
    """Prefill, then time steps that decode all sequences."""
    _submit(engine, args, seqs, seed)
    decoded = counters.decoded_tokens
    while engine.has_work and counters.decoded_tokens - decoded != seqs:  # until all decode
        decoded = counters.decoded_tokens
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    before = replace(counters)
    begin = perf_counter()
    while engine.has_work and counters.steps - before.steps < args.steps:
        engine.step()
    seconds, after = perf_counter() - begin, replace(counters)
    for index in range(seqs):
        engine.abort(RequestId(f"{NAME}-{index}"))
    while engine.has_work:
        engine.step()
    engine.clear_cache()
    steps = after.steps - before.steps
    if after.decoded_tokens - before.decoded_tokens != seqs * steps or not steps:
        raise ConfigError(f"{seqs} sequences do not decode at once: use more --kv-tokens")
    return {
        "ms_per_step": round(1e3 * seconds / steps, 3),
        "host_ms_per_step": round(1e3 * (after.host_s - before.host_s) / steps, 3),
        "device_ms_per_step": round(1e3 * (after.device_s - before.device_s) / steps, 3),
        "tokens_per_s": round(seqs * steps / seconds, 1),
    }
