"""`mainstem bench decode` on the tiny shape."""

import json

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench.decode import main
from tests.bench.rounded import printed

pytestmark = pytest.mark.torch

TINY = ["--model-shape", "tiny", "--own", "20", "--steps", "5"]


def test_each_number_of_sequences_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--seqs", "1,4", "--prefix", "40", "--degree", "1", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seqs"] for line in lines] == [1, 4]
    for line in lines:
        assert line["ms_per_step"] >= line["device_ms_per_step"] > 0
        ms, rate = printed(line["ms_per_step"], 3), printed(line["tokens_per_s"], 1)
        assert (ms * rate).may_be(1e3 * line["seqs"])


def test_prompts_of_many_chunks_decode_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model-shape", "tiny", "--own", "300", "--steps", "5", "--seqs", "6"]
    assert main([*args, "--chunk-tokens", "128"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "sequences"
    assert row.split()[0] == "6"


def test_sequences_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not decode at once"):
        main([*TINY, "--own", "200", "--seqs", "8", "--kv-tokens", "600"])


def test_groups_of_unequal_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="--degree 2"):
        main([*TINY, "--seqs", "4,3", "--degree", "2"])
