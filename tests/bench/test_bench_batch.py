"""`mainstem bench batch` hands the engine's flags on to the runs it compares."""

import pytest

from mainstem.cli import batch
from mainstem.cli.flags import engine_config
from mainstem.core.errors import InvalidRequest
from mainstem_bench.batch import NOT_SHARED, PLAIN, engine_flags, parser

GIVEN = [
    *("--model", "x", "--dtype", "float32", "--device", "cpu", "--quantize", "int8"),
    *("--threads", "1", "--chat-template", "t.jinja", "--deterministic", "--page-size", "32"),
    *("--gpu-memory-utilization", "0.5", "--chunk-tokens", "64", "--span-levels", "2"),
    *("--max-model-len", "512", "--truncation-ratio", "0.25", "--sink-tokens", "4"),
    *("--host-gb", "1", "--disk-dir", "d", "--disk-gb", "2", "--store-ttl", "9"),
    *("--store-policy", "lru", "--store-fetch", "always", "--preload", "all"),
]


def test_every_flag_of_the_engine_reaches_the_runs() -> None:
    args = parser().parse_args(GIVEN)
    handed_on = batch.parser().parse_args(["in", "-o", "out", *engine_flags(args)])
    assert engine_config(handed_on) == engine_config(args)


def test_the_run_without_sharing_gets_no_flag_that_it_would_ignore() -> None:
    flags = engine_flags(parser().parse_args(GIVEN), NOT_SHARED)
    handed_on = batch.parser().parse_args(["in", "-o", "out", *flags, *PLAIN])
    engine_config(handed_on).check()
    assert handed_on.chunk_tokens == 64


def test_sharing_is_not_up_to_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="--share"):
        engine_flags(parser().parse_args(["--share", "reads"]))
