"""Kernels read the fields that the planner writes."""

import pytest

pytest.importorskip("triton")

import triton.language as tl

from mainstem.kernels.attention import layout
from mainstem.kernels.attention.triton import layout as kernel_layout

pytestmark = pytest.mark.torch


def test_kernels_have_the_fields_of_the_planner() -> None:
    fields = {
        name: value.value
        for name, value in vars(kernel_layout).items()
        if isinstance(value, tl.constexpr)
    }
    assert fields
    assert fields == {name: getattr(layout, name) for name in fields}


@pytest.mark.parametrize("record", ["HEADER", "SHARE", "PIECE", "ENTRY", "MERGE", "NOTE"])
def test_no_two_fields_of_a_record_have_the_same_offset(record: str) -> None:
    fields = {name: value for name, value in vars(layout).items() if name.startswith(f"{record}_")}
    size = fields.pop(f"{record}_ROWS", None) or fields.pop(f"{record}_INTS")
    assert len(set(fields.values())) == len(fields)
    assert 0 <= min(fields.values()) <= max(fields.values()) < size


def test_first_units_fit_into_a_share() -> None:
    first_end = layout.SHARE_FIRST_LARGE + layout.PIECE_INTS
    assert first_end <= layout.SHARE_FIRST_SMALL
    assert layout.SHARE_FIRST_SMALL + layout.PIECE_INTS <= layout.SHARE_INTS


def test_notes_have_the_fields_of_a_unit_and_one_more() -> None:
    pieces = {value for name, value in vars(layout).items() if name.startswith("PIECE_")}
    assert layout.NOTE_HAS_UNIT not in pieces
    assert layout.PIECE_INTS <= layout.NOTE_INTS
