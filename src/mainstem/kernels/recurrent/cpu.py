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

Decodes with rows (`rows.py`) are these lines for one more token, where S is the base and j goes
over the rows.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from mainstem.kernels.recurrent.rows import SIBLINGS, LayerRows, RowUse
from mainstem.kernels.recurrent.segments import TILE, Segments

STRETCH = 8 * TILE  # tokens that are computed together: few calls, little memory
BATCH_BYTES = 8 << 20  # of states of decodes that are computed together: they stay in a cache
MIN_LOG_DECAY = -120.0  # exp gives 0; less would only cost digits of sums


class _Sequence(NamedTuple):
    read: int
    bounds: list[int]  # first token of each segment, and the end of the last one
    writes: list[int]
    row_slot: int  # -1: its tokens become no rows

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
    slots = [-1] * segments.num_seqs if segments.rows is None else segments.rows.slots.tolist()
    for seq in range(segments.num_decodes, segments.num_seqs):
        first, end = bounds[seq], bounds[seq + 1]
        yield _Sequence(reads[seq], starts[first : end + 1], writes[first:end], slots[seq])


class _Decodes(NamedTuple):
    """Decodes that write a state."""

    tokens: slice | Tensor
    reads: Tensor
    writes: Tensor
    row_slots: Tensor | None  # None: nobody has rows
    counts: Tensor | None

    def inputs(self, conv: Tensor, rows: LayerRows | None) -> Tensor:
        """Copies of the last inputs."""
        found = _states(self.reads, conv)
        for index, slot, _ in self._with_rows():
            assert rows is not None
            found[index] = rows.conv[slot]
        return found

    def states(self, matrix: Tensor, rows: LayerRows | None) -> Tensor:
        """Copies of the states to start from: bases after their rows."""
        found = _states(self.reads, matrix)
        for index, slot, count in self._with_rows():
            assert rows is not None
            sums = rows.sums[slot, :, :count, None]
            keys = rows.keys[slot, :, :count].float()
            keys = keys.repeat_interleave(len(found[index]) // len(keys), 0)
            keys = keys * (sums[:, -1:] - sums).exp()
            found[index] *= sums[:, -1:].exp()
            found[index] += keys.mT @ rows.values[slot, :, :count].float()
        return found

    def _with_rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield index, row slot and count of the decodes that have rows."""
        if self.row_slots is None or self.counts is None:
            return
        slots, counts = self.row_slots.tolist(), self.counts.tolist()
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if slot >= 0 and count > 0:
                yield index, slot, count


def _states(reads: Tensor, states: Tensor) -> Tensor:
    """Copies of states."""
    found = states.index_select(0, reads.clamp(min=0))
    is_new = reads < 0
    if is_new.any():
        found[is_new] = 0
    return found


def _decodes(segments: Segments, states: Tensor) -> Iterator[_Decodes]:
    """Yield decodes that write a state, to be computed together."""
    state_bytes = states[0].numel() * states.element_size()
    step, use = max(BATCH_BYTES // state_bytes, 1), segments.rows
    if use is None:
        for first in range(0, segments.num_decodes, step):
            some = slice(first, min(first + step, segments.num_decodes))
            yield _Decodes(some, segments.reads[some], segments.writes[some].long(), None, None)
    elif use.num_writers:
        for tokens in torch.split(use.writers[: use.num_writers], step):
            reads, writes = segments.reads[tokens], segments.writes[tokens].long()
            yield _Decodes(tokens, reads, writes, use.slots[tokens], use.counts[tokens])


class _RowDecodes(NamedTuple):
    """Decodes that append a row."""

    tokens: Tensor
    slots: Tensor
    counts: Tensor

    def totals(self, sums: Tensor, logs: Tensor) -> Tensor:
        """The logarithm of the decay from the base to this token, [tokens, heads]."""
        last = sums[self.slots, :, (self.counts - 1).clamp(min=0)]
        return torch.where((self.counts > 0)[:, None], last, 0.0) + logs[self.tokens]

    def append(self, rows: LayerRows, keys: Tensor, values: Tensor, totals: Tensor) -> None:
        """Add a row each."""
        for part, new in ((rows.keys, keys), (rows.values, values), (rows.sums, totals)):
            part[self.slots, :, self.counts] = new.to(part.dtype)


def _row_decodes(segments: Segments) -> Iterator[_RowDecodes]:
    """Yield decodes that append a row, to be computed together."""
    use = segments.rows
    if use is None or segments.num_decodes == use.num_writers:
        return
    members = use.members[: segments.num_decodes - use.num_writers].long()
    for tokens in torch.split(members, SIBLINGS):
        yield _RowDecodes(tokens, use.slots[tokens].long(), use.counts[tokens].long())


def _of_bases(use: RowUse, x: Tensor, reads: Tensor, matrix: Tensor) -> Tensor:
    """The products of vectors x [tokens, heads, vectors, keys] with each token's base, as [tokens,
    heads, vectors, values]. A base is read once for a group."""
    products = x.new_zeros(*x.shape[:3], matrix.shape[3])
    starts = use.group_starts.tolist()[: use.num_groups + 1]
    for start, end in pairwise(starts):
        tokens = use.members[start:end]
        base = int(reads[tokens[0]])
        if base >= 0:
            vectors = x[tokens].transpose(0, 1)
            found = vectors.flatten(1, 2) @ matrix[base]
            products[tokens] = found.view(*vectors.shape[:3], -1).transpose(0, 1)
    return products


def _of_rows(x: Tensor, batch: _RowDecodes, rows: LayerRows, totals: Tensor) -> Tensor:
    """Likewise the products of x [tokens, heads, vectors, keys] with the sum of the rows."""
    most = int(batch.counts.max())
    keys, values = rows.keys[batch.slots, :, :most], rows.values[batch.slots, :, :most]
    decays = (totals[..., None] - rows.sums[batch.slots, :, :most]).clamp(max=0).exp()
    is_row = torch.arange(most) < batch.counts[:, None]
    weights = torch.where(is_row[:, None], decays, 0.0)[:, :, None]
    keys = keys.float().repeat_interleave(x.shape[1] // keys.shape[1], 1)
    values = torch.where(is_row[:, None, :, None], values.float(), 0.0)
    keys = torch.where(is_row[:, None, :, None], keys, 0.0)
    return (x @ keys.mT * weights) @ values


def _of_states(
    x: Tensor, logs: Tensor, segments: Segments, matrix: Tensor, rows: LayerRows
) -> Iterator[tuple[_RowDecodes, Tensor, Tensor]]:
    """Yield decodes that append a row, with the products of their vectors x [tokens, heads,
    vectors, keys] with the state before them, and their decays from the base (`totals`)."""
    use = segments.rows
    assert use is not None
    of_bases = _of_bases(use, x, segments.reads, matrix)
    for batch in _row_decodes(segments):
        totals = batch.totals(rows.sums, logs)
        found = of_bases[batch.tokens] * totals.exp()[..., None, None]
        found += _of_rows(x[batch.tokens], batch, rows, totals)
        yield batch, found, totals


class _PromptRows:
    """Writes the rows of a prompt's tokens, from row 0 of a slot on."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._end = 0
        self._total: Tensor | float = 0.0  # of the last row

    def append(self, rows: LayerRows | None, keys: Tensor, values: Tensor, logs: Tensor) -> None:
        """keys: [tokens, key_heads, dim]; values: likewise; logs: [tokens, heads]"""
        if self._slot < 0:
            return
        assert rows is not None
        new = slice(self._end, self._end + len(keys))
        assert new.stop <= rows.sums.shape[2], "a prompt has more tokens than a slot has rows"
        totals = logs.double().cumsum(0) + self._total
        for part, more in ((rows.keys, keys), (rows.values, values), (rows.sums, totals)):
            part[self._slot, :, new] = more.transpose(0, 1).to(part.dtype)
        self._total, self._end = totals[-1], new.stop


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
    """Write the causal convolution of each channel of x [tokens, channels] to `out`.

    weight: [channels, kernel]; conv: [slots, kernel - 1, channels], the last inputs, oldest first;
    rows: needed if sequences of the step keep rows.
    """
    kernel = weight.shape[1]
    taps = weight.float().t().contiguous()

    def finish(total: Tensor, tokens: slice | Tensor) -> None:
        if bias is not None:
            total += bias
        total = silu(total, inplace=True) if activation else total
        out[tokens] = total.to(out.dtype)

    for batch in _decodes(segments, conv):
        window = torch.cat((batch.inputs(conv, rows), x[batch.tokens, None]), dim=1)
        finish((window.float() * taps).sum(1), batch.tokens)
        conv.index_copy_(0, batch.writes, window[:, 1:])
    for row_batch in _row_decodes(segments):
        assert rows is not None
        tokens = row_batch.tokens
        has_rows = (row_batch.counts > 0)[:, None, None]
        old = _states(segments.reads[tokens], conv)
        old = torch.where(has_rows, rows.conv[row_batch.slots], old)
        window = torch.cat((old, x[tokens, None]), dim=1)
        finish((window.float() * taps).sum(1), tokens)
        rows.conv[row_batch.slots] = window[:, 1:]
    for seq in _sequences(segments):
        begin, end = seq.bounds[0], seq.bounds[-1]
        inputs = torch.cat((seq.state(conv), x[begin:end]))
        wide = inputs.float()
        total = wide[: end - begin] * taps[0]
        for tap in range(1, kernel):
            total.addcmul_(wide[tap : tap + end - begin], taps[tap])
        finish(total, slice(begin, end))
        for last, slot in zip(seq.bounds[1:], seq.writes, strict=True):
            kept = inputs[last - begin : last - begin + kernel - 1]
            if seq.row_slot >= 0:
                assert rows is not None
                rows.conv[seq.row_slot] = kept
            else:
                conv[slot] = kept


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
    rows: LayerRows | None = None,
) -> None:
    """Write the output of the gated delta rule to `out` [tokens, value_heads, value_dim].

    q, k: [tokens, key_heads, key_dim], not normalised; v: like out; a, b: [tokens, value_heads],
    not activated; a_log, dt_bias: [value_heads]; matrix: [slots, value_heads, key_dim, value_dim]
    fp32; rows: needed if sequences of the step keep rows.
    """
    group = v.shape[1] // q.shape[1]
    q, k = _normed(q) * q.shape[2] ** -0.5, _normed(k)
    logs = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    logs = logs.clamp_(min=MIN_LOG_DECAY)
    beta = b.float().sigmoid()
    for batch in _decodes(segments, matrix):
        states, tokens = batch.states(matrix, rows), batch.tokens
        vectors = torch.stack((k[tokens], q[tokens]), dim=2).repeat_interleave(group, 1)
        decay = logs[tokens].exp()[..., None]
        from_keys, from_queries = ((vectors @ states) * decay[..., None]).unbind(2)
        u = (v[tokens] - from_keys) * beta[tokens][..., None]
        key, query = vectors.unbind(2)
        out[tokens] = (from_queries + (key * query).sum(-1, keepdim=True) * u).to(out.dtype)
        states.mul_(decay[..., None]).addcmul_(key[..., None], u[:, :, None])
        matrix.index_copy_(0, batch.writes, states)
    if segments.rows is not None:
        assert rows is not None
        vectors = torch.stack((k, q), dim=2)[: segments.num_decodes].repeat_interleave(group, 1)
        for row_batch, of_state, totals in _of_states(vectors, logs, segments, matrix, rows):
            tokens = row_batch.tokens
            from_keys, from_queries = of_state.unbind(2)
            key, query = vectors[tokens].unbind(2)
            u = (v[tokens] - from_keys) * beta[tokens][..., None]
            out[tokens] = (from_queries + (key * query).sum(-1, keepdim=True) * u).to(out.dtype)
            row_batch.append(rows, k[tokens], u, totals)
    for seq in _sequences(segments):
        state, prompt_rows = seq.state(matrix), _PromptRows(seq.row_slot)
        for tokens, slot in seq.parts():
            values = v[tokens].float()
            state, us = _delta_tiles(
                state, q[tokens], k[tokens], values, logs[tokens], beta[tokens], out[tokens]
            )
            prompt_rows.append(rows, k[tokens], us, logs[tokens])
            if slot >= 0:
                matrix[slot] = state


def _delta_tiles(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `out` of some tokens of one sequence; return the state after them and all u [tokens,
    heads, dim]."""
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
        u = own[:, i].baddbmm_(of_state[:, i], state, alpha=-1)
        outs[:, i] = torch.baddbmm(q[:, i] @ state, scores[:, i], u)
        state = torch.baddbmm(state * decay.whole[:, i], k[:, i], u)
    out.copy_(_untiled(outs, len(out)))
    return state, _untiled(own, len(out))


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
    """Write the output of Mamba-2's recurrence to `out` [tokens, heads, head_dim].

    x: like out; b, c: [tokens, groups, state_dim]; dt: [tokens, heads], not activated; a_log,
    dt_bias, d: [heads]; limits: of dt; matrix: [slots, heads, state_dim, head_dim] fp32; rows:
    needed if sequences of the step keep rows.
    """
    group = x.shape[1] // b.shape[1]
    dt = softplus(dt.float() + dt_bias.float()).clamp_(*limits)
    logs = (-a_log.float().exp() * dt).clamp_(min=MIN_LOG_DECAY)
    skip = d.float()[:, None]
    for batch in _decodes(segments, matrix):
        states, tokens = batch.states(matrix, rows), batch.tokens
        into = b[tokens].float().repeat_interleave(group, 1) * dt[tokens][..., None]
        values, read = x[tokens].float(), c[tokens].float().repeat_interleave(group, 1)
        states.mul_(logs[tokens].exp()[..., None, None])
        states.addcmul_(into[..., None], values[:, :, None])
        ys = (read[:, :, None] @ states).squeeze(2).addcmul_(values, skip)
        out[tokens] = ys.to(out.dtype)
        matrix.index_copy_(0, batch.writes, states)
    if segments.rows is not None:
        assert rows is not None
        reads = c[: segments.num_decodes, :, None].float().repeat_interleave(group, 1)
        for row_batch, of_state, totals in _of_states(reads, logs, segments, matrix, rows):
            tokens = row_batch.tokens
            keys, values = b[tokens].float(), x[tokens].float()
            u = values * dt[tokens][..., None]
            weights = (keys * c[tokens].float()).sum(-1, keepdim=True).repeat_interleave(group, 1)
            out[tokens] = (of_state.squeeze(2) + weights * u + skip * values).to(out.dtype)
            row_batch.append(rows, keys, u, totals)
    for seq in _sequences(segments):
        state, prompt_rows = seq.state(matrix), _PromptRows(seq.row_slot)
        for tokens, slot in seq.parts():
            values, keys = x[tokens].float(), b[tokens].float()
            ys, state = _mamba_tiles(
                state, values, keys, c[tokens].float(), dt[tokens], logs[tokens]
            )
            out[tokens] = ys.addcmul(values, skip)
            prompt_rows.append(rows, keys, values * dt[tokens][..., None], logs[tokens])
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
