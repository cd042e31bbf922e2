"""Chooses token ids from logits.

A row's token depends on its logits, its settings, its history and its noise key, never on the
other rows. Order of work, as in vLLM:

    raw logits -> logprobs (if wanted)
    mask, logit_bias, min_tokens -> repetition, presence, frequency penalties
    temperature 0: argmax
    otherwise: / temperature -> min_p -> top_k -> top_p -> + noise (`noise.py`): argmax
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mainstem.core.request import TokenLogprobs
from mainstem.core.step import (
    Bools,
    Float32s,
    Int32s,
    Int64s,
    SampleBatch,
    StartedSequence,
    Step,
)
from mainstem.runner.edits import LogitEdits
from mainstem.runner.noise import bits_of, draw, pick
from mainstem.runner.uploads import Uploads

_CANDIDATES = 1024  # tokens sorted first; if top_k or top_p needs more, the whole row is sorted
_LOGPROB_ROWS = 128  # rows whose log-probabilities over the whole vocabulary are held at once


class Sampler:
    """Turns logits into tokens on one device. It keeps, by sequence slot, what edits of logits
    need.

    On a GPU nothing here waits for the device: settings are sent through pinned memory, sampled
    ids stay on the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._uploads = Uploads(self._device)
        self._edits = LogitEdits(self._uploads)

    def start(self, started: StartedSequence) -> None:
        """Begin a sequence in a slot, and forget the slot's previous sequence."""
        self._edits.start(started)

    def sample(self, logits: Tensor, step: Step) -> Tensor:
        """Return token ids [rows] int64 for logits [rows, vocab] fp32, which may be edited in
        place."""
        batch = step.sampling
        if batch.is_greedy:
            return self._likeliest(logits)
        if len(batch.mask_rows):
            _apply_masks(logits, batch, self._uploads)
        slots = step.sample_slots[batch.special_rows]
        if len(slots):
            self._edits.apply(logits, batch.special_rows, slots)
        token_ids = self._chosen(logits, batch)
        if len(slots):
            self._edits.append(token_ids, batch.special_rows, slots)
        return token_ids

    def _likeliest(self, logits: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return likeliest(logits)
        from mainstem.kernels.sampling.sample import argmax  # noqa: PLC0415  a CPU needs no Triton

        return argmax(logits)

    def _chosen(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        is_drawn = batch.temperature > 0
        if self._device.type == "cpu" or not is_drawn.any():
            token_ids = self._likeliest(logits)
            rows = torch.from_numpy(np.flatnonzero(is_drawn))
            if len(rows):
                token_ids[rows] = choose(logits[rows], choice_of(batch).of(rows))
            return token_ids
        from mainstem.kernels.sampling import sample  # noqa: PLC0415

        is_limited = (batch.top_k < logits.shape[1]) | (batch.top_p < 1.0)
        choice = self._send_choice(batch)
        if not (is_limited & is_drawn).any():
            return sample.draw(logits, choice.temperature, choice.min_p, choice.keys)
        settings = (choice.temperature, choice.top_k, choice.top_p, choice.min_p)
        return sample.sample(logits, *settings, choice.keys)

    def _send_choice(self, batch: SampleBatch) -> "DrawSettings":
        """Send the settings in one copy, each aligned to 16 bytes for the kernels."""
        rows = len(batch.temperature)
        words = np.zeros((6, -(-rows // 4) * 4), np.int32)
        columns = (batch.temperature, batch.top_p, batch.top_k, batch.min_p)
        for word, column in zip(words, columns, strict=False):
            word[:rows] = column.view(np.int32)
        words[4:].reshape(-1)[: 2 * rows] = batch.noise_keys.view(np.int32)
        sent = self._uploads.send(words)
        floats = sent.view(torch.float32)[:, :rows]
        keys = sent[4:].reshape(-1)[: 2 * rows].view(torch.int64)
        return DrawSettings(floats[0], floats[1], sent[2, :rows], floats[3], keys)


def _apply_masks(logits: Tensor, batch: SampleBatch, uploads: Uploads) -> None:
    """Exclude, in place, the tokens that grammars do not allow."""
    rows = uploads.send(batch.mask_rows.astype(np.int64))
    bits = torch.arange(8, dtype=torch.uint8, device=uploads.device)
    is_allowed = uploads.send(batch.masks)[:, :, None] >> bits & 1
    is_barred = is_allowed.flatten(1)[:, : logits.shape[1]] == 0
    masked = logits.index_select(0, rows).masked_fill_(is_barred, float("-inf"))
    logits.index_copy_(0, rows, masked)


def likeliest(logits: Tensor) -> Tensor:
    """Return the argmax over the last axis on a CPU; on a tie, the first. numpy's is faster than
    torch's."""
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of the rows that draw a random token, each [rows]; `keys` are noise keys."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    keys: Tensor

    def of(self, rows: Tensor) -> "DrawSettings":
        """The settings of these rows only."""
        return DrawSettings(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.keys[rows],
        )


def choice_of(batch: SampleBatch) -> DrawSettings:
    """Return the batch's settings as tensors; top_p and min_p in float64, like `_weights`."""
    return DrawSettings(
        torch.from_numpy(batch.temperature),
        torch.from_numpy(batch.top_p).double(),
        torch.from_numpy(batch.top_k).long(),
        torch.from_numpy(batch.min_p).double(),
        torch.from_numpy(batch.noise_keys),
    )


def choose(logits: Tensor, choice: DrawSettings) -> Tensor:
    """Draw one token per row of logits [rows, vocab]."""
    is_cut = (choice.top_p < 1.0) | (choice.top_k < logits.shape[1])
    if not bool(is_cut.any()):
        return _draw_any(logits, choice)
    if bool(is_cut.all()):
        return _draw_cut(logits / choice.temperature[:, None], choice, _CANDIDATES)
    token_ids = torch.empty(len(logits), dtype=torch.long)
    rows, others = is_cut.nonzero()[:, 0], (~is_cut).nonzero()[:, 0]
    token_ids[rows] = choose(logits[rows], choice.of(rows))
    token_ids[others] = choose(logits[others], choice.of(others))
    return token_ids


def _draw_any(logits: Tensor, choice: DrawSettings) -> Tensor:
    """Draw without top_k and top_p: nothing is sorted."""
    columns = (choice.temperature, choice.min_p.float(), choice.keys)
    return torch.from_numpy(draw(logits.numpy(), *(column.numpy() for column in columns)))


def _draw_cut(scores: Tensor, choice: DrawSettings, num_candidates: int) -> Tensor:
    """Sort the likeliest tokens and apply the limits. A row that needs more tokens is sorted as a
    whole."""
    # one more than top_k, to see whether other tokens have the same score as the last one
    count = min(scores.shape[1], num_candidates, int(choice.top_k.max()) + 1)
    best, ids = torch.topk(scores, count, dim=1, sorted=True)
    weights = _weights(best, choice.min_p)
    weights.masked_fill_(torch.arange(count) >= choice.top_k[:, None], 0.0)
    reached = weights.cumsum(dim=1)
    # top_p is a share of the probability that top_k and min_p have kept
    has_all = (choice.top_k <= count) | (count == scores.shape[1]) | (weights[:, -1] == 0)
    if bool(has_all.all()):
        total = reached[:, -1:]
        is_short = torch.zeros(len(scores), dtype=torch.bool)
    else:
        total = _weights(scores, choice.min_p).sum(dim=1, keepdim=True)
        total = torch.where(has_all[:, None], reached[:, -1:], total)
        # if top_k is above `count`, the total of the top_k tokens is not known either
        is_short = ~has_all & (
            (reached[:, -1] < choice.top_p * total[:, 0]) | (choice.top_k < scores.shape[1])
        )
    if bool(is_short.all()):
        return _draw_cut(scores, choice, scores.shape[1])
    # a token is kept if the tokens before it have not reached top_p
    weights.masked_fill_(reached - weights >= choice.top_p[:, None] * total, 0.0)
    is_kept = weights.numpy() != 0
    sorted_rows = (best.numpy(), ids.numpy())
    token_ids = torch.from_numpy(_draw_kept(scores.numpy(), *sorted_rows, is_kept, choice))
    if bool(is_short.any()):
        rows = is_short.nonzero()[:, 0]
        token_ids[rows] = _draw_cut(scores[rows], choice.of(rows), scores.shape[1])
    return token_ids


def _draw_kept(
    scores: Float32s, best: Float32s, ids: Int64s, is_kept: Bools, choice: DrawSettings
) -> Int64s:
    """Draw one token per row of `ids`, which are sorted by score `best`, likeliest first. Only the
    tokens in `is_kept`, a prefix of each row, take part. If tokens tie with the last kept one,
    those with the lowest ids take part."""
    (rows, count), vocab = best.shape, scores.shape[1]
    # is_kept is all false if logits are inf
    num_kept = np.maximum(np.count_nonzero(is_kept, axis=1), 1)
    every, width = np.arange(rows), num_kept.max()
    last, after = best[every, num_kept - 1], best[every, np.minimum(num_kept, count - 1)]
    for row in np.flatnonzero((last == after) & (num_kept < vocab)):
        num_larger = np.count_nonzero(best[row] > last[row])
        equals = np.flatnonzero(scores[row] == last[row])
        ids[row, num_larger : num_kept[row]] = equals[: num_kept[row] - num_larger]
    with np.errstate(invalid="ignore"):  # inf - inf
        below_best = best[:, :width] - best[:, :1]
    below_best[~is_kept[:, :width]] = -np.inf
    return ids[every, pick(below_best, bits_of(choice.keys.numpy(), ids[:, :width], vocab))]


def _weights(scores: Tensor, min_p: Tensor) -> Tensor:
    """Return probabilities relative to the likeliest token; those below min_p are 0."""
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True)).double()
    if bool((min_p > 0).any()):
        weights.masked_fill_(weights < min_p[:, None], 0.0)
    return weights


class LogprobRows:
    """Log-probabilities that are being copied to the host; call `resolve` when the copy is
    complete."""

    def __init__(
        self, values: Tensor, ints: Tensor, counts: Int32s, has_drawn: bool = False
    ) -> None:
        # logprobs of the chosen token and of the top tokens; last, that of the draw
        self._values = values
        self._has_drawn = has_drawn
        self._ints = ints  # id and rank of the chosen token, ids of the top tokens
        self._counts = counts

    def resolve(self) -> list[TokenLogprobs]:
        """Return one record per row. On a GPU the caller must have waited for an event that was
        recorded after `start_logprobs`."""
        return [
            TokenLogprobs(
                token_id=ints[0],
                logprob=values[0],
                rank=ints[1],
                top_ids=tuple(ints[2 : 2 + count]),
                top_logprobs=tuple(values[1 : 1 + count]),
                drawn_logprob=values[-1] if self._has_drawn else None,
            )
            for values, ints, count in zip(
                self._values.tolist(), self._ints.tolist(), self._counts.tolist(), strict=True
            )
        ]


def drawn_logprobs(edited: Tensor, token_ids: Tensor, batch: SampleBatch, rows: Int64s) -> Tensor:
    """Return the log-probability of each token in the distribution that it was drawn from, [rows]
    fp32. `edited` are the logits [rows, vocab] of these `rows` of the batch after `sample`, which
    has applied masks and penalties.

    Probabilities of a row are summed in fp64, in the order of the tokens' ids or, if the row is
    filtered, of their scores.
    """
    starts = range(0, len(rows), _LOGPROB_ROWS)
    parts = [slice(first, first + _LOGPROB_ROWS) for first in starts]
    return torch.cat([_drawn(edited[part], token_ids[part], batch, rows[part]) for part in parts])


def _drawn(edited: Tensor, token_ids: Tensor, batch: SampleBatch, rows: Int64s) -> Tensor:
    device = edited.device
    temperature = torch.from_numpy(batch.temperature[rows]).to(device)
    is_drawn = temperature > 0
    scores = edited.float() / torch.where(is_drawn, temperature, 1.0)[:, None]
    chosen = scores.gather(1, token_ids[:, None])[:, 0]
    top_p, top_k, min_p = batch.top_p[rows], batch.top_k[rows], batch.min_p[rows]
    if (top_k < edited.shape[1]).any() or (top_p < 1.0).any():
        scores = scores.sort(dim=1, descending=True).values
    highest = scores.amax(dim=1, keepdim=True)
    weights = torch.exp((scores - highest).double())
    if (min_p > 0).any():
        weights[weights < torch.from_numpy(min_p).to(device).double()[:, None]] = 0.0
    if (top_k < edited.shape[1]).any():
        places = torch.arange(edited.shape[1], device=device)
        weights[places >= torch.from_numpy(top_k).to(device)[:, None]] = 0.0
    if (top_p < 1.0).any():
        share = torch.from_numpy(top_p).to(device).double()[:, None]
        reached = weights.cumsum(dim=1)
        weights[reached - weights >= share * reached[:, -1:]] = 0.0
    found = (chosen - highest[:, 0]).double() - weights.sum(dim=1).log()
    return torch.where(is_drawn, found, 0.0).float()


def start_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Int32s, drawn: Tensor | None = None
) -> LogprobRows:
    """Start to compute log-probabilities of the model's own distribution, before temperature and
    penalties. `drawn` are those of `drawn_logprobs`, which are kept beside them.

    logits are [rows, vocab]. Row i gets the log-probabilities of `token_ids[i]` and of the
    `counts[i]` likeliest tokens.
    """
    num_top = max(1, int(counts.max(initial=0)))
    starts = range(0, max(len(logits), 1), _LOGPROB_ROWS)
    rows = [slice(first, first + _LOGPROB_ROWS) for first in starts]
    parts = [_logprobs(logits[part], token_ids[part], num_top) for part in rows]
    values, ints = (torch.cat(columns) for columns in zip(*parts, strict=True))
    if drawn is not None:
        values = torch.cat((values, drawn[:, None]), dim=1)
    return LogprobRows(to_host(values), to_host(ints), counts, drawn is not None)


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return values [rows, 1 + num_top] and ints [rows, 2 + num_top], as LogprobRows keeps them."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    top = torch.topk(logprobs, num_top, dim=1)
    values = torch.cat((chosen, top.values), dim=1)
    return values, torch.cat((token_ids[:, None], ranks, top.indices), dim=1)


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy to the host. It is complete when the device has done all work queued so far."""
    if tensor.device.type == "cpu":
        return tensor
    from mainstem.kernels.memory.upload import move_words  # noqa: PLC0415  # brings Triton

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    move_words(host, tensor)
    return host
