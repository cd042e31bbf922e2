"""The least times of attention, and the speedup that RelayAttention expects."""

import numpy as np

from mainstem.core.step import Spans
from mainstem.plan.cost import Card, Heads


def span_floor_s(
    card: Card, spans: Spans, *, heads: int, kv_heads: int, head_dim: int, kv_bytes: int = 2
) -> float:
    """Return the least time of a step's attention: the time to move K, V, queries and outputs once,
    or the time of the arithmetic if that is longer. `kv_bytes` are those of a number of K or V.
    """
    model, stored = Heads(heads, kv_heads, head_dim), Heads(heads, kv_heads, head_dim, kv_bytes)
    keys = spans.key_tokens.astype(np.int64)
    num_tokens = len(np.unique(spans.query_rows))
    query_bytes = 2 * num_tokens * heads * head_dim * model.element_bytes  # queries and outputs
    moved_s = (int(keys.sum()) * stored.key_bytes + query_bytes) / card.bytes_per_s
    compute_s = span_flops(spans, heads=heads, head_dim=head_dim) / card.flops_per_s
    return max(moved_s, compute_s)


def span_flops(spans: Spans, *, heads: int, head_dim: int) -> float:
    """Return the FLOPs of a step's attention, without keys that the causal mask hides."""
    queries = np.diff(spans.query_starts).astype(np.int64)
    hidden = np.where(spans.is_causal, queries * (queries - 1) // 2, 0)
    pairs = int((queries * spans.key_tokens.astype(np.int64) - hidden).sum())
    return float(pairs * Heads(heads, heads, head_dim).pair_flops)


def relay_speedup(system_tokens: float, context_tokens: float, batch: float) -> float:
    """RelayAttention Eq. 10: the speedup of decoding if the system prompt is read once.

    Counts memory accesses per head in units of one key and value vector (K and V count as one, each
    head has its own KV). For s system and c context tokens, a plain kernel reads s + c and moves 2
    more: query and answer. Relay reads s once for a batch of b (s / b) and c, and moves 7 more:
    query and answer twice, and two inputs and one output of the fusion.
    """
    plain = system_tokens + context_tokens + 2
    relay = system_tokens / batch + context_tokens + 7
    return plain / relay
