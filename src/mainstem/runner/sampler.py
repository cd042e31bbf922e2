"""Logits -> token ids.

A row's token depends on its logits, its settings, its history and its `uniform`, never on the
rows beside it. Order of work, as in vLLM:

    raw logits -> logprobs (if wanted)
    mask, logit_bias, min_tokens -> repetition, presence, frequency penalties
    temperature 0: argmax
    otherwise: / temperature -> min_p -> top_k -> top_p -> inverse CDF at `uniform`
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mainstem.core.request import SamplingParams, TokenLogprobs
from mainstem.core.step import Int32s, SampleBatch, StartedSequence, Step

_CANDIDATES = 1024  # sorted first; a row whose top_p reaches beyond is sorted whole


class _History:
    """What a sequence whose logits are edited has said so far."""

    def __init__(self, started: StartedSequence) -> None:
        self.sampling: SamplingParams = started.sampling
        self.stop_ids = torch.tensor(started.stop_ids, dtype=torch.long)
        self.output_ids = started.output_ids.tolist()
        self._counts = Counter(self.output_ids)
        self._prompt_ids = frozenset(started.prompt_ids.tolist())
        bias = started.sampling.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.long)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self._counts[token_id] += 1

    def edit(self, logits: Tensor) -> None:
        """In place, logits [vocab]."""
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if len(self.output_ids) < self.sampling.min_tokens:
            logits[self.stop_ids] = float("-inf")
        if self.sampling.has_penalties:
            self._penalise(logits)

    def _penalise(self, logits: Tensor) -> None:
        sampling = self.sampling
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(list(self._prompt_ids | self._counts.keys()), dtype=torch.long)
            values = logits[seen]
            factor = sampling.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if self._counts and (sampling.frequency_penalty or sampling.presence_penalty):
            said = torch.tensor(list(self._counts), dtype=torch.long)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits[said] -= sampling.frequency_penalty * counts + sampling.presence_penalty


class Sampler:
    """Turns logits into tokens; remembers, by sequence slot, what penalties need."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}

    def start(self, started: StartedSequence) -> None:
        """A sequence enters a slot; forget what was there."""
        self._histories[started.seq_slot] = _History(started)

    def sample(self, logits: Tensor, step: Step) -> Tensor:
        """Token ids [rows] int64 from logits [rows, vocab] fp32, which may be edited in place."""
        batch = step.sampling
        if batch.is_greedy:
            return likeliest(logits)
        if len(batch.mask_rows):
            _apply_masks(logits, batch)
        for row in batch.special_rows.tolist():
            self._histories[int(step.sample_slots[row])].edit(logits[row])
        token_ids = likeliest(logits)
        rows = torch.from_numpy(np.flatnonzero(batch.temperature > 0))
        if len(rows):
            token_ids[rows] = choose(logits[rows], choice_of(batch).of(rows))
        for row in batch.special_rows.tolist():
            self._histories[int(step.sample_slots[row])].append(int(token_ids[row]))
        return token_ids


def _apply_masks(logits: Tensor, batch: SampleBatch) -> None:
    """Bar, in place, the tokens that grammars do not allow."""
    packed = torch.from_numpy(batch.masks).to(logits.device)
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    is_barred = bits.flatten(1)[:, : logits.shape[1]] == 0
    for index, row in enumerate(batch.mask_rows.tolist()):
        logits[row].masked_fill_(is_barred[index], float("-inf"))


def likeliest(logits: Tensor) -> Tensor:
    """argmax over the last axis, the first of equals.

    torch's own goes element by element; its maximum is vectorised, so blocks are compared by
    their maximum and only the winning block is searched: 15 times faster at 49,152 tokens.
    """
    rows, vocab = logits.shape
    block = next((size for size in (256, 128, 64, 32) if vocab % size == 0), None)
    if block is None:
        return logits.argmax(dim=-1)
    blocks = logits.view(rows, -1, block)
    winner = blocks.amax(dim=-1).argmax(dim=-1)
    return winner * block + blocks[torch.arange(rows), winner].argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings of the rows that draw a random token, each [rows]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    uniform: Tensor

    def of(self, rows: Tensor) -> "Choice":
        """Of these rows only."""
        return Choice(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.uniform[rows],
        )


def choice_of(batch: SampleBatch) -> Choice:
    """The batch's settings as tensors; products of probabilities are taken in double."""
    return Choice(
        torch.from_numpy(batch.temperature),
        torch.from_numpy(batch.top_p).double(),
        torch.from_numpy(batch.top_k).long(),
        torch.from_numpy(batch.min_p).double(),
        torch.from_numpy(batch.uniform).double(),
    )


def choose(logits: Tensor, choice: Choice) -> Tensor:
    """Draw one token per row of logits [rows, vocab]."""
    scores = logits / choice.temperature[:, None]
    is_cut = (choice.top_p < 1.0) | (choice.top_k < scores.shape[1])
    if not bool(is_cut.any()):
        return _draw_any(scores, choice)
    if bool(is_cut.all()):
        return _draw_cut(scores, choice, _CANDIDATES)
    token_ids = torch.empty(len(scores), dtype=torch.long)
    rows, others = is_cut.nonzero()[:, 0], (~is_cut).nonzero()[:, 0]
    token_ids[rows] = _draw_cut(scores[rows], choice.of(rows), _CANDIDATES)
    token_ids[others] = _draw_any(scores[others], choice.of(others))
    return token_ids


def _draw_any(scores: Tensor, choice: Choice) -> Tensor:
    """No top_k, no top_p: the order of the tokens does not matter, nothing is sorted."""
    return _invert(_weights(scores, choice.min_p), choice.uniform)


def _draw_cut(scores: Tensor, choice: Choice, num_candidates: int) -> Tensor:
    """Sort the likeliest tokens and cut; rows that need more of them are sorted whole."""
    count = min(scores.shape[1], num_candidates)
    best, ids = torch.topk(scores, count, dim=1, sorted=True)
    weights = _weights(best, choice.min_p)
    weights.masked_fill_(torch.arange(count) >= choice.top_k[:, None], 0.0)
    reached = weights.cumsum(dim=1)
    # top_p is a share of what top_k and min_p have left
    has_all = (choice.top_k <= count) | (count == scores.shape[1]) | (weights[:, -1] == 0)
    if bool(has_all.all()):
        total = reached[:, -1:]
        is_short = torch.zeros(len(scores), dtype=torch.bool)
    else:
        total = _weights(scores, choice.min_p).sum(dim=1, keepdim=True)
        total = torch.where(has_all[:, None], reached[:, -1:], total)
        # a top_k between the candidates and the vocabulary has no known total either
        is_short = ~has_all & (
            (reached[:, -1] < choice.top_p * total[:, 0]) | (choice.top_k < scores.shape[1])
        )
    # a token stays while the ones before it have not reached top_p
    weights.masked_fill_(reached - weights >= choice.top_p[:, None] * total, 0.0)
    token_ids = ids.gather(1, _invert(weights, choice.uniform)[:, None])[:, 0]
    if bool(is_short.any()):
        rows = is_short.nonzero()[:, 0]
        token_ids[rows] = _draw_cut(scores[rows], choice.of(rows), scores.shape[1])
    return token_ids


def _weights(scores: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities up to a factor, the likeliest being 1; those below min_p are 0."""
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True)).double()
    if bool((min_p > 0).any()):
        weights.masked_fill_(weights < min_p[:, None], 0.0)
    return weights


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first place where the running sum passes `uniform` of the whole."""
    reached = weights.cumsum(dim=1)
    target = uniform[:, None] * reached[:, -1:]
    place = torch.searchsorted(reached, target, right=True)[:, 0]
    # rounding could carry a draw behind the last token that has any weight
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())[:, 0]
    return torch.minimum(place, last)


def logprobs_of(logits: Tensor, token_ids: Tensor, counts: Int32s) -> list[TokenLogprobs]:
    """Log-probabilities of the model's own distribution, before temperature and penalties.

    logits [rows, vocab]; of row i the chosen token and the `counts[i]` likeliest ones.
    """
    if len(logits) == 0:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top = torch.topk(logprobs, max(1, int(counts.max())), dim=1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprobs(
            token_id=int(token_id),
            logprob=float(chosen[row, 0]),
            rank=int(ranks[row]),
            top_ids=tuple(ids[row][: counts[row]]),
            top_logprobs=tuple(values[row][: counts[row]]),
        )
        for row, token_id in enumerate(token_ids.tolist())
    ]
