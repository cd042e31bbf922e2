"""Measures a job over a table on random weights: columns as given and in the order that shares most
(plan/columns.py), rows as in the file and in planned order.

The table has 8 fields, of which 5 repeat; a prompt is an instruction, the fields, and a question.
Cells are random token ids, so no tokenizer is needed. All four runs use one engine, with an empty
cache at the start of each. Planning and submitting are timed; choosing the order of columns is
timed separately.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import EngineConfig
from mainstem.core.plan import Int64s, Prompts
from mainstem.engine.build import build_random_engine
from mainstem.plan.columns import Column, choose_order, given_order
from mainstem_bench.feed import JobRun, run_job
from mainstem_bench.machine import Machine
from mainstem_bench.offline import WARM_SEQS, check_same, warm_up
from mainstem_bench.report import load_average, show
from mainstem_bench.settings import measured_on, random_config
from mainstem_bench.shapes import SHAPES
from mainstem_bench.workloads import OfflineJob

KV_TOKENS = 450_000
INSTRUCTION, QUESTION = 32, 16  # tokens before and after the fields
WARM_ROWS = 64
CHECKED_ROWS, CHECKED_OUTPUT = 12, 4
SEED = 0


@dataclass(frozen=True, slots=True)
class TableField:
    """A column of the table."""

    name: str
    tokens: int  # of every value
    values: int | None = None  # how many different ones; None: every row has its own
    of: str | None = None  # the column that determines this one


# in the given order, as a database might export them: the key first, the text before the facts
FIELDS = (
    TableField("id", 8),
    TableField("title", 20),
    TableField("review", 60),
    TableField("category", 12, 10, of="brand"),
    TableField("brand", 16, 40, of="product"),
    TableField("product", 48, 400),
    TableField("seller", 80, 100),
    TableField("policy", 200, 4),
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """A table whose cells are token ids."""

    columns: list[Column]
    cells: list[list[list[int]]]  # by column and value
    frame: tuple[list[int], list[int]]  # before and after the fields

    @classmethod
    def random(cls, num_rows: int, vocab: int, seed: int) -> "TokenTable":
        """Rows in random order."""
        rng = np.random.default_rng(seed)
        codes: dict[str, Int64s] = {}
        for field in reversed(FIELDS):  # the determining columns come later
            if field.values is None:
                codes[field.name] = rng.permutation(num_rows)
            elif field.of is None:
                codes[field.name] = rng.integers(0, field.values, num_rows)
        for field in reversed(FIELDS):
            if field.of is not None and field.values is not None:
                codes[field.name] = codes[field.of] % field.values
        most = min(vocab, 30_000)

        def ids(count: int) -> list[int]:
            return [int(each) for each in rng.integers(10, most, count)]

        columns, cells = [], []
        for field in FIELDS:
            count = num_rows if field.values is None else field.values
            cells.append([ids(field.tokens) for _ in range(count)])
            columns.append(Column(codes[field.name], np.full(count, field.tokens, np.int64)))
        return cls(columns, cells, (ids(INSTRUCTION), ids(QUESTION)))

    def prompts(self, order: tuple[int, ...], num_rows: int | None = None) -> list[list[int]]:
        """The prompts of the first rows (all rows if None), with the columns in this order."""
        before, after = self.frame
        found = []
        for row in range(len(self.columns[0].codes) if num_rows is None else num_rows):
            ids = list(before)
            for number in order:
                ids += self.cells[number][int(self.columns[number].codes[row])]
            found.append(ids + after)
        return found


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench tables", description=__doc__)
    made.add_argument("--model-shape", choices=list(SHAPES), default="llama31-8b")
    made.add_argument("--rows", type=positive_count, default=4000, metavar="N", help="(4000)")
    flag = partial(add_flag, made)
    flag("--output", positive_count, "tokens per answer", 8)
    made.add_argument("--json", action="store_true", help="one line")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    config = random_config(args, args.model_shape, KV_TOKENS)
    show("tables", measure(args.rows, args.output, args.model_shape, config), args.json)
    return 0


def measure(
    num_rows: int, output: int, model_shape: str, config: EngineConfig
) -> dict[str, object]:
    """Return one result: requests per second of all four runs."""
    load, machine, shape = load_average(), Machine.of(config), SHAPES[model_shape]
    given_table = TokenTable.random(num_rows, shape.vocab_size, SEED)
    began_s = perf_counter()
    chosen = choose_order(given_table.columns)
    choosing_s = perf_counter() - began_s
    given = given_order(given_table.columns)
    if model_shape == "tiny":
        check_rows(given_table, chosen.columns, config)
    engine = build_random_engine(shape, config)
    warm = OfflineJob(
        "warm-up", model_shape, config.cache.kv_tokens or KV_TOKENS, 4,
        WARM_ROWS, sum(field.tokens for field in FIELDS), INSTRUCTION + QUESTION, output,
    )  # fmt: skip
    warm_up(engine, warm, shape.vocab_size, WARM_SEQS if machine.has_gpu else 16)
    found: dict[str, object] = {}
    for columns, order in (("given", given.columns), ("chosen", chosen.columns)):
        prompts = Prompts.from_lists(given_table.prompts(order))
        for rows, is_planned in (("file", False), ("ours", True)):
            engine.clear_cache()
            run = run_job(engine, prompts, output, is_planned)
            found |= _about(f"{columns}_columns_{rows}_rows", run, num_rows)
    engine.check()
    engine.close()
    names = [FIELDS[number].name for number in chosen.columns]
    return {
        "model_shape": model_shape,
        "rows": num_rows,
        "output": output,
        **found,
        "given_order": ",".join(field.name for field in FIELDS),
        "chosen_order": ",".join(names),
        "field_tokens": given.total_tokens,
        "field_tokens_computed_given": given.computed_tokens,
        "field_tokens_computed_chosen": chosen.computed_tokens,
        "choosing_s": round(choosing_s, 4),
        "peak_gb": round(machine.peak_bytes() / 1e9, 2),
        **measured_on(config, load),
    }


def _about(name: str, run: JobRun, num_rows: int) -> dict[str, object]:
    return {
        f"{name}_requests_per_s": round(num_rows / run.seconds, 3),
        f"{name}_seconds": round(run.seconds, 3),
        f"{name}_computed_tokens": run.counters.computed_tokens,
        f"{name}_saving_ratio": round(run.counters.saving_ratio, 4),
        f"{name}_plan_s": round(run.plan_s, 3),
    }


def check_rows(given: TokenTable, order: tuple[int, ...], config: EngineConfig) -> None:
    """Raise AssertionError unless the first rows get the same answers in file order and planned."""
    prompts = Prompts.from_lists(given.prompts(order, min(CHECKED_ROWS, len(given.cells[0]))))
    ways = ((config, False), (config, True))
    check_same(prompts, CHECKED_OUTPUT, ways, "the order of rows changed an answer")
