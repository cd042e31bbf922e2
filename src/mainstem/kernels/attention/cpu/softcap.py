"""Attention whose scores become cap * tanh(score / cap); returns the log-sum-exp, too.

torch's fused kernel has no softcap. Scores are computed for a few queries at a time, with all of
their keys at once.
"""

import torch
from torch import Tensor

_MAX_SCORES = 1 << 22  # held at once: 16 MB


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """q [parts, queries, heads, dim] over k, v [parts, kv_heads, keys, dim].

    Returns [parts, heads, queries, dim] and the lse [parts, heads, queries] in fp32. `mask` is
    additive, [parts or 1, 1, queries or 1, keys]; every query must see a key.
    """
    parts, queries, heads, dim = q.shape
    out = q.new_empty(parts, queries, heads, dim).transpose(1, 2)
    lse = torch.empty(parts, heads, queries, dtype=torch.float32)
    num_queries = max(1, min(queries, _MAX_SCORES // (heads * k.shape[2])))
    num_parts = max(1, _MAX_SCORES // (heads * num_queries * k.shape[2]))
    for part in range(0, parts, num_parts):
        some = slice(part, part + num_parts)
        for row in range(0, queries, num_queries):
            rows = slice(row, row + num_queries)
            shown = None if mask is None else _cut(mask, some, rows)
            found = _attend(q[some, rows], k[some], v[some], shown, scale, softcap)
            out[some, :, rows], lse[some, :, rows] = found
    return out, lse


def _cut(mask: Tensor, parts: slice, rows: slice) -> Tensor:
    if mask.shape[0] > 1:
        mask = mask[parts]
    return mask[:, :, rows] if mask.shape[2] > 1 else mask


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    parts, queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    # the heads of one KV head become rows of one matrix
    rows = q.transpose(1, 2).reshape(parts, kv_heads, -1, dim).float()
    scores = (rows @ k.float().transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    scores = scores.view(parts, heads, queries, -1)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    weights = (
        scores.sub_(lse[..., None]).exp_().view(parts, kv_heads, heads // kv_heads * queries, -1)
    )
    return (weights @ v.float()).view(parts, heads, queries, dim), lse
