# ruff: noqa: PLR0917
"""The operations of recurrent layers on a CPU, in fp32. Decodes are computed together. Other
sequences are computed one after the other, in tiles of up to 64 tokens: what tokens of a tile do to
each other is a matrix product, and only the state passes from tile to tile.

For the delta rule, with G_i the product of a tile's decays up to token i, and S its first state:

    u_i = beta_i (v_i - G_i k_i^T S - sum_{j<i} (G_i/G_j) (k_i . k_j) u_j)
    o_i = G_i q_i^T S + sum_{j<=i} (G_i/G_j) (q_i . k_j) u_j
    S'  = G_n S + sum_j (G_n/G_j) k_j u_j^T

The first line is a triangular system, solved for the parts of u with and without S. Mamba-2 has the
last two lines, where u is dt x, q is c and k is b. Decays are differences of sums of logarithms, in
float64: sums may be large where their differences are small.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from mainstem.kernels.recurrent.segments import TILE, Segments

STRETCH = 8 * TILE  # tokens that are computed together: few calls, little memory
BATCH_BYTES = 8 << 20  # of states of decodes that are computed together: they stay in a cache
MIN_LOG_DECAY = -120.0  # exp gives 0; less would only cost digits of sums


class _Sequence(NamedTuple):
    read: int
    bounds: list[int]  # first token of each segment, and the end of the last one
    writes: list[int]

    def state(self, states: Tensor) -> Tensor:
        """A copy of the state to start from."""
        return torch.zeros_like(states[0]) if self.read < 0 else states[self.read].clone()

    def parts(self) -> Iterator[tuple[slice, int]]:
        """Yield tokens to be computed together, and the slot to write after them or -1."""
        for start, end, write in zip(self.bounds, self.bounds[1:], self.writes, strict=False):
            for first in range(start, end, STRETCH):
                last = min(first + STRETCH, end)
                yield slice(first, last), write if last == end else -1


def _sequences(segments: Segments) -> Iterator[_Sequence]:
    """Yield the sequences that are not decodes."""
    if segments.num_decodes == segments.num_seqs:
        return
    starts, writes = segments.starts.tolist(), segments.writes.tolist()
    bounds, reads = segments.seq_segments.tolist(), segments.reads.tolist()
    for seq in range(segments.num_decodes, segments.num_seqs):
        first, end = bounds[seq], bounds[seq + 1]
        yield _Sequence(reads[seq], starts[first : end + 1], writes[first:end])


class _Decodes(NamedTuple):
    tokens: slice
    reads: Tensor
    writes: Tensor

    def states(self, states: Tensor) -> Tensor:
        """Copies of the states to start from."""
        found = states.index_select(0, self.reads.clamp(min=0))
        is_new = self.reads < 0
        if is_new.any():
            found[is_new] = 0
        return found


def _decodes(segments: Segments, states: Tensor) -> Iterator[_Decodes]:
    """Yield decodes to be computed together."""
    state_bytes = states[0].numel() * states.element_size()
    step = max(BATCH_BYTES // state_bytes, 1)
    for first in range(0, segments.num_decodes, step):
        tokens = slice(first, min(first + step, segments.num_decodes))
        yield _Decodes(tokens, segments.reads[tokens], segments.writes[tokens].long())


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Segments,
    conv: Tensor,
    out: Tensor,
    activation: bool,
) -> None:
    """Write the causal convolution of each channel of x [tokens, channels] to `out`.

    weight: [channels, kernel]; conv: [slots, kernel - 1, channels], the last inputs, oldest first.
    """
    kernel = weight.shape[1]
    taps = weight.float().t().contiguous()

    def finish(total: Tensor, tokens: slice) -> None:
        if bias is not None:
            total += bias
        out[tokens] = silu(total, inplace=True) if activation else total

    for batch in _decodes(segments, conv):
        window = torch.cat((batch.states(conv), x[batch.tokens, None]), dim=1)
        finish((window.float() * taps).sum(1), batch.tokens)
        conv.index_copy_(0, batch.writes, window[:, 1:])
    for seq in _sequences(segments):
        begin, end = seq.bounds[0], seq.bounds[-1]
        rows = torch.cat((seq.state(conv), x[begin:end]))
        wide = rows.float()
        total = wide[: end - begin] * taps[0]
        for tap in range(1, kernel):
            total.addcmul_(wide[tap : tap + end - begin], taps[tap])
        finish(total, slice(begin, end))
        for last, slot in zip(seq.bounds[1:], seq.writes, strict=True):
            conv[slot] = rows[last - begin : last - begin + kernel - 1]


def _tiled(x: Tensor, tile: int) -> Tensor:
    """[tokens, heads, *] -> [heads, tiles, tile, *], filled up with zeros."""
    missing = -len(x) % tile
    if missing:
        x = pad(x, [0, 0] * (x.dim() - 1) + [0, missing])
    return x.reshape(-1, tile, *x.shape[1:]).movedim(2, 0)


def _untiled(x: Tensor, tokens: int) -> Tensor:
    """[heads, tiles, tile, dim] -> [tokens, heads, dim]"""
    return x.movedim(0, 2).flatten(0, 1)[:tokens]


class _Decay(NamedTuple):
    """Decays within tiles: from the start to each token, from token to token (rows are the later
    ones; only the lower triangle has a meaning), from each token to the end, from start to end."""

    to: Tensor  # [heads, tiles, tile, 1]
    between: Tensor  # [heads, tiles, tile, tile]
    after: Tensor  # [heads, tiles, tile, 1]
    whole: Tensor  # [heads, tiles, 1, 1]


def _decays(logs: Tensor) -> _Decay:
    """logs: [heads, tiles, tile]"""
    total = logs.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).float().clamp_(max=0).exp_()
    end = total[..., -1:]
    to = total.float().exp()
    return _Decay(
        to[..., None], between, (end - total).float().exp()[..., None], to[..., -1:, None]
    )


def _for_heads(x: Tensor, group: int) -> Tensor:
    """[key_heads, *] -> [heads, *]: `group` heads have the same."""
    return x if group == 1 else x.repeat_interleave(group, 0)


def _times_heads(between: Tensor, products: Tensor) -> Tensor:
    """[heads, *] times [key_heads, *]"""
    of_groups = between.view(len(products), -1, *between.shape[1:])
    return (of_groups * products[:, None]).flatten(0, 1)


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


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
    """Write the output of the gated delta rule to `out` [tokens, value_heads, value_dim].

    q, k: [tokens, key_heads, key_dim], not normalised; v: like out; a, b: [tokens, value_heads],
    not activated; a_log, dt_bias: [value_heads]; matrix: [slots, value_heads, key_dim, value_dim]
    fp32.
    """
    group = v.shape[1] // q.shape[1]
    q, k = _normed(q) * q.shape[2] ** -0.5, _normed(k)
    logs = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    logs = logs.clamp_(min=MIN_LOG_DECAY)
    beta = b.float().sigmoid()
    for batch in _decodes(segments, matrix):
        states, tokens = batch.states(matrix), batch.tokens
        rows = torch.stack((k[tokens], q[tokens]), dim=2).repeat_interleave(group, 1)
        decay = logs[tokens].exp()[..., None]
        from_keys, from_queries = ((rows @ states) * decay[..., None]).unbind(2)
        u = (v[tokens] - from_keys) * beta[tokens][..., None]
        key, query = rows.unbind(2)
        out[tokens] = from_queries + (key * query).sum(-1, keepdim=True) * u
        states.mul_(decay[..., None]).addcmul_(key[..., None], u[:, :, None])
        matrix.index_copy_(0, batch.writes, states)
    for seq in _sequences(segments):
        state = seq.state(matrix)
        for tokens, slot in seq.parts():
            values = v[tokens].float()
            state = _delta_tiles(
                state, q[tokens], k[tokens], values, logs[tokens], beta[tokens], out[tokens]
            )
            if slot >= 0:
                matrix[slot] = state


def _delta_tiles(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, out: Tensor
) -> Tensor:
    """Fill `out` of some tokens of one sequence; return the state after them."""
    tile, group = min(TILE, len(q)), v.shape[1] // q.shape[1]
    q, k, v, beta = _tiled(q, tile), _tiled(k, tile), _tiled(v, tile), _tiled(beta, tile)[..., None]
    decay = _decays(_tiled(logs, tile))
    scores = _times_heads(decay.between, q @ k.mT).tril_()
    system = _times_heads(decay.between, k @ k.mT).mul_(beta)  # its upper part is not read
    q, k = _for_heads(q, group), _for_heads(k, group)
    sides = torch.cat((v * beta, k * (beta * decay.to)), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    q, k = q * decay.to, (k * decay.after).mT
    outs = torch.empty_like(v)
    for i in range(v.shape[1]):
        u = torch.baddbmm(own[:, i], of_state[:, i], state, alpha=-1)
        outs[:, i] = torch.baddbmm(q[:, i] @ state, scores[:, i], u)
        state = torch.baddbmm(state * decay.whole[:, i], k[:, i], u)
    out.copy_(_untiled(outs, len(out)))
    return state


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
    """Write the output of Mamba-2's recurrence to `out` [tokens, heads, head_dim].

    x: like out; b, c: [tokens, groups, state_dim]; dt: [tokens, heads], not activated; a_log,
    dt_bias, d: [heads]; limits: of dt; matrix: [slots, heads, state_dim, head_dim] fp32.
    """
    group = x.shape[1] // b.shape[1]
    dt = softplus(dt.float() + dt_bias.float()).clamp_(*limits)
    logs = (-a_log.float().exp() * dt).clamp_(min=MIN_LOG_DECAY)
    skip = d.float()[:, None]
    for batch in _decodes(segments, matrix):
        states, tokens = batch.states(matrix), batch.tokens
        into = b[tokens].float().repeat_interleave(group, 1) * dt[tokens][..., None]
        rows, read = x[tokens].float(), c[tokens].float().repeat_interleave(group, 1)
        states.mul_(logs[tokens].exp()[..., None, None])
        states.addcmul_(into[..., None], rows[:, :, None])
        out[tokens] = (read[:, :, None] @ states).squeeze(2).addcmul_(rows, skip)
        matrix.index_copy_(0, batch.writes, states)
    for seq in _sequences(segments):
        state = seq.state(matrix)
        for tokens, slot in seq.parts():
            rows = x[tokens].float()
            ys, state = _mamba_tiles(
                state, rows, b[tokens].float(), c[tokens].float(), dt[tokens], logs[tokens]
            )
            out[tokens] = ys.addcmul(rows, skip)
            if slot >= 0:
                matrix[slot] = state


def _mamba_tiles(
    state: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of some tokens of one sequence, without the skip, and the state after."""
    tokens, tile, group = len(x), min(TILE, len(x)), x.shape[1] // b.shape[1]
    x = _tiled(x * dt[..., None], tile)
    b, c = _tiled(b, tile), _tiled(c, tile)
    decay = _decays(_tiled(logs, tile))
    outs = _times_heads(decay.between, c @ b.mT).tril_() @ x
    added = (_for_heads(b, group) * decay.after).mT @ x
    firsts = torch.empty_like(added)
    for i in range(x.shape[1]):
        firsts[:, i] = state
        state = torch.addcmul(added[:, i], state, decay.whole[:, i])
    outs += (_for_heads(c, group) * decay.to) @ firsts
    return _untiled(outs, tokens), state


def gated_norm(
    x: Tensor, gate: Tensor, gain: Tensor, eps: float, out: Tensor, *, group: int, gate_first: bool
) -> None:
    """Write an RMS norm of x [tokens, width], over each `group` columns, times silu(gate) to `out`.

    gate_first: the norm is of x * silu(gate). gain: [group] or [width].
    """
    gates, values = silu(gate.float()), x.float()
    if gate_first:
        values = values * gates
    groups = values.view(len(x), x.shape[1] // group, group)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    groups = groups * gain.float().view(-1, group)
    values = groups.flatten(1)
    out.copy_(values if gate_first else values * gates)
