"""`mainstem bench score` on the tiny shape."""

import json

import pytest

from mainstem_bench.score import main
from tests.bench.rounded import printed

pytestmark = pytest.mark.torch


def test_scoring_computes_less_than_generating(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts", "4", "--context-tokens", "42", "--choices", "3", "--choice-tokens", "4"]
    assert main(["--model-shape", "tiny", "--kv-tokens", "8192", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # The context once, and 3 of the 4 tokens of each choice: nothing follows the last. The second
    # and third choice compute the context's last token again, for its logits.
    assert result["computed_per_context"] == 42 + 3 * 3 + 2
    assert result["generate_computed_per_context"] >= 42 + 3 * 4
    rate = printed(result["contexts_per_s"], 3)
    assert (rate * 3).may_be(printed(result["choices_per_s"], 2))
    assert (rate * printed(result["seconds"], 3)).may_be(4)
