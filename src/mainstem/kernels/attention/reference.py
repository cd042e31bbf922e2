"""Attention in plain PyTorch, fp32 inside: slow, obviously right, the oracle of the kernels.

Nothing here changes its arguments or shares code with a fast kernel.

    q, out             [tokens, heads, dim]
    k_pages, v_pages   [pages, kv_heads, page_size, dim]
    lse                [tokens, heads] fp32, natural log, scale applied; -inf where nothing was seen
    sinks              [heads] fp32: each a score that takes weight and gives no value

Query head h reads KV head h // (heads / kv_heads).
"""

import torch
from torch import Tensor

from mainstem.core.step import Int32s, Spans


def span_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    spans: Spans,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    before_own_page: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of every token over all spans it lies in; zeros where it lies in none.

    With a softcap scores become softcap * tanh(score / softcap). With `before_own_page` a query of
    a causal span sees only keys on pages before its own.
    """
    tokens, heads, _ = q.shape
    own = k_pages.shape[2] if before_own_page else 1
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), device=q.device)
    for index in range(len(spans)):
        rows = _cut(spans.query_starts, spans.query_rows, index).to(q.device)
        pages = _cut(spans.page_starts, spans.page_ids, index).to(q.device)
        num_keys = int(spans.key_tokens[index])
        if len(rows) == 0 or num_keys == 0:
            continue
        part_out, part_lse = _attend(
            q[rows].float(),
            _gather(k_pages, pages, num_keys),
            _gather(v_pages, pages, num_keys),
            scale,
            softcap,
            _visible(spans, index, own).to(q.device),
        )
        out[rows], lse[rows] = merge(out[rows], lse[rows], part_out, part_lse)
    if sinks is not None:
        nothing = torch.zeros_like(out)
        out, lse = merge(out, lse, nothing, sinks.float().expand(tokens, heads))
    return out.to(q.dtype), lse


def _cut(starts: Int32s, values: Int32s, index: int) -> Tensor:
    return torch.from_numpy(values[starts[index] : starts[index + 1]].astype("int64"))


def _gather(pages: Tensor, page_ids: Tensor, num_keys: int) -> Tensor:
    """[kv_heads, num_keys, dim] fp32: the first slots of a page run."""
    kv_heads, dim = pages.shape[1], pages.shape[3]
    run = pages[page_ids].transpose(0, 1).reshape(kv_heads, -1, dim)
    assert run.shape[1] >= num_keys, "a span has more keys than its pages have slots"
    return run[:, :num_keys].float()


def _visible(spans: Spans, index: int, own: int) -> Tensor:
    """[queries, keys] of a span. A query sees keys from its first key on; in a causal span of n
    queries, query j sees keys up to num_keys - n + j, which is included (both count from 0). With
    `own` above 1, it does not see those of its own page of that size."""
    begin, end = spans.query_starts[index], spans.query_starts[index + 1]
    num_queries, num_keys = int(end - begin), int(spans.key_tokens[index])
    keys = torch.arange(num_keys)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if spans.is_causal[index]:
        last = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
        visible &= keys <= (last if own == 1 else last // own * own - 1)
    if spans.first_keys is not None:
        visible &= keys >= torch.from_numpy(spans.first_keys[begin:end].astype("int64"))[:, None]
    return visible


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """q [queries, heads, dim] over k, v [kv_heads, keys, dim]."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->qhk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("qhk,hkd->qhd", weights, v), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over keys A and B, from attention over A and over B (RelayAttention Eq. 11, 12).

    Where neither side has keys, the result is 0, not NaN.
    """
    lse = torch.logaddexp(lse_a.float(), lse_b.float())
    share_a = torch.exp(lse_a - lse).nan_to_num(0.0)[..., None]
    share_b = torch.exp(lse_b - lse).nan_to_num(0.0)[..., None]
    out = share_a * out_a.float() + share_b * out_b.float()
    return out.to(out_a.dtype), lse
