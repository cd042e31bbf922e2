"""Served loads in virtual time: what the slowest requests wait for."""

import json

import pytest

from mainstem.core.config import SchedConfig
from mainstem_bench.limit import ModelCost
from mainstem_bench.shapes import SHAPES
from mainstem_bench.tails import LOADS, main, serve
from mainstem_bench.virtual_engine import VirtualEngine

SHAPE = SHAPES["llama31-8b"]
WEIGHTS_S = 2 * SHAPE.num_layer_params / 4.8e12  # to read them as fast as an H200 can at most


def an_engine(step_ms: float | None = None) -> VirtualEngine:
    model = ModelCost.of(SHAPE, 2)
    config = SchedConfig(chunk_tokens=2048, step_ms=step_ms)
    return VirtualEngine(model, SHAPE.vocab_size, 100_000, config)


def test_one_request_takes_the_time_of_its_steps() -> None:
    one = LOADS["plain"].conversations(1, SHAPE.vocab_size, seed=0)
    found = serve(an_engine(), one, [3.0])
    assert found["requests"] == 1
    assert found["steps"] == 128  # its prompt, and 127 more tokens
    first_ms, token_ms = found["ttft_ms_mean"], found["token_ms_mean"]
    assert WEIGHTS_S < 1e-3 * token_ms < 2 * WEIGHTS_S
    assert found["seconds"] == pytest.approx(3 + 1e-3 * (first_ms + 127 * token_ms), abs=0.02)


def test_all_turns_of_all_conversations_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", "chat", "--conversations", "6", "--rate", "50", "--step-ms", "0", "--json"]
    assert main(flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 24
    assert found["saving_ratio"] > 0.5  # system prompts, and the turns before
    assert found["preemptions"] == 0


def test_shorter_steps_make_streams_smoother_and_first_tokens_later() -> None:
    """Ten documents at once, which others then wait for."""

    def run(step_ms: float | None) -> dict[str, float]:
        conversations = LOADS["docs"].conversations(20, SHAPE.vocab_size, seed=0)
        return serve(an_engine(step_ms), conversations, [0.05 * i for i in range(20)])

    long, short = run(None), run(20.0)
    assert short["gap_ms_max"] < 25 < long["gap_ms_max"]
    assert short["ttft_ms_mean"] > long["ttft_ms_mean"]
