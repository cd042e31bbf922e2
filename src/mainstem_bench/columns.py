"""Compares the order of columns that `mainstem map` chooses with the best order, found by trying
every permutation, and with the given order.

Tokens computed are counted exactly, on the prompts of all rows: every token of their prefix tree
once. Each field's line is tokenized by itself. --random-rows instead measures seconds and memory of
choosing the order for a random table of 8 columns.
"""

import argparse
import random
import resource
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from mainstem.checkpoints.fetch import fetch_tokenizer
from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser
from mainstem.core.config import ModelConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.plan import Prompts
from mainstem.plan.prefix_tree import build_tree
from mainstem.tables.fields import Reorder, order_fields, scan
from mainstem.tables.files import FileTable
from mainstem.tables.prompts import field_line, text_in
from mainstem.tables.text import Row
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench.report import load_average, show

MOST_FIELDS = 7
# of the random table: different values (0: all), and words of a value
RANDOM_COLUMNS = ((0, 2), (0, 30), (5, 6), (50, 3), (500, 4), (5000, 12), (100, 25), (100_000, 8))
WORDS = 2000


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench columns", description=__doc__)
    made.add_argument("tables", nargs="*", type=Path, metavar="TABLE", help="of up to 7 columns")
    made.add_argument("--rows", type=positive_count, metavar="N", help="only the first N of each")
    made.add_argument("--random-rows", type=positive_count, metavar="N", help="of a random table")
    made.add_argument("--model", default="smollm2", help="whose tokenizer is used (smollm2)")
    made.add_argument("--json", action="store_true", help="one line for each table")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if not args.tables and args.random_rows is None:
        raise InvalidRequest("TABLE", "give tables, or --random-rows")
    tokenizer = fetch_tokenizer(ModelConfig(args.model))
    results = [compare(path, args.rows, tokenizer) for path in args.tables]
    if args.random_rows is not None:
        results.append(choose_for_random(args.random_rows, tokenizer))
    for result in results:
        show("columns", result, args.json)
    return 0


def compare(path: Path, limit: int | None, tokenizer: Tokenizer) -> dict[str, object]:
    """Tokens computed in the chosen order, in the best one and in the given one."""
    given = FileTable.open(str(path), limit)
    fields = given.columns
    if len(fields) > MOST_FIELDS:
        raise InvalidRequest(str(path), f"has more than {MOST_FIELDS} columns")
    began_s = perf_counter()
    num_rows, columns = scan(given, fields, tokenizer)
    found = order_fields(fields, columns, Reorder.COLUMNS)
    seconds = perf_counter() - began_s
    lines = _lines(given, tokenizer)
    costs = {order: _computed(lines, order) for order in permutations(range(len(fields)))}
    best = min(costs, key=lambda order: costs[order])
    chosen = tuple(fields.index(name) for name in found.orders[0])
    in_given = costs[tuple(range(len(fields)))]
    return {
        "table": path.name,
        "rows": num_rows,
        "fields": len(fields),
        "tokens": sum(len(ids) for row in lines for ids in row),
        "computed_given": in_given,
        "computed_chosen": costs[chosen],
        "computed_best": costs[best],
        "chosen_over_best": round(costs[chosen] / costs[best], 4),
        "given_over_chosen": round(in_given / costs[chosen], 3),
        "chosen_estimate": found.computed_tokens,
        "given_order": ",".join(fields),
        "chosen_order": ",".join(found.orders[0]),
        "best_order": ",".join(fields[number] for number in best),
        "choosing_s": round(seconds, 3),
    }


def _lines(given: FileTable, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """The ids of each row's fields."""
    known: dict[str, list[int]] = {}

    def ids(name: str, row: Row) -> list[int]:
        cells = dict(zip(given.columns, row, strict=True))
        text = field_line(name, text_in(cells, name))
        if text not in known:
            known[text] = tokenizer.encode_plain(text)
        return known[text]

    return [[ids(name, row) for name in given.columns] for row in given]


def _computed(lines: Sequence[Sequence[list[int]]], order: tuple[int, ...]) -> int:
    """Tokens that are computed once, if everything is shared."""
    prompts = ([token for number in order for token in row[number]] for row in lines)
    return int(build_tree(Prompts.from_lists(prompts)).subtree_tokens[0])


# --- a large table -------------------------------------------------------------------------------


class RandomTable:
    """A table that is made again, the same, each time it is read."""

    columns = tuple(f"column_{number}" for number in range(len(RANDOM_COLUMNS)))

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Row]:
        rng = random.Random(0)
        words = [f"w{number}" for number in range(WORDS)]
        values = [
            [" ".join(rng.choices(words, k=size)) for _ in range(count)]
            for count, size in RANDOM_COLUMNS
        ]
        for number in range(self.num_rows):
            yield [
                rng.choice(known) if known else f"{number} {words[number % WORDS]} " * (size // 2)
                for known, (_, size) in zip(values, RANDOM_COLUMNS, strict=True)
            ]


def choose_for_random(num_rows: int, tokenizer: Tokenizer) -> dict[str, object]:
    """Seconds and memory of choosing the order for a large table."""
    load, made = load_average(), RandomTable(num_rows)
    began_s, began_cpu_s = perf_counter(), process_time()
    for _ in made:
        pass
    reading_s, reading_cpu_s = perf_counter() - began_s, process_time() - began_cpu_s
    before = _peak_mib()
    began_s, began_cpu_s = perf_counter(), process_time()
    _, columns = scan(made, made.columns, tokenizer)
    scanned_s = perf_counter() - began_s
    found = order_fields(made.columns, columns, Reorder.COLUMNS)
    return {
        "rows": num_rows,
        "fields": len(made.columns),
        "values": sum(len(np.unique(column.codes)) for column in columns),
        "seconds": round(perf_counter() - began_s - reading_s, 2),
        # other programs affect these less
        "processor_s": round(process_time() - began_cpu_s - reading_cpu_s, 2),
        "scanning_s": round(scanned_s - reading_s, 2),
        "making_the_table_s": round(reading_s, 2),
        "added_peak_mib": round(_peak_mib() - before),
        "chosen_order": ",".join(found.orders[0]),
        "given_over_chosen": round(found.given_tokens / max(1, found.computed_tokens), 3),
        "load_before": load,
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
