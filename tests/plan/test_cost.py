"""The cost of attention over a span."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.errors import ConfigError
from mainstem.plan.cost import (
    CARDS,
    DATASHEETS,
    GENERIC_CPU,
    H200,
    Heads,
    card_for,
    full_speed_tokens,
    measured_card,
    shared_s,
    unshared_s,
    worth_sharing,
)
from tests.work import instructions

LLAMA_8B = Heads(heads=32, kv_heads=8, head_dim=128)


def test_a_long_run_is_worth_sharing_unless_it_has_one_reader() -> None:
    members = np.array([1, 2, 16, 256], np.int32)
    tokens = np.full(4, 2000, np.int32)
    assert worth_sharing(H200, LLAMA_8B, members, tokens).tolist() == [False, True, True, True]


def test_a_page_for_two_is_not_worth_a_span() -> None:
    answer = worth_sharing(H200, LLAMA_8B, np.array([2], np.int32), np.array([16], np.int32))
    assert answer.tolist() == [False]


def test_runs_that_save_less_than_a_merge_costs_are_not_shared() -> None:
    """On an H200 (52 heads, batch 16), sharing a prompt of 64 tokens is 0.83 times as fast as not
    sharing it; for 512 tokens, 2.0 times."""
    model = Heads(heads=52, kv_heads=52, head_dim=128)
    members = np.array([16], np.int32)
    assert not worth_sharing(H200, model, members, np.array([64], np.int32)).any()
    assert worth_sharing(H200, model, members, np.array([512], np.int32)).all()


def test_arithmetic_bounds_a_run_with_very_many_readers() -> None:
    """Reading once does not help beyond the point where computing takes longer than reading."""
    members, tokens = np.array([4096], np.int32), np.array([8192], np.int32)
    compute_s = 4096 * 8192 * LLAMA_8B.pair_flops / H200.flops_per_s
    assert shared_s(H200, LLAMA_8B, members, tokens)[0] == pytest.approx(compute_s, rel=0.2)
    speedup = unshared_s(H200, LLAMA_8B, members, tokens) / shared_s(
        H200, LLAMA_8B, members, tokens
    )
    assert 1 < speedup[0] < 100


def test_deciding_for_a_thousand_runs_takes_no_more_python_than_for_ten() -> None:
    def work(count: int) -> int:
        members, tokens = np.full(count, 4, np.int32), np.full(count, 500, np.int32)
        return instructions(lambda: worth_sharing(H200, LLAMA_8B, members, tokens))

    assert work(1000) < work(10) + 100


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    return tmp_path


def test_calibrated_values_override_the_built_in_ones(cache: Path) -> None:
    assert card_for("NVIDIA H200") == H200
    assert card_for("cpu") == GENERIC_CPU
    measured = replace(H200, bytes_per_s=1e12)
    CARDS.save("NVIDIA H200", measured)
    CARDS.save("cpu", replace(GENERIC_CPU, flops_per_s=1.0))
    assert card_for("NVIDIA H200") == measured
    assert card_for("cpu").flops_per_s == 1.0


def test_an_unknown_card_is_estimated_from_its_name(cache: Path) -> None:
    assert measured_card("NVIDIA H100 80GB HBM3") is None
    h100, other = card_for("NVIDIA H100 80GB HBM3"), card_for("Some GPU")
    assert H200.bytes_per_s > h100.bytes_per_s > other.bytes_per_s
    assert h100.name == "NVIDIA H100 80GB HBM3"
    # the estimate for a card that was also measured is close
    assert 0.9 < 0.9 * DATASHEETS["H200"][0] / H200.bytes_per_s < 1.1
    assert 0.9 < DATASHEETS["H200"][1] * 2 / 3 / H200.flops_per_s < 1.1


@pytest.mark.parametrize("text", ["", "[]", '{"cpu": {"name": "cpu"}}', '{"cpu": 3}'])
def test_the_error_names_a_damaged_file_of_cards(cache: Path, text: str) -> None:
    (cache / "cards.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cards\.json"):
        card_for("cpu")


def test_a_step_at_full_speed_hides_the_reading_of_weights() -> None:
    tokens = full_speed_tokens(H200)
    assert tokens == 4096
    flops_s = 2 * tokens / H200.flops_per_s  # per weight
    assert 2 / H200.bytes_per_s <= flops_s / 20
    assert 2 / H200.bytes_per_s > flops_s / 40, "the step is twice as large as necessary"
