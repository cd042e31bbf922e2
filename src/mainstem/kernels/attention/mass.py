"""How much attention some tokens pay to each page of their sequence, in plain PyTorch.

Attention kernels do not keep their weights, so they are computed again from queries and keys:
rarely, and for few queries.
"""

import torch
from torch import Tensor

MAX_SCORES = 1 << 24  # held at once, in fp32


def page_masses(
    q: Tensor,
    k_pages: Tensor,
    page_ids: Tensor,
    first_position: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[pages] fp32: softmax weights summed over a page's keys, all queries and all heads.

    q [queries, heads, dim] are neighbours, the first at `first_position`; k_pages
    [all pages, kv_heads, page_size, dim], of which `page_ids` hold the sequence from position 0 on.
    Queries see keys up to their own position, and with a `window` only the last `window` of these.
    """
    num_queries, num_heads, dim = q.shape
    num_pages, (_, kv_heads, page_size, _) = len(page_ids), k_pages.shape
    num_keys = num_pages * page_size
    assert num_keys >= first_position + num_queries, "keys of these queries are missing"
    places = torch.arange(num_keys, device=q.device)
    masses = torch.zeros(num_pages, device=q.device)
    group = num_heads // kv_heads
    at_once = max(1, MAX_SCORES // (group * num_keys))
    for head in range(kv_heads):  # one at a time: a long sequence's keys of all heads are large
        keys = k_pages[page_ids, head].reshape(num_keys, dim).float().T
        for first in range(0, num_queries, at_once):
            some = q[first : first + at_once].view(-1, kv_heads, group, dim)[:, head]
            at = first_position + first + torch.arange(len(some), device=q.device)[:, None]
            is_hidden = places > at
            if window is not None:
                is_hidden |= places <= at - window
            # slots after the last token were never written, and may hold anything
            scores = some.float() @ keys
            scores *= scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(is_hidden[:, None], float("-inf"))
            lse = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                sink = sinks.view(kv_heads, group)[head].float()[None, :, None]
                lse = torch.logaddexp(lse, sink)
            weights = (scores - lse).exp()
            masses += weights.sum((0, 1)).view(num_pages, page_size).sum(1)
    return masses
