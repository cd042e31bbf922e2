# ruff: noqa: PLR0917
"""The operations of recurrent layers token by token, in float64: slow and plain. The kernels are
tested against them. They share no code with the kernels, but have the same arguments, of which they
too write `out` and the states. With float64 tensors nothing is rounded."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mainstem.kernels.recurrent.segments import Segments


def _tokens(segments: Segments, states: Tensor) -> Iterator[tuple[Tensor, int, int | None]]:
    """Yield each token: its sequence's state (for the caller to change), its index, and the slot to
    write the state to after it, if any."""
    starts, reads = segments.starts.tolist(), segments.reads.tolist()
    bounds = segments.seq_segments.tolist()
    kept = states.double()  # old states: none of them is changed here
    if kept is states:
        kept = states.clone()
    for seq, slot in enumerate(reads):
        state = torch.zeros_like(kept[0]) if slot < 0 else kept[slot].clone()
        for segment in range(bounds[seq], bounds[seq + 1]):
            for token in range(starts[segment], starts[segment + 1]):
                is_last = token == starts[segment + 1] - 1
                yield state, token, int(segments.writes[segment]) if is_last else None


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Segments,
    conv: Tensor,
    out: Tensor,
    activation: bool,
) -> None:
    """A causal convolution of each channel."""
    for state, token, slot in _tokens(segments, conv):
        window = torch.cat((state, x[token : token + 1].double()))
        total = (window * weight.double().T).sum(0)
        if bias is not None:
            total += bias.double()
        out[token] = silu(total) if activation else total
        state.copy_(window[1:])
        if slot is not None:
            conv[slot] = state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    segments: Segments,
    matrix: Tensor,
    out: Tensor,
) -> None:
    """The gated delta rule."""
    decay = (-a_log.double().exp() * softplus(a.double() + dt_bias.double(), threshold=50)).exp()
    beta = b.double().sigmoid()
    group = v.shape[1] // q.shape[1]
    for state, token, slot in _tokens(segments, matrix):
        for head in range(v.shape[1]):
            query, key = q[token, head // group].double(), k[token, head // group].double()
            query = query * (query.square().sum() + 1e-6).rsqrt() * q.shape[2] ** -0.5
            key = key * (key.square().sum() + 1e-6).rsqrt()
            state[head] *= decay[token, head]
            u = beta[token, head] * (v[token, head].double() - key @ state[head])
            state[head] += key[:, None] * u
            out[token, head] = query @ state[head]
        if slot is not None:
            matrix[slot] = state


def mamba_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    limits: tuple[float, float],
    segments: Segments,
    matrix: Tensor,
    out: Tensor,
) -> None:
    """The recurrence of Mamba-2."""
    wide = softplus(dt.double() + dt_bias.double(), threshold=50).clamp(*limits)
    decay = (-a_log.double().exp() * wide).exp()
    group = x.shape[1] // b.shape[1]
    for state, token, slot in _tokens(segments, matrix):
        for head in range(x.shape[1]):
            row, into = x[token, head].double(), b[token, head // group].double()
            state[head] *= decay[token, head]
            state[head] += wide[token, head] * into[:, None] * row
            read = c[token, head // group].double() @ state[head]
            out[token, head] = read + d[head].double() * row
        if slot is not None:
            matrix[slot] = state


def gated_norm(
    x: Tensor, gate: Tensor, gain: Tensor, eps: float, out: Tensor, *, group: int, gate_first: bool
) -> None:
    """An RMS norm of groups of columns, before or after the gate."""
    for row in range(len(x)):
        for start in range(0, x.shape[1], group):
            columns = slice(start, start + group)
            gains = gain if len(gain) == group else gain[columns]
            values, gates = x[row, columns].double(), silu(gate[row, columns].double())
            if gate_first:
                values = values * gates
            values = values * (values.square().mean() + eps).rsqrt() * gains.double()
            out[row, columns] = values if gate_first else values * gates
