"""`mainstem bench tables` on the tiny shape."""

import json

import pytest

from mainstem_bench.tables import FIELDS, TokenTable, main

pytestmark = pytest.mark.torch


def test_the_chosen_order_computes_less_in_any_order_of_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--rows", "24", "--output", "2", "--kv-tokens", "32768"]
    assert main(["--model-shape", "tiny", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    ways = [f"{c}_columns_{r}_rows" for c in ("given", "chosen") for r in ("file", "ours")]
    assert all(result[f"{way}_requests_per_s"] > 0 for way in ways)
    computed = [result[f"{way}_computed_tokens"] for way in ways]
    assert computed[3] < computed[1] <= computed[0]
    # the instruction once, each row's question, and the fields as the choice of columns counts them
    assert computed[3] == 32 + 24 * 16 + result["field_tokens_computed_chosen"]
    assert result["chosen_order"].startswith("policy,")


def test_five_of_the_eight_fields_repeat() -> None:
    table = TokenTable.random(1000, 500, 0)
    repeating = [len(set(column.codes.tolist())) < 1000 for column in table.columns]
    assert (len(FIELDS), sum(repeating)) == (8, 5)
