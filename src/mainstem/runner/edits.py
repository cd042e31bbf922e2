"""Edits logits for each sequence: bias, stop tokens that are not allowed yet, penalties.

The token ids of each sequence stay on the device, in one row. Sampled ids are appended there,
without a copy to the host:

    ids [rows, width]   | prompt ids, each once | output ids in order | unused |
                        0                  num_prompt            num_ids

The host knows only how long each row is. Work grows with the number of these ids, not with the
vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mainstem.core.request import SamplingParams
from mainstem.core.step import Int32s, Int64s, StartedSequence
from mainstem.runner.uploads import Uploads

_PROMPT = 1 << 24  # added to the count of a token that is in the prompt; output counts are smaller
_COUNTED_ROWS = 32  # sequences counted at once; each needs one counter per token id
_FIRST_ROWS, _FIRST_WIDTH = 8, 256


@dataclass(slots=True)
class _EditedSequence:
    sampling: SamplingParams
    stop_ids: Int64s
    bias_ids: Int64s
    num_output: int
    row: int | None = None  # row of `ids`; None: no penalties
    num_prompt: int = 0
    num_ids: int = 0

    @property
    def bars_stops(self) -> bool:
        return self.num_output < self.sampling.min_tokens


class LogitEdits:
    """Edits by sequence slot. Call `apply` before a step's tokens are chosen, `append` after."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._device = device = uploads.device
        self._sequences: dict[int, _EditedSequence] = {}
        self._free_rows: list[int] = []
        self._ids = torch.zeros((0, _FIRST_WIDTH), dtype=torch.int32, device=device)
        self._counts: Tensor | None = None  # [_COUNTED_ROWS, vocab], zero between calls
        self._minus_infinity = torch.tensor(float("-inf"), device=device)

    def start(self, started: StartedSequence) -> None:
        """Begin a sequence in a slot, and forget the slot's previous sequence."""
        old = self._sequences.pop(started.seq_slot, None)
        if old is not None and old.row is not None:
            self._free_rows.append(old.row)
        sampling = started.sampling
        sequence = _EditedSequence(
            sampling,
            np.array(started.stop_ids, np.int64),
            np.array(list(sampling.logit_bias or ()), np.int64),
            len(started.output_ids),
        )
        if sampling.has_penalties:
            prompt = np.unique(started.prompt_ids)
            if sampling.repetition_penalty == 1.0:
                prompt = prompt[:0]  # other penalties count only the output
            ids = np.concatenate((prompt, started.output_ids))
            sequence.row = self._take_row(len(ids))
            sequence.num_prompt, sequence.num_ids = len(prompt), len(ids)
            self._ids[sequence.row, : len(ids)].copy_(self._uploads.send(ids))
        self._sequences[started.seq_slot] = sequence

    def apply(self, logits: Tensor, rows: Int32s, seq_slots: Int32s) -> None:
        """Edit rows `rows` of logits [*, vocab] in place; row rows[i] is of slot seq_slots[i]."""
        pairs = [(row, self._sequences[slot]) for row, slot in _zipped(rows, seq_slots)]
        biased = [(row, seq) for row, seq in pairs if len(seq.bias_ids)]
        if biased:
            where = self._places([(row, seq.bias_ids) for row, seq in biased])
            values = [list((seq.sampling.logit_bias or {}).values()) for _, seq in biased]
            bias = self._uploads.send(np.concatenate(values).astype(np.float32))
            logits.index_put_(where, logits[where] + bias)
        vocab_size = logits.shape[1]  # a tokenizer may have end tokens that the model does not have
        barred = [
            (row, seq.stop_ids[seq.stop_ids < vocab_size]) for row, seq in pairs if seq.bars_stops
        ]
        if barred:
            logits.index_put_(self._places(barred), self._minus_infinity)
        penalised = [(row, seq) for row, seq in pairs if seq.num_ids]
        for first in range(0, len(penalised), _COUNTED_ROWS):
            self._penalise(logits, penalised[first : first + _COUNTED_ROWS])

    def append(self, token_ids: Tensor, rows: Int32s, seq_slots: Int32s) -> None:
        """Append token_ids[rows[i]], still on the device, to the sequence in slot seq_slots[i]."""
        places = []
        for row, slot in _zipped(rows, seq_slots):
            sequence = self._sequences[slot]
            sequence.num_output += 1
            if sequence.row is not None:
                places.append((row, sequence.row, sequence.num_ids))
                sequence.num_ids += 1
        if places:
            self._widen(max(place for _, _, place in places) + 1)
            sources, targets, columns = self._uploads.send(np.array(places, np.int64).T.copy())
            said = token_ids.index_select(0, sources).to(torch.int32)
            self._ids.index_put_((targets, columns), said)

    def _penalise(self, logits: Tensor, penalised: list[tuple[int, _EditedSequence]]) -> None:
        """Apply penalties. An id that a sequence has twice is written twice, with the same
        value."""
        table = np.array(
            [(row, seq.row, seq.num_prompt, seq.num_ids) for row, seq in penalised], np.int64
        )
        width = int(table[:, 3].max())
        columns = self._uploads.send(table.T.copy())
        rows, _, num_prompt, num_ids = (column[:, None] for column in columns)
        ids = self._ids[:, :width].index_select(0, columns[1]).long()
        place = torch.arange(width, device=self._device)
        is_there = place < num_ids
        ids = torch.where(is_there, ids, ids[:, :1])  # padding: the row's first id, counted 0 times
        said = self._count(ids, torch.where(place < num_prompt, _PROMPT, 1) * is_there, logits)
        times = (said % _PROMPT).float()
        settings = [
            (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
            for s in (seq.sampling for _, seq in penalised)
        ]
        array = np.array(settings, np.float32).T.copy()
        factor, per_time, once = (c[:, None] for c in self._uploads.send(array))
        values = logits[rows, ids]
        values = torch.where(values > 0, values / factor, values * factor)
        values -= torch.where(times > 0, per_time * times + once, 0.0)
        logits.index_put_((rows, ids), values)

    def _count(self, ids: Tensor, added: Tensor, logits: Tensor) -> Tensor:
        """For each id of a row: the sum of `added` over all places of the row with the same id."""
        if self._counts is None:
            size = (_COUNTED_ROWS, logits.shape[1])
            self._counts = torch.zeros(size, dtype=torch.int32, device=self._device)
        counts = self._counts[: len(ids)]
        counts.scatter_add_(1, ids, added.to(torch.int32))
        said = counts.gather(1, ids)
        counts.scatter_(1, ids, 0)
        return said

    def _places(self, rows_and_ids: list[tuple[int, Int64s]]) -> tuple[Tensor, Tensor]:
        """Return row and column of each id."""
        rows = np.repeat([row for row, _ in rows_and_ids], [len(ids) for _, ids in rows_and_ids])
        table = np.stack((rows, np.concatenate([ids for _, ids in rows_and_ids])))
        places = self._uploads.send(table.astype(np.int64))
        return places[0], places[1]

    def _take_row(self, num_ids: int) -> int:
        self._widen(num_ids)
        if not self._free_rows:
            old = len(self._ids)
            more = max(old, _FIRST_ROWS)
            self._ids = torch.cat((self._ids, self._ids.new_zeros(more, self._ids.shape[1])))
            self._free_rows = list(range(old, old + more))
        return self._free_rows.pop()

    def _widen(self, width: int) -> None:
        rows, old = self._ids.shape
        if width > old:
            self._ids = torch.cat((self._ids, self._ids.new_zeros(rows, max(width, old))), dim=1)


def _zipped(rows: Int32s, seq_slots: Int32s) -> list[tuple[int, int]]:
    return list(zip(rows.tolist(), seq_slots.tolist(), strict=True))
