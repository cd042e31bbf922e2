# ruff: noqa: PLR0917
"""The operations of recurrent layers token by token, in float64: slow and plain. The kernels are
tested against them. They share no code with the kernels, but have the same arguments, of which they
too write `out` and the states. With float64 tensors nothing is rounded."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mainstem.kernels.recurrent.rows import LayerRows
from mainstem.kernels.recurrent.segments import Segments


class _Place(NamedTuple):
    """Where a token's row is written."""

    slot: int
    row: int


class _Token(NamedTuple):
    state: Tensor  # of the token's sequence, for the caller to change
    number: int
    write: int | None  # slot to write the state to after the token, if any
    row: _Place | None


def _row_places(segments: Segments) -> list[tuple[int, int]]:
    """Row slot and count of each sequence."""
    if segments.rows is None:
        return [(-1, 0)] * segments.num_seqs
    counts = segments.rows.counts.tolist()
    return list(zip(segments.rows.slots.tolist(), counts, strict=False))[: segments.num_seqs]


def _tokens(
    segments: Segments, states: Tensor, with_rows: Callable[[Tensor, int, int], Tensor]
) -> Iterator[_Token]:
    """Yield each token. `with_rows` returns a state after the rows in a slot, whose number it is
    told."""
    starts, reads = segments.starts.tolist(), segments.reads.tolist()
    bounds = segments.seq_segments.tolist()
    kept = states.double()  # old states: none of them is changed here
    if kept is states:
        kept = states.clone()
    places = _row_places(segments)
    for seq, slot in enumerate(reads):
        state = torch.zeros_like(kept[0]) if slot < 0 else kept[slot].clone()
        row_slot, count = places[seq]
        if count:
            state = with_rows(state, row_slot, count)
        for segment in range(bounds[seq], bounds[seq + 1]):
            for token in range(starts[segment], starts[segment + 1]):
                write = int(segments.writes[segment])
                is_written = token == starts[segment + 1] - 1 and write >= 0
                row = None if row_slot < 0 or is_written else _Place(row_slot, count)
                yield _Token(state, token, write if is_written else None, row)
                count += 1


class _Rows:
    """Rows of a layer in float64."""

    def __init__(self, rows: LayerRows | None) -> None:
        self._rows = rows

    def with_rows(self, state: Tensor, slot: int, count: int) -> Tensor:
        """A state [heads, keys, values] after the rows of a slot."""
        assert self._rows is not None
        group = len(state) // self._rows.keys.shape[1]
        state = state * self._rows.sums[slot, :, count - 1, None, None].double().exp()
        for head in range(len(state)):
            sums = self._rows.sums[slot, head, :count].double()
            keys = self._rows.keys[slot, head // group, :count].double()
            values = self._rows.values[slot, head, :count].double()
            state[head] += (keys * (sums[-1] - sums).exp()[:, None]).T @ values
        return state

    def write(self, row: _Place | None, head: int, key_head: int, token: "_Row") -> None:
        """Write a head's part of a row."""
        if row is None:
            return
        assert self._rows is not None
        slot, index = row
        before = self._rows.sums[slot, head, index - 1] if index else 0.0
        self._rows.sums[slot, head, index] = before + token.log
        self._rows.keys[slot, key_head, index] = token.key
        self._rows.values[slot, head, index] = token.value


class _Row(NamedTuple):
    key: Tensor
    value: Tensor
    log: Tensor  # of the token's decay


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Segments,
    conv: Tensor,
    out: Tensor,
    activation: bool,
    rows: LayerRows | None = None,
) -> None:
    """A causal convolution of each channel."""

    def from_rows(state: Tensor, slot: int, count: int) -> Tensor:
        assert rows is not None
        return rows.conv[slot].double()

    for state, token, slot, row in _tokens(segments, conv, from_rows):
        window = torch.cat((state, x[token : token + 1].double()))
        total = (window * weight.double().T).sum(0)
        if bias is not None:
            total += bias.double()
        out[token] = silu(total) if activation else total
        state.copy_(window[1:])
        if slot is not None:
            conv[slot] = state
        elif row is not None:
            assert rows is not None
            rows.conv[row.slot] = state


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
    rows: LayerRows | None = None,
) -> None:
    """The gated delta rule."""
    logs = -a_log.double().exp() * softplus(a.double() + dt_bias.double(), threshold=50)
    wide_rows = _Rows(rows)
    beta = b.double().sigmoid()
    group = v.shape[1] // q.shape[1]
    for state, token, slot, row in _tokens(segments, matrix, wide_rows.with_rows):
        for head in range(v.shape[1]):
            query, key = q[token, head // group].double(), k[token, head // group].double()
            query = query * (query.square().sum() + 1e-6).rsqrt() * q.shape[2] ** -0.5
            key = key * (key.square().sum() + 1e-6).rsqrt()
            state[head] *= logs[token, head].exp()
            u = beta[token, head] * (v[token, head].double() - key @ state[head])
            state[head] += key[:, None] * u
            out[token, head] = query @ state[head]
            wide_rows.write(row, head, head // group, _Row(key, u, logs[token, head]))
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
    rows: LayerRows | None = None,
) -> None:
    """The recurrence of Mamba-2."""
    wide = softplus(dt.double() + dt_bias.double(), threshold=50).clamp(*limits)
    logs = -a_log.double().exp() * wide
    wide_rows = _Rows(rows)
    group = x.shape[1] // b.shape[1]
    for state, token, slot, row in _tokens(segments, matrix, wide_rows.with_rows):
        for head in range(x.shape[1]):
            value, key = x[token, head].double(), b[token, head // group].double()
            state[head] *= logs[token, head].exp()
            u = wide[token, head] * value
            state[head] += key[:, None] * u
            read = c[token, head // group].double() @ state[head]
            out[token, head] = read + d[head].double() * value
            wide_rows.write(row, head, head // group, _Row(key, u, logs[token, head]))
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
