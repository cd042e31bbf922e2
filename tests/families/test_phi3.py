"""Phi 3 and 4: fused products, LongRoPE by the length of the context, partly rotated heads."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config

from mainstem.core.config import CacheConfig, EngineConfig, SchedConfig
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.load import load_runner
from mainstem.runner.origin import folder_origin
from tests.families.equality import CONTEXT, PREFIX_TOKENS, check_family
from tests.models.checkpoints import SMALL, write_checkpoint

ORIGINAL = 16  # tokens: all prompts of the check are longer


def longrope(original: int, num_pairs: int, **more: object) -> dict[str, Any]:
    """Fields of a config with LongRoPE."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(num_pairs)],
        "long_factor": [1.5 + 0.7 * pair for pair in range(num_pairs)],
        "original_max_position_embeddings": original,
        **more,
    }
    return {**SMALL, "original_max_position_embeddings": original, "rope_parameters": rope}


def test_phi_3_with_plain_rope_and_a_window_answers_as_transformers(tmp_path: Path) -> None:
    check_family(Phi3Config(**SMALL, sliding_window=PREFIX_TOKENS // 2), tmp_path)


def test_short_factors_are_used_within_the_original_context(tmp_path: Path) -> None:
    config = Phi3Config(**longrope(CONTEXT, num_pairs=4))
    check_family(config, tmp_path, max_model_len=CONTEXT)


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_long_factors_are_used_beyond_the_original_context(share: float, tmp_path: Path) -> None:
    """Phi-4-mini rotates 3/4 of a head's dims; LongRoPE's score factor applies only to these."""
    assert PREFIX_TOKENS > ORIGINAL
    fields = longrope(ORIGINAL, num_pairs=int(4 * share), partial_rotary_factor=share, factor=4.0)
    check_family(Phi3Config(**fields), tmp_path)


def test_pages_of_short_and_long_factors_have_different_names(tmp_path: Path) -> None:
    write_checkpoint(Phi3Config(**longrope(ORIGINAL, num_pairs=4)), tmp_path)

    def identity(max_model_len: int) -> bytes:
        sched = SchedConfig(max_model_len=max_model_len)
        config = EngineConfig(cache=CacheConfig(kv_tokens=64), sched=sched)
        return load_cpu_runner(folder_origin(tmp_path), config)[1].identity

    assert identity(ORIGINAL - 1) == identity(ORIGINAL)
    assert identity(ORIGINAL + 1) == identity(ORIGINAL + 2)
    assert identity(ORIGINAL) != identity(ORIGINAL + 1)


def test_a_warning_says_that_short_requests_use_long_factors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(Phi3Config(**longrope(ORIGINAL, num_pairs=4)), tmp_path)
    cache = CacheConfig(kv_tokens=64)
    short = EngineConfig(cache=cache, sched=SchedConfig(max_model_len=ORIGINAL))
    load_runner(folder_origin(tmp_path), short)
    assert not caplog.messages
    long = EngineConfig(cache=cache, sched=SchedConfig(max_model_len=ORIGINAL + 1))
    load_runner(folder_origin(tmp_path), long)
    (message,) = caplog.messages
    assert f"--max-model-len {ORIGINAL}" in message


def test_the_short_factors_are_used_if_there_is_no_room_for_long_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(Phi3Config(**longrope(ORIGINAL, num_pairs=4)), tmp_path)

    def loaded(kv_tokens: int, max_model_len: int | None) -> RunnerFacts:
        cache = CacheConfig(kv_tokens=kv_tokens)
        config = EngineConfig(cache=cache, sched=SchedConfig(max_model_len=max_model_len))
        return load_runner(folder_origin(tmp_path), config)[1]

    by_limit, by_room = loaded(8 * ORIGINAL, ORIGINAL), loaded(ORIGINAL, None)
    assert not caplog.messages
    assert by_room.max_model_len == ORIGINAL
    assert by_room.identity == by_limit.identity != loaded(ORIGINAL + 1, None).identity
    assert "LongRoPE" in caplog.text
