"""Logits -> token ids.

A row's token depends on its logits, its settings, its history and its `uniform`, never on the
rows beside it. Order of work, as in vLLM:

    raw logits -> logprobs (if wanted)
    mask, logit_bias, min_tokens -> repetition, presence, frequency penalties
    temperature 0: argmax
    otherwise: / temperature -> min_p -> top_k -> top_p -> inverse CDF at `uniform`
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mainstem.core.request import SamplingParams, TokenLogprobs
from mainstem.core.step import Float32s, Int32s, SampleBatch, StartedSequence, Step

_CANDIDATES = 1024  # sorted first; a row whose top_p reaches beyond is sorted whole


class TokenMask(Protocol):
    """Which tokens may come next in one sequence (grammars)."""

    def allowed(self, output_ids: Sequence[int]) -> Int32s | None:
        """The ids allowed after `output_ids`, one at least; None: all."""
        ...


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
    """Turns logits into tokens; remembers, by sequence slot, what penalties and masks need."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}
        self._masks: dict[int, TokenMask] = {}

    def start(self, started: StartedSequence) -> None:
        """A sequence enters a slot; forget what was there."""
        self._histories[started.seq_slot] = _History(started)
        self._masks.pop(started.seq_slot, None)

    def set_mask(self, seq_slot: int, mask: TokenMask) -> None:
        """Bind a mask to the sequence that was started in this slot; its rows must be special."""
        assert seq_slot in self._histories, "a mask needs a started sequence"
        self._masks[seq_slot] = mask

    def sample(self, logits: Tensor, step: Step) -> Tensor:
        """Token ids [rows] int64 from logits [rows, vocab] fp32, which may be edited in place."""
        batch = step.sampling
        if batch.is_greedy:
            return logits.argmax(dim=-1)
        for row in batch.special_rows.tolist():
            self._edit(logits[row], int(step.sample_slots[row]))
        token_ids = logits.argmax(dim=-1)
        random_rows = np.flatnonzero(batch.temperature > 0)
        if len(random_rows):
            rows = torch.from_numpy(random_rows)
            scores = logits if len(rows) == len(logits) else logits[rows]
            token_ids[rows] = choose(scores, _Choice.of(batch, random_rows))
        for row in batch.special_rows.tolist():
            self._histories[int(step.sample_slots[row])].append(int(token_ids[row]))
        return token_ids

    def _edit(self, logits: Tensor, seq_slot: int) -> None:
        history = self._histories[seq_slot]
        mask = self._masks.get(seq_slot)
        allowed = None if mask is None else mask.allowed(history.output_ids)
        if allowed is not None:
            keep = torch.from_numpy(allowed).long()
            kept = logits[keep]
            logits.fill_(float("-inf"))
            logits[keep] = kept
        history.edit(logits)


class _Choice:
    """The settings of the rows that draw a random token."""

    def __init__(
        self,
        temperature: Float32s,
        top_p: Float32s,
        top_k: Int32s,
        min_p: Float32s,
        uniform: Float32s,
    ) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.uniform = uniform

    @classmethod
    def of(cls, batch: SampleBatch, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> "_Choice":
        return cls(
            batch.temperature[rows],
            batch.top_p[rows],
            batch.top_k[rows],
            batch.min_p[rows],
            batch.uniform[rows],
        )


def choose(logits: Tensor, choice: _Choice) -> Tensor:
    """Draw one token per row of logits [rows, vocab]."""
    scores = logits / torch.from_numpy(choice.temperature)[:, None]
    token_ids = torch.empty(len(scores), dtype=torch.long)
    vocab = scores.shape[1]
    is_cut = (choice.top_p < 1.0) | (choice.top_k < vocab)
    for row in range(len(scores)):
        draw = _draw_cut if is_cut[row] else _draw_any
        token_ids[row] = draw(scores[row], choice, row)
    return token_ids


def _draw_any(scores: Tensor, choice: _Choice, row: int) -> int:
    """No top_k, no top_p: the order of the tokens does not matter, nothing is sorted."""
    weights = torch.exp(scores - scores.max())
    min_p = float(choice.min_p[row])
    if min_p > 0:
        weights = weights.where(weights >= min_p, 0.0)
    return _invert(weights, float(choice.uniform[row]))


def _draw_cut(scores: Tensor, choice: _Choice, row: int) -> int:
    """Sort the likeliest tokens, all of them if those do not reach top_p, cut, draw."""
    top_k, top_p = int(choice.top_k[row]), float(choice.top_p[row])
    min_p = float(choice.min_p[row])
    count = min(len(scores), max(1, top_k))
    if top_k > _CANDIDATES:
        count = min(count, _CANDIDATES)
    while True:
        best, ids = torch.topk(scores, count, sorted=True)
        weights = torch.exp(best - best[0]).double()
        if min_p > 0:
            weights = weights.where(weights >= min_p, 0.0)
        is_all = count in (top_k, len(scores)) or bool(weights[-1] == 0)
        # the weight that top_p is a share of: of all tokens, or of those that top_k and min_p left
        total = weights.sum() if is_all else _total(scores, top_k, min_p)
        reached = torch.cumsum(weights, dim=0)
        if is_all or float(reached[-1]) >= top_p * float(total):
            break
        count = min(len(scores), top_k)
    # a token stays while the ones before it have not reached top_p
    weights = weights.where(reached - weights < top_p * total, 0.0)
    return int(ids[_invert(weights, float(choice.uniform[row]))])


def _total(scores: Tensor, top_k: int, min_p: float) -> Tensor:
    best = torch.topk(scores, top_k).values if top_k < len(scores) else scores
    weights = torch.exp(best - best.max()).double()
    return weights.where(weights >= min_p, 0.0).sum()


def _invert(weights: Tensor, uniform: float) -> int:
    """The first place where the running sum passes `uniform` of the whole."""
    reached = torch.cumsum(weights.double(), dim=0)
    place = int(torch.searchsorted(reached, uniform * float(reached[-1]), right=True))
    if place == len(weights):  # rounding: the draw fell behind the last token
        place -= 1
    return place if weights[place] > 0 else int(weights.nonzero()[-1])


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
