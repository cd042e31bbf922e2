"""The reference implementations, compared with formulas that they do not use."""

import torch

from mainstem.kernels.attention import reference
from mainstem.kernels.dense.reference import gated, layer_norm, rms_norm
from mainstem.kernels.memory.reference import append, rope
from tests.runner.steps import make_spans


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_one_causal_span_is_scaled_dot_product_attention() -> None:
    q, k, v = randn(7, 4, 8), randn(2, 2, 4, 8, seed=1), randn(2, 2, 4, 8, seed=2)
    spans = make_spans([(list(range(7)), [1, 0], 7, True)])
    out, lse = reference.span_attention(q, k, v, spans, 8**-0.5)
    keys, values = (x[[1, 0]].transpose(0, 1).reshape(2, 8, 8)[:, :7] for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    first = (q[0] @ keys.repeat_interleave(2, 0)[:, 0].T).diagonal() * 8**-0.5
    torch.testing.assert_close(lse[0], first)  # the first query sees one key: lse is its score


def test_splitting_a_span_changes_nothing() -> None:
    q, k, v = randn(2, 4, 8), randn(4, 2, 4, 8, seed=1), randn(4, 2, 4, 8, seed=2)
    whole = make_spans([([0, 1], [0, 1, 2, 3], 15, False)])
    cut = make_spans([([0, 1], [2, 3], 7, False), ([1, 0], [0, 1], 8, False)])
    for a, b in zip(
        reference.span_attention(q, k, v, whole, 0.3),
        reference.span_attention(q, k, v, cut, 0.3),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_merge_of_nothing_with_nothing_is_zero() -> None:
    out, lse = torch.ones(1, 2, 4), torch.full((1, 2), float("-inf"))
    merged, merged_lse = reference.merge(out, lse, out, lse)
    assert torch.equal(merged, torch.zeros(1, 2, 4))
    assert bool(merged_lse.isinf().all())


def test_merge_of_an_lse_spread_of_80_does_not_overflow() -> None:
    small, large = torch.full((1, 1), -40.0), torch.full((1, 1), 40.0)
    merged, lse = reference.merge(torch.ones(1, 1, 2), small, torch.zeros(1, 1, 2), large)
    assert float(merged.abs().max()) < 1e-30
    assert float(lse) == 40.0


def test_the_output_of_a_token_in_no_span_is_zero() -> None:
    spans = make_spans([([1], [0], 2, False)])
    out, lse = reference.span_attention(
        randn(2, 2, 4), randn(1, 1, 4, 4), randn(1, 1, 4, 4), spans, 1.0
    )
    assert torch.equal(out[0], torch.zeros(2, 4))
    assert bool(lse[0].isinf().all())


def test_rope_keeps_lengths_and_depends_on_distance_only() -> None:
    inv_freq = torch.tensor([1.0, 0.1])
    q, k = randn(1, 1, 6), randn(1, 1, 6, seed=1)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rope(x, torch.tensor([position]), inv_freq)

    torch.testing.assert_close(turned(q, 9).norm(), q.norm())
    near, far = (float((turned(q, p + 3) * turned(k, p)).sum()) for p in (0, 50))
    assert abs(near - far) < 1e-4
    assert torch.equal(turned(q, 5)[..., 4:], q[..., 4:])  # only a part of the dims is rotated


def test_append_writes_only_its_slots() -> None:
    k, v = randn(3, 2, 4, 8), randn(3, 2, 4, 8, seed=1)
    new_k, new_v = randn(2, 2, 8, seed=2), randn(2, 2, 8, seed=3)
    before = k.clone()
    k_after, v_after = append(k, v, new_k, new_v, torch.tensor([9, 2]))
    assert torch.equal(k, before)
    assert torch.equal(k_after[2, :, 1], new_k[0])
    assert torch.equal(v_after[0, :, 2], new_v[1])
    assert int((k_after != k).any(dim=-1).sum()) == 4


def test_norms_and_the_gated_unit_agree_with_torch() -> None:
    x, gain = randn(3, 8), randn(8, seed=1)
    expected = torch.nn.functional.rms_norm(x, (8,), gain, 1e-5)
    torch.testing.assert_close(rms_norm(x, gain, 1e-5), expected)
    expected = torch.nn.functional.layer_norm(x, (8,), gain, x[0], 1e-5)
    torch.testing.assert_close(layer_norm(x, gain, x[0], 1e-5), expected)
    expected = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    torch.testing.assert_close(gated(x, "silu"), expected)
