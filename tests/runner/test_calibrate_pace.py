"""The costs of a card are fitted to times of steps: known constants are found again."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mainstem import kernels
from mainstem.cli import calibrate as command
from mainstem.core.errors import ConfigError
from mainstem.core.step import Spans
from mainstem.kernels.attention import tuning
from mainstem.kernels.attention.shape import Shape
from mainstem.kernels.attention.tuning import FITTED, Pace, fitted_name, with_fitted_pace
from mainstem.plan.cost import H200
from mainstem.runner import calibrate
from mainstem.runner.calibrate_pace import StepUs, fit_pace

pytestmark = pytest.mark.torch

NUMBERS = (
    "large_us", "large_key_us", "small_us", "small_key_us", "reads", "merge_us", "launch_us",
)  # fmt: skip
SLOW = Pace(
    large_us=9.0, large_key_us=0.05, small_us=2.5, small_key_us=0.03, reads=1500.0, merge_us=0.003,
)  # fmt: skip
LAUNCH_US = 5.5


def _clock(pace: Pace, shape: Shape, noise: float = 0.0) -> StepUs:
    """A simulated card: a step takes the time of its rounds of units, or of its reads if longer."""
    rng = random.Random(0)

    def step_us(spans: Spans) -> float:
        rows, keys = int(spans.query_starts[1]) * shape.group, int(spans.key_tokens[0])
        is_large = rows > shape.small.rows
        kind = shape.large if is_large else shape.small
        units, slots = len(spans) * -(-rows // kind.rows) * kind.units, kind.slots
        if is_large:
            unit_us = pace.large_us + pace.large_key_us * keys
        else:
            unit_us = pace.small_us + pace.small_key_us * keys * shape.fold
        moved = min(len(np.unique(spans.page_ids)) * 16, len(spans) * keys) * shape.kv_heads
        us = LAUNCH_US + max(-(-units // slots) * unit_us, moved / pace.reads)
        if is_large and shape.tiles.is_split:
            us += pace.launch_us
        if len(np.unique(spans.query_rows)) < len(spans.query_rows):
            us += pace.merge_us * len(spans.query_rows) * shape.group * shape.kv_heads
        return us * rng.uniform(1.0 - noise, 1.0 + noise)

    return step_us


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    ("tiles", "pace", "programs"),
    [
        (tuning.HOPPER_SPLIT, tuning.HOPPER_SPLIT.pace, 264),
        (tuning.HOPPER_SPLIT, replace(SLOW, launch_us=6.0), 264),
        (tuning.FALLBACK, SLOW, 142),
        (tuning.FALLBACK, replace(SLOW, large_us=30.0, small_us=6.0), 58),
    ],
)
def test_known_constants_are_fitted_back(
    tiles: tuning.Tiles, pace: Pace, programs: int, noise: float
) -> None:
    """If times are off by up to 1 %, the constants are off by at most 9 %."""
    shape = Shape(4, 8, 16, num_programs=programs, tiles=replace(tiles, pace=Pace(yields=0.3)))
    fitted = fit_pace(_clock(pace, shape, noise), shape)
    for name in NUMBERS:
        right = getattr(pace, name)
        assert getattr(fitted, name) == pytest.approx(right, rel=0.01 + 8 * noise, abs=0.01), name
    assert fitted.yields == 0.3, "a field that is not fitted keeps its value"


CARD = torch.device("cuda")
NAME = "NVIDIA L40S"


@pytest.fixture
def _untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untuned card, and an empty cache folder."""
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: NAME)


@pytest.mark.usefixtures("_untuned")
def test_an_untuned_card_uses_the_fitted_costs() -> None:
    tiles = tuning.choose_tiles(CARD, torch.bfloat16, 128, can_split=True)
    assert tiles == tuning.FALLBACK
    assert with_fitted_pace(tiles, CARD, 128) is tiles
    FITTED.save(fitted_name(NAME, 128), replace(tiles, pace=SLOW))
    FITTED.save(fitted_name("another", 128), replace(tiles, pace=Pace()))
    assert with_fitted_pace(tiles, CARD, 128) == replace(tuning.FALLBACK, pace=SLOW)
    assert with_fitted_pace(tiles, CARD, 64) is tiles


@pytest.mark.usefixtures("_untuned")
def test_a_pace_of_other_tiles_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    fitted = replace(tuning.FALLBACK, large_k=64, pace=SLOW)
    FITTED.save(fitted_name(NAME, 128), fitted)
    assert with_fitted_pace(tuning.FALLBACK, CARD, 128) is tuning.FALLBACK
    assert "NVIDIA L40S, head_dim 128" in caplog.text
    assert "other tiles; run `mainstem calibrate` again" in caplog.text


@pytest.mark.usefixtures("_untuned")
def test_each_head_dim_is_saved_as_soon_as_it_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one fails; the first is kept, with the tiles that it was fitted for."""

    def fit_two(_: calibrate.Probe) -> Iterator[tuple[str, tuning.Tiles]]:
        yield fitted_name(NAME, 64), replace(tuning.FALLBACK, pace=SLOW)
        raise RuntimeError("the card was lost")

    monkeypatch.setattr(command, "present_device", lambda: probe_of(NAME))
    monkeypatch.setattr(command, "measure", lambda _: replace(H200, name=NAME))
    monkeypatch.setattr(command, "measure_tiles", fit_two)
    with pytest.raises(RuntimeError, match="the card was lost"):
        command.main([])
    assert FITTED.load() == {fitted_name(NAME, 64): replace(tuning.FALLBACK, pace=SLOW)}


def probe_of(name: str) -> calibrate.Probe:
    return calibrate.Probe(
        CARD, name, calibrate.GPU_HEADS, torch.bfloat16, lambda _: 1.0, 1, 1, 284, 128
    )


@pytest.mark.usefixtures("_untuned")
def test_a_calibration_begins_from_the_built_in_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise fields that cannot be fitted would keep the values of an earlier version."""
    earlier = replace(tuning.FALLBACK, pace=replace(SLOW, apart=0.9))
    FITTED.save(fitted_name(NAME, 128), earlier)
    taken: list[object] = []
    monkeypatch.setattr(
        kernels, "SpanAttention", lambda **options: taken.append(options.get("tiles"))
    )
    calibrate._make_attention(probe_of(NAME), 1, 1)
    assert taken == [tuning.FALLBACK]


@pytest.mark.usefixtures("_untuned")
def test_the_tuned_card_keeps_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: tuning.TUNED_CARD)
    tiles = tuning.HOPPER_SPLIT
    FITTED.save(fitted_name(tuning.TUNED_CARD, 128), replace(tiles, pace=SLOW))
    assert with_fitted_pace(tiles, CARD, 128) is tiles


def _record(**changed: object) -> str:
    return _file({**asdict(tuning.FALLBACK), "pace": {**asdict(SLOW), **changed}})


def _file(record: object) -> str:
    return json.dumps({fitted_name(NAME, 128): record})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '["a"]',
        _record(speed=3),
        _record(small_us="fast"),
        _record(small_us=None),
        _record(small_us=-1.0),
        _record(small_us=float("nan")),
        _record(small_us=float("inf")),
        _record(reads=0.0),
        _file({**asdict(tuning.FALLBACK), "pace": {"small_us": 2.5}}),  # lacks numbers
        _file({"pace": asdict(SLOW)}),  # does not say for which tiles
        _file({"128": asdict(SLOW)}),
    ],
)
def test_a_broken_file_is_refused_and_not_overwritten(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    FITTED.path.write_text(text)
    broken = r"paces\.json: not a file of this version's `mainstem calibrate`"
    with pytest.raises(ConfigError, match=broken):
        FITTED.load()
    with pytest.raises(ConfigError, match=broken):
        FITTED.save(fitted_name("another", 128), tuning.FALLBACK)
    assert FITTED.path.read_text() == text


@pytest.mark.usefixtures("_untuned")
def test_every_field_is_saved() -> None:
    FITTED.save(fitted_name("card", 256), tuning.HOPPER_SPLIT)
    assert FITTED.load() == {fitted_name("card", 256): tuning.HOPPER_SPLIT}
