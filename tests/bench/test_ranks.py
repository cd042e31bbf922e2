"""`mainstem bench ranks` on the tiny shape."""

import json

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench.ranks import CALL_S, NVLINK_BYTES_PER_S, collectives_s, main
from mainstem_bench.shapes import SHAPES
from tests.bench.rounded import printed

pytestmark = pytest.mark.torch


def test_each_kind_of_step_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--cases", "tiny:2", "--seqs", "1,3", "--own", "20", "--steps", "3", "--json"]
    assert main([*args, "--chunk-tokens", "64"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == ["prompts, 64", "decodes, 1", "decodes, 3"]
    for line in lines:
        whole = printed(line["part_ms"], 3) + printed(line["collectives_ms"], 3)
        assert whole.may_be(printed(line["projected_ms"], 3))
        assert line["collectives_ms"] > 5 * CALL_S * 1e3  # 6: 2 a layer, embedding, logits
    assert lines[0]["kv_bytes_per_token"] == 2 * 2 * 2 * 1 * 64  # one of two KV heads


def test_collectives_are_as_many_as_counted_by_hand() -> None:
    """Llama-65B on 4 ranks: 161 sums of 8,192 numbers per token, and 32,000 logits per sample."""
    spec = SHAPES["llama-65b"]
    moved = 161 * 8192 * 2 * 100 * 1.5 + 3 * 32_000 * 2 * 0.75
    expected = 162 * CALL_S + moved / NVLINK_BYTES_PER_S
    assert collectives_s(spec, 4, 100, 3) == pytest.approx(expected)
    parallel = SHAPES["falcon-40b"]  # one sum for attention and MLP of a layer
    assert collectives_s(parallel, 4, 0, 0) == pytest.approx(62 * CALL_S)


def test_impossible_cases_are_refused() -> None:
    with pytest.raises(ConfigError, match="not SHAPE:RANKS"):
        main(["--cases", "llama-31b:2"])
    with pytest.raises(ConfigError, match=r"num_attention_heads=52 .* possible .*: 1, 2, 4, 13"):
        main(["--cases", "llama-30b:8"])
