"""rerotate: pages moved by a position difference."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.kernels import LayoutError, rerotate  # noqa: E402
from mainstem.kernels.memory import reference  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("dim", "half"), [(80, 32), (80, 16), (96, 48), (256, 128)])
def test_turned_keys_equal_keys_computed_at_the_new_position(dim: int, half: int) -> None:
    torch.manual_seed(0)
    raw, values = torch.randn(48, 2, dim), torch.randn(48, 2, dim)
    inv_freq = 10000.0 ** (-torch.arange(half).float() / half)
    positions = torch.arange(48)
    k = reference.rope(raw, positions, inv_freq)
    k_pages, v_pages = torch.zeros(5, 2, 16, dim), torch.zeros(5, 2, 16, dim)
    k_pages, v_pages = reference.append(k_pages, v_pages, k, values, positions)
    source, target = torch.tensor([1, 2]), torch.tensor([4, 2])
    rerotate(k_pages, v_pages, source, target, torch.tensor([-16, 5]), inv_freq)
    moved = reference.rope(raw[16:32], positions[16:32] - 16, inv_freq).transpose(0, 1)
    assert torch.allclose(k_pages[4], moved, atol=1e-5)
    moved = reference.rope(raw[32:], positions[32:] + 5, inv_freq).transpose(0, 1)
    assert torch.allclose(k_pages[2], moved, atol=1e-5)
    assert torch.equal(v_pages[4], v_pages[1])
    assert torch.equal(k_pages[1], k[16:32].transpose(0, 1))


def test_without_frequencies_pages_move_as_they_are() -> None:
    torch.manual_seed(0)
    k_pages, v_pages = torch.randn(4, 2, 16, 80), torch.randn(4, 2, 16, 80)
    right = [pages[[0, 1, 2, 0]].clone() for pages in (k_pages, v_pages)]
    source, target = torch.tensor([0, 2]), torch.tensor([3, 2])
    rerotate(k_pages, v_pages, source, target, torch.tensor([-16, 5]), None)
    assert torch.equal(k_pages, right[0])
    assert torch.equal(v_pages, right[1])


def test_rerotate_names_the_argument_that_it_refuses() -> None:
    pages, ids = torch.zeros(2, 2, 16, 64), torch.tensor([0])
    with pytest.raises(LayoutError, match="one length"):
        rerotate(pages, pages, ids, torch.tensor([0, 1]), ids, torch.ones(32))
    with pytest.raises(LayoutError, match="contiguous"):
        rerotate(pages.transpose(1, 2), pages.transpose(1, 2), ids, ids, ids, torch.ones(32))
