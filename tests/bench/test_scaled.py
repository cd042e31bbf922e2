"""What a served model should take, by that of another size."""

import json

import pytest

from mainstem_bench.scaled import main, step_bytes, token_flops
from mainstem_bench.shapes import SHAPES


def test_flops_and_bytes_of_a_llama() -> None:
    """32 layers of 218,103,808 weights, 32 query and 8 KV heads of 128, 128,256 ids."""
    shape = SHAPES["llama31-8b"]
    weights, head = 32 * 218_103_808, 128_256 * 4096
    assert token_flops(shape, 2000) == 2 * weights + 32 * 32 * 4 * 128 * 1000
    keys = 12_000 * 32 * 8 * 128 * 2 * 2
    assert step_bytes(shape, 1.0, running=18, keys=12_000) == weights + 2 * head + keys


def test_states_are_read_and_written() -> None:
    shape = SHAPES["qwen36-27b"]
    few, many = (step_bytes(shape, 1.0, running=count, keys=0) for count in (1, 11))
    matrices = 48 * 48 * 128 * 128 * 4  # beside them, the inputs of convolutions
    assert matrices * 20 < many - few < 1.02 * matrices * 20


def test_ratios_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["llama31-8b", "llama31-8b", "--running", "4", "--json"])
    line = json.loads(capsys.readouterr().out)
    assert (line["flops_ratio"], line["bytes_ratio"]) == (1.0, 1.0)
