"""rope_append: rotate queries and keys, write K and V into pages."""

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.kernels import LayoutError, rope_append  # noqa: E402
from mainstem.kernels.dense.head_norms import HeadNorms, norm_heads_  # noqa: E402
from mainstem.kernels.dense.norms import Norm  # noqa: E402
from mainstem.kernels.memory import reference  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("dim", "half"), [(64, 32), (80, 40), (80, 16), (96, 48), (256, 128), (256, 32), (80, 24)]
)
def test_rope_append_agrees_with_the_reference(dim: int, half: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 6 + 2 + 2, dim)  # views of one projection, as a model has them
    q, k, v = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    k_pages, v_pages = torch.zeros(3, 2, 16, dim), torch.zeros(3, 2, 16, dim)
    positions = torch.tensor([0, 7, 1000, 40_000, 3], dtype=torch.int32)
    slots = torch.tensor([47, 0, 16, 31, 5])
    inv_freq = 10000.0 ** (-torch.arange(half).float() / half)
    right_q = reference.rope(q, positions, inv_freq)
    right_k, right_v = reference.append(
        k_pages, v_pages, reference.rope(k, positions, inv_freq), v, slots
    )
    old_k, old_v = k.clone(), v.clone()
    rope_append(q, k, v, k_pages, v_pages, positions, slots, inv_freq)
    assert torch.allclose(q, right_q, atol=1e-4)
    assert torch.allclose(k_pages, right_k, atol=1e-4)
    assert torch.equal(v_pages, right_v)
    assert torch.equal(k, old_k)
    assert torch.equal(v, old_v)


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (80, 16), (96, 0)])
def test_keys_are_shifted_after_their_rotation(dim: int, half: int) -> None:
    torch.manual_seed(0)
    qkv, positions = torch.randn(3, 4 + 3 + 3, dim), torch.tensor([9, 1000, 11])
    slots, shift = torch.tensor([17, -1, 2]), torch.randn(3, dim) * 300
    inv_freq = 10000.0 ** (-torch.arange(half).float() / half) if half else None
    pages = torch.zeros(4, 2, 3, 16, dim)
    found = []
    for k_pages, v_pages, less in ((*pages[:2], None), (*pages[2:], shift)):
        heads = qkv.clone()
        q, k, v = heads[:, :4], heads[:, 4:7], heads[:, 7:]
        rope_append(q, k, v, k_pages, v_pages, positions, slots, inv_freq, shift=less)
        found.append(q)
    written = slots[slots >= 0]
    plain, shifted = (keys[written // 16, :, written % 16] for keys in (pages[0], pages[2]))
    assert torch.allclose(shifted, plain - shift, atol=1e-4)
    assert torch.equal(pages[1], pages[3])
    assert torch.equal(*found)
    with pytest.raises(LayoutError, match="shift"):
        rope_append(q, k, v, pages[0], pages[1], positions, slots, inv_freq, shift=shift[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_heads_of_a_product_are_normed_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 7, 80).to(dtype)
    before, gain = qkv.clone(), torch.randn(80)
    norm_heads_(qkv[:, 2:5], Norm(gain, 1e-5))
    wide = before[:, 2:5].float()
    right = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(qkv[:, 2:5], right.to(dtype), rtol=limit, atol=limit)
    assert torch.equal(qkv[:, [0, 1, 5, 6]], before[:, [0, 1, 5, 6]])
    with pytest.raises(LayoutError, match="gain"):
        norm_heads_(qkv, Norm(gain[:8], 1e-5))


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 40), (80, 16), (96, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_are_normed_before_they_are_rotated(dim: int, half: int, dtype: torch.dtype) -> None:
    """The result is that of a norm followed by a rope, for all heads and also for the padding
    token; values are not normed."""
    torch.manual_seed(0)
    qkv = torch.randn(3, 5 + 2 + 2, dim).to(dtype) + 1
    gains = [torch.randn(dim).to(dtype) for _ in range(2)]
    norms = HeadNorms(Norm(gains[0], 1e-5), Norm(gains[1], 1e-5))
    positions, slots = torch.tensor([9, 1000, 11]), torch.tensor([17, -1, 2])
    inv_freq = 10000.0 ** (-torch.arange(half).float() / half) if half else None

    right = qkv.float()
    right = right * (right.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    right = right.to(dtype)
    right_q, right_k = (right[:, :5] * gains[0]), (right[:, 5:7] * gains[1])
    pages = [torch.zeros(2, 2, 16, dim, dtype=dtype) for _ in range(4)]
    views = right_q.clone(), right_k.clone(), qkv[:, 7:].clone()
    rope_append(*views, pages[0], pages[1], positions, slots, inv_freq)

    values = qkv[:, 7:].clone()
    rope_append(
        qkv[:, :5], qkv[:, 5:7], qkv[:, 7:], pages[2], pages[3], positions, slots, inv_freq, norms
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(qkv[:, :5], views[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pages[2], pages[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(pages[3], pages[1])
    assert torch.equal(qkv[:, 7:], values)


@pytest.mark.parametrize("dim", [64, 80])
def test_without_frequencies_keys_are_appended_unchanged(dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 3 + 2 + 2, dim)
    before = qkv.clone()
    q, k, v = qkv[:, :3], qkv[:, 3:5], qkv[:, 5:]
    k_pages, v_pages = torch.zeros(2, 2, 16, dim), torch.zeros(2, 2, 16, dim)
    positions, slots = torch.tensor([9, 10, 11]), torch.tensor([17, -1, 2])
    kept = [0, 2]
    right = reference.append(k_pages, v_pages, k[kept], v[kept], slots[kept])
    rope_append(q, k, v, k_pages, v_pages, positions, slots, None)
    assert torch.equal(k_pages, right[0])
    assert torch.equal(v_pages, right[1])
    assert torch.equal(qkv, before)


def test_a_token_with_a_negative_slot_is_not_written() -> None:
    q, kv = torch.ones(2, 2, 64), torch.ones(2, 1, 64)
    k_pages, v_pages = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 16, 64)
    slots = torch.tensor([-1, 3])
    rope_append(q, kv, kv, k_pages, v_pages, torch.zeros(2, dtype=torch.int32), slots,
                torch.ones(32))  # fmt: skip
    assert float(v_pages.sum()) == 64
    assert (v_pages[0, 0, 3] == 1).all()


def test_rope_append_names_the_argument_that_it_refuses() -> None:
    q, kv, pages = torch.ones(2, 2, 64), torch.ones(2, 1, 64), torch.zeros(1, 1, 16, 64)
    positions, slots, freq = torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(32)
    with pytest.raises(LayoutError, match="v is"):
        rope_append(q, kv, kv.half(), pages, pages, positions, slots, freq)
    with pytest.raises(LayoutError, match="slots"):
        rope_append(q, kv, kv, pages, pages, positions, slots.int(), freq)
    with pytest.raises(LayoutError, match="inv_freq"):
        rope_append(q, kv, kv, pages, pages, positions, slots, torch.ones(33))
    norm = Norm(torch.ones(64), 1e-5)
    for norms, match in (
        (HeadNorms(norm, Norm(torch.ones(32), 1e-5)), "k_gain"),
        (HeadNorms(norm, Norm(torch.ones(64).half(), 1e-5)), "one dtype"),
        (HeadNorms(*[Norm(norm.gain, 1e-5, is_layer=True)] * 2), "RMS norms"),
    ):
        with pytest.raises(LayoutError, match=match):
            rope_append(q, kv, kv, pages, pages, positions, slots, freq, norms)
