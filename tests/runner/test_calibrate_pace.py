"""The costs of a card are fitted to times of steps: known constants are found again."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mainstem import kernels
from mainstem.core.errors import ConfigError
from mainstem.core.step import Spans
from mainstem.kernels.attention import tuning
from mainstem.kernels.attention.pace import Pace, paces_path, save_paces, saved_paces
from mainstem.kernels.attention.shape import Shape
from mainstem.runner import calibrate
from mainstem.runner.calibrate_pace import StepUs, fit_pace

pytestmark = pytest.mark.torch

FITTED = (
    "large_us", "large_key_us", "small_us", "small_key_us", "reads", "merge_us", "launch_us",
)  # fmt: skip
SLOW = Pace(
    large_us=9.0, large_key_us=0.05, small_us=2.5, small_key_us=0.03, reads=1500.0, merge_us=0.003,
)  # fmt: skip
LAUNCH_US = 5.5


def _clock(pace: Pace, shape: Shape, noise: float = 0.0) -> StepUs:
    """A made-up card: the time of rounds of equal units, or that of its memory if it is longer."""
    rng = random.Random(0)

    def step_us(spans: Spans) -> float:
        rows, keys = int(spans.query_starts[1]) * shape.group, int(spans.key_tokens[0])
        is_large = rows > shape.most_small_rows
        tile = shape.tiles.large_q if is_large else shape.most_small_rows
        units = len(spans) * -(-rows // tile) * shape.units(is_large)
        slots = shape.num_large_programs if is_large else shape.num_programs
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
    """Times that are off by 1 % give constants that are off by a few times that."""
    shape = Shape(4, 8, 16, num_programs=programs, tiles=replace(tiles, pace=Pace(yields=0.3)))
    fitted = fit_pace(_clock(pace, shape, noise), shape)
    for name in FITTED:
        right = getattr(pace, name)
        assert getattr(fitted, name) == pytest.approx(right, rel=0.01 + 8 * noise, abs=0.01), name
    assert fitted.yields == 0.3, "not fitted, so as it was"


def test_an_untuned_card_uses_what_was_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.version, "hip", None)
    card, name = torch.device("cuda"), "NVIDIA L40S"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    before = tuning.choose_tiles(card, torch.bfloat16, 128, can_split=True)
    assert before == tuning.FALLBACK
    save_paces(name, {128: SLOW})
    save_paces("another", {128: Pace()})
    assert saved_paces(name) == {128: SLOW}
    after = tuning.choose_tiles(card, torch.bfloat16, 128, can_split=True)
    assert after == replace(tuning.FALLBACK, pace=SLOW)
    assert tuning.choose_tiles(card, torch.bfloat16, 64, can_split=True) == tuning.FALLBACK
    assert tuning.choose_tiles(card, torch.float32, 128, can_split=True) == tuning.WIDE_ELEMENTS


def test_a_calibration_begins_from_the_built_in_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise fields that cannot be fitted would keep the values of an earlier version."""
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    save_paces("NVIDIA L40S", {128: replace(SLOW, apart=0.9)})
    probe = calibrate.Probe(
        torch.device("cuda"), "NVIDIA L40S", calibrate.GPU_HEADS, torch.bfloat16,
        lambda _: 1.0, 1, 1, 284, 128,
    )  # fmt: skip
    taken: list[tuning.Tiles] = []

    def take_tiles(
        *_: object, device: torch.device, dtype: torch.dtype, head_dim: int, **options: object
    ) -> None:
        tiles = options.get("tiles")
        chosen = tuning.choose_tiles(device, dtype, head_dim, can_split=True)
        taken.append(tiles if isinstance(tiles, tuning.Tiles) else chosen)

    monkeypatch.setattr(kernels, "SpanAttention", take_tiles)
    calibrate._make_attention(probe, 1, 1)
    assert taken == [tuning.FALLBACK]


def test_the_tuned_card_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: tuning.TUNED_CARD)
    monkeypatch.setattr(torch.version, "hip", None)
    save_paces(tuning.TUNED_CARD, {128: SLOW})
    tiles = tuning.choose_tiles(torch.device("cuda"), torch.bfloat16, 128, can_split=True)
    assert tiles is tuning.HOPPER_SPLIT


def _record(**changed: object) -> str:
    return json.dumps({"NVIDIA L40S": {"128": {**asdict(SLOW), **changed}}})


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
        '{"NVIDIA L40S": {"128": {"small_us": 2.5}}}',  # lacks numbers that this version has
    ],
)
def test_a_broken_file_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    paces_path().write_text(text)
    with pytest.raises(ConfigError, match=r"paces\.json: not a file of `mainstem calibrate`"):
        saved_paces("NVIDIA L40S")


def test_every_field_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    save_paces("card", {256: Pace()})
    assert asdict(saved_paces("card")[256]) == asdict(Pace())
