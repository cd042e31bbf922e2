"""How threads are spread over a tile in fp8 that they convert to fp16."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mainstem.kernels.attention.hopper.widen import rows_by_eights

pytestmark = pytest.mark.torch

LINE = 128  # bytes of shared memory that are accessed at once; a row of a panel
CHUNK = 16  # bytes whose places in a line are swizzled
DIM = 128


def places(row: int, byte: int, count: int) -> list[int]:
    """Where bytes of a row of 128 bytes are in their line."""
    return [(at // CHUNK ^ row % 8) * CHUNK + at % CHUNK for at in range(byte, byte + count)]


def owners(head_dim: int) -> list[tuple[int, int]]:
    """The row and the first dim of each thread of a warp."""
    layout = rows_by_eights(head_dim)
    assert layout.size_per_thread == [1, 8]
    _, across = layout.threads_per_warp
    assert across * 8 == head_dim
    return [(lane // across, 8 * (lane % across)) for lane in range(32)]


def test_codes_are_loaded_without_conflicts() -> None:
    lanes = owners(DIM)
    for first in range(0, 32, LINE // 8):
        together = lanes[first : first + LINE // 8]
        taken = [place for row, dim in together for place in places(row, dim, 8)]
        assert sorted(taken) == list(range(LINE))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_are_stored_without_conflicts(head_dim: int) -> None:
    """A row has 64 dims to a panel."""
    lanes = owners(head_dim)
    for first in range(0, 32, LINE // 16):
        together = lanes[first : first + LINE // 16]
        taken = [place for row, dim in together for place in places(row, 2 * (dim % 64), 16)]
        assert sorted(taken) == list(range(LINE))
