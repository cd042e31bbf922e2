"""Projects the time of a step on several cards from one card.

A card runs the part of rank 0 on random weights, with collectives that do nothing. The time of the
collectives is computed from their bytes, at the speed of NVLink plus some microseconds for each,
and is added; nothing overlaps. There are steps with only prompts, and steps with only decodes.
"""

import argparse
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor

from mainstem.cli.flag_types import comma_list, positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.tables import table
from mainstem.engine.build import join, with_chunk
from mainstem.engine.engine import Engine
from mainstem.models.shard import Shard, part_of
from mainstem.models.spec import ModelSpec, QkNorm, Residual
from mainstem.runner.load import load_runner
from mainstem.runner.origin import RandomOrigin
from mainstem_bench.decode import decode, num_outputs
from mainstem_bench.feed import submit_all
from mainstem_bench.kept import free_memory
from mainstem_bench.report import line, load_average
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import shared

NVLINK_BYTES_PER_S = 450e9  # of one card in one direction, in a machine of eight cards
CALL_S = 10e-6  # fixed time of a collective
CASES = ("llama-30b:2", "llama-65b:4", "llama2-70b:4", "falcon-40b:4")  # the papers' settings
NUM_RUNS = 2  # the faster run counts
WARM_SEED = 99


@dataclass(frozen=True, slots=True)
class Silent:
    """Collectives that do nothing, for a rank without the others."""

    shard: Shard
    is_capturable: bool = True

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.shard.of)


def collectives_s(
    spec: ModelSpec, of: int, num_tokens: float, num_samples: float, element_bytes: int = 2
) -> float:
    """Return the seconds of a step's collectives. Sums are ring all-reduces: each rank sends its
    bytes `2 * (of - 1) / of` times. Logits are gathered."""
    per_layer = 1 if spec.residual is not Residual.SERIAL else 2
    num_sums = 1 + spec.num_layers * per_layer  # one sum is for the embedding
    sum_bytes = num_sums * num_tokens * spec.hidden_size * element_bytes
    if spec.qk_norm is QkNorm.ROWS:
        num_sums += spec.num_layers  # sums of two numbers per token
    share = (of - 1) / of
    gather_bytes = num_samples * spec.vocab_size * element_bytes
    moved = 2 * share * sum_bytes + share * gather_bytes
    return (num_sums + 1) * CALL_S + moved / NVLINK_BYTES_PER_S


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench ranks", description=__doc__)
    made.add_argument(
        "--cases", type=comma_list(str), default=list(CASES), metavar="SHAPE:RANKS,..",
        help=f"({','.join(CASES)})",
    )  # fmt: skip
    made.add_argument(
        "--seqs", type=comma_list(positive_count), default=[1, 16, 64], metavar="N,N",
        help="sequences that decode at once (1,16,64)",
    )  # fmt: skip
    made.add_argument("--own", type=positive_count, default=512, help="prompt tokens (%(default)s)")
    made.add_argument("--steps", type=positive_count, default=50, help="timed steps (%(default)s)")
    made.add_argument("--json", action="store_true", help="one line for each kind of step")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    cases = [_read_case(case) for case in args.cases]
    rows = []
    for name, of in cases:
        for result in measure(args, name, of):
            if args.json:
                print(line("ranks", result))
            shown = ("step", "part_ms", "collectives_ms", "projected_ms", "tokens_per_s")
            rows.append([f"{name} on {of}", *(str(result[column]) for column in shown)])
    if not args.json:
        heads = ["", "step", "ms of a part", "ms of collectives", "ms, projected", "tokens/s"]
        print(table(heads, rows))
    return 0


def _read_case(case: str) -> tuple[str, int]:
    name, _, of = case.partition(":")
    if name not in SHAPES or not of.isdigit() or int(of) < 1:
        raise ConfigError(f"--cases: {case!r} is not SHAPE:RANKS; shapes: {', '.join(SHAPES)}")
    part_of(SHAPES[name], Shard(0, int(of)))  # raises if the model cannot be split like this
    return name, int(of)


def measure(args: Namespace, name: str, of: int) -> Iterator[dict[str, object]]:
    """Yield a result for each kind of step."""
    spec = SHAPES[name]
    fields = {"prefix": 0, "degree": None, "model_shape": name}
    decoding = Namespace(**{**vars(args), **fields})
    num_tokens = max(n * (args.own + num_outputs(decoding, n) + 64) for n in args.seqs)
    config = with_chunk(random_config(args, name, num_tokens), spec)
    load = load_average()
    engine = _part_engine(spec, config, of)
    counters = Counters().attach(engine.bus)
    part = part_of(spec, Shard(0, of))
    about: dict[str, object] = {
        "model_shape": name,
        "ranks": of,
        "weights_gb": round(2e-9 * part.num_weights, 1),
        "kv_bytes_per_token": 2 * part.kv_elements_per_token,
    }
    where = measured_on(config, load)
    where |= {"nvlink_gb_per_s": NVLINK_BYTES_PER_S / 1e9, "call_us": CALL_S * 1e6}
    tokens, seconds = _prefill(engine, counters, spec, config)
    yield about | _projected(f"prompts, {tokens}", seconds, spec, of, tokens, 1) | where
    for seqs in args.seqs:
        runs = [decode(engine, counters, decoding, seqs, seed) for seed in range(NUM_RUNS)]
        seconds = 1e-3 * min(run["ms_per_step"] for run in runs)
        yield about | _projected(f"decodes, {seqs}", seconds, spec, of, seqs, seqs) | where
    engine.close()
    del engine
    free_memory()


def _part_engine(spec: ModelSpec, config: EngineConfig, of: int) -> Engine:
    runner, facts = load_runner(RandomOrigin(spec, 0), config, Silent(Shard(0, of)))
    return join(runner, facts, config, EventBus())


def _projected(
    step: str, part_s: float, spec: ModelSpec, of: int, num_tokens: int, num_samples: int
) -> dict[str, object]:
    more_s = 0.0 if of == 1 else collectives_s(spec, of, num_tokens, num_samples)
    return {
        "step": step,
        "part_ms": round(1e3 * part_s, 3),
        "collectives_ms": round(1e3 * more_s, 3),
        "projected_ms": round(1e3 * (part_s + more_s), 3),
        "tokens_per_s": round(num_tokens / (part_s + more_s), 1),
    }


def _prefill(
    engine: Engine, counters: Counters, spec: ModelSpec, config: EngineConfig
) -> tuple[int, float]:
    """Return the tokens of a step, and its seconds; prompts fill whole steps."""
    tokens = config.sched.chunk_tokens or 512
    vocab = min(spec.vocab_size, 30_000)
    length = min(tokens, spec.max_positions // 2, 2048)
    count, best_s = max(2, 4 * tokens // length), float("inf")
    for seed in range(WARM_SEED, WARM_SEED + 1 + NUM_RUNS):
        submit_all(engine, "prompts", shared(count, 1, 0, length, seed, vocab), [1] * count)
        before, begin = replace(counters), perf_counter()
        while engine.has_work:
            engine.step()
        seconds, steps = perf_counter() - begin, counters.steps - before.steps
        engine.clear_cache()
        if seed > WARM_SEED:
            best_s = min(best_s, seconds / steps)
    return count * length // steps, best_s
