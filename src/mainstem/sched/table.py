"""Counters of running sequences, one array per counter, one row (slot) per sequence.

    tokens   |<------ prompt ------>|<--- output --->|
             |<--- computed --->|                    ^ total
                                    ^ prefill_end: from here on one token a step, a decode

While a step is in flight, `computed` and `total` are ahead of what the host knows: the step's
samples are counted in `total` before they are read back (`pending`).
"""

from dataclasses import replace
from typing import overload

import numpy as np

from mainstem.core.ids import SeqSlot
from mainstem.core.request import Delivery
from mainstem.core.step import Bools, Bytes, Float32s, Int32s, Int64s, SampleBatch, StepId
from mainstem.sched.form import AnswerForm
from mainstem.sched.random import noise_keys
from mainstem.sched.sequence import SeqState, Sequence

MAX_FAST_STOPS = 4  # stop ids compared in one vector operation; a sequence with more needs a lookup
NO_TOKEN = np.int32(-1)  # fills the unused places of `stop_ids`; no real id is negative
NO_ROWS = -1  # a sequence without a row slot


class SeqTable:
    """State of running sequences in arrays; grows as needed, so there is no request limit."""

    def __init__(self, vocab_size: int, initial_slots: int = 64) -> None:
        self._vocab_size = vocab_size
        self.sequences: list[Sequence | None] = []
        self._free_slots: list[int] = []
        size = 0
        self.prompt_len: Int32s = np.zeros(size, np.int32)
        self.total: Int32s = np.zeros(size, np.int32)
        self.computed: Int32s = np.zeros(size, np.int32)
        self.prefill_end: Int32s = np.zeros(size, np.int32)  # tokens it had when it (re)started
        self.pending: Int32s = np.zeros(size, np.int32)  # samples not read back yet
        self.sample_row: Int32s = np.zeros(size, np.int32)  # row of the latest sample in its step
        self.last_token: Int32s = np.zeros(size, np.int32)
        self.last_step: Int64s = np.zeros(size, np.int64)  # the last step that used the slot
        self.priority: Int64s = np.zeros(size, np.int64)
        self.arrival: Int64s = np.zeros(size, np.int64)
        self.max_total: Int32s = np.zeros(size, np.int32)
        self.expected_total: Int32s = np.zeros(size, np.int32)
        self.min_output: Int32s = np.zeros(size, np.int32)
        self.stop_ids: Int32s = np.zeros((size, MAX_FAST_STOPS), np.int32)
        self.has_many_stops: Bools = np.zeros(size, np.bool_)
        self.is_alive: Bools = np.zeros(size, np.bool_)
        # whether the host must read a sample before the sequence's next step
        self.is_sync: Bools = np.zeros(size, np.bool_)
        self.is_streaming: Bools = np.zeros(size, np.bool_)
        self.num_pages: Int32s = np.zeros(size, np.int32)
        # recurrent layers: the slot with the sequence's state, the slot it writes, and a second
        # one, if any, with the state at the end of its last full page
        self.state_read: Int32s = np.zeros(size, np.int32)
        self.state_own: Int32s = np.zeros(size, np.int32)
        self.state_spare: Int32s = np.zeros(size, np.int32)
        # its row slot, if any, and the number of tokens in the state that it reads, without them
        self.row_slot: Int32s = np.zeros(size, np.int32)
        self.row_base: Int32s = np.zeros(size, np.int32)
        # windowed parts of pages: it needs those of the pages from number `part_first` up to
        # `part_end`
        self.part_first: Int32s = np.zeros(size, np.int32)
        self.part_end: Int32s = np.zeros(size, np.int32)
        self.temperature: Float32s = np.zeros(size, np.float32)
        self.top_p: Float32s = np.zeros(size, np.float32)
        self.top_k: Int32s = np.zeros(size, np.int32)
        self.min_p: Float32s = np.zeros(size, np.float32)
        self.seed: Int64s = np.zeros(size, np.int64)
        self.edits_logits: Bools = np.zeros(size, np.bool_)
        self.has_mask: Bools = np.zeros(size, np.bool_)
        self.num_logprobs: Int32s = np.zeros(size, np.int32)
        self.wants_logprobs: Bools = np.zeros(size, np.bool_)
        self._vectors = [
            name for name, value in vars(self).items() if isinstance(value, np.ndarray)
        ]
        self.page_table: Int32s = np.zeros((size, 16), np.int32)
        self.outputs: Int32s = np.zeros((size, 32), np.int32)
        # sampling settings of the last step's slots, kept until a sequence enters
        self._kept_samples: tuple[bytes, SampleBatch] | None = None
        self._grow_slots(initial_slots)

    @property
    def num_used(self) -> int:
        return len(self.sequences) - len(self._free_slots)

    def enter(
        self, sequence: Sequence, pages: Int32s, num_cached: int, expected_output: int
    ) -> SeqSlot:
        """Give a waiting sequence a slot; `num_cached` of its tokens are in `pages` already."""
        if not self._free_slots:
            self._grow_slots(max(64, len(self.sequences)))
        self._kept_samples = None
        slot = SeqSlot(self._free_slots.pop())
        self.row_slot[slot] = NO_ROWS
        request, sampling = sequence.request, sequence.request.sampling
        num_prompt, num_output = len(request.prompt_ids), len(sequence.output_ids)
        self.sequences[slot] = sequence
        self.prompt_len[slot] = num_prompt
        self.total[slot] = num_prompt + num_output
        self.computed[slot] = num_cached
        self.prefill_end[slot] = num_prompt + num_output
        self.pending[slot] = 0
        self.last_step[slot] = -1
        self.priority[slot], self.arrival[slot] = request.priority, sequence.arrival
        self.max_total[slot] = num_prompt + sequence.max_output
        self.expected_total[slot] = num_prompt + expected_output
        self.min_output[slot] = sampling.min_tokens
        stops = request.stop_ids
        self.has_many_stops[slot] = len(stops) > MAX_FAST_STOPS
        self.stop_ids[slot] = NO_TOKEN
        if len(stops) <= MAX_FAST_STOPS:
            self.stop_ids[slot, : len(stops)] = stops
        self.is_alive[slot] = True
        self.is_sync[slot] = request.must_see_each_token
        self.is_streaming[slot] = request.delivery is Delivery.EACH_STEP
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k if sampling.top_k > 0 else self._vocab_size
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sequence.seed
        self.edits_logits[slot] = sampling.edits_logits
        self.has_mask[slot] = sequence.form is not None
        self.num_logprobs[slot] = sampling.logprobs or 0
        self.wants_logprobs[slot] = sampling.logprobs is not None
        self._widen_pages(len(pages))
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        if num_output:
            self._widen_outputs(num_output)
            self.outputs[slot, :num_output] = sequence.output_ids
            self.last_token[slot] = sequence.output_ids[-1]
        else:
            self.last_token[slot] = request.prompt_ids[-1]
        sequence.slot, sequence.state = slot, SeqState.RUNNING
        return slot

    def leave(self, slot: SeqSlot) -> Int32s:
        """Free the slot; returns the pages it had."""
        pages = self.pages(slot)
        sequence = self.sequences[slot]
        assert sequence is not None
        sequence.slot = None
        self.sequences[slot] = None
        self.is_alive[slot] = False
        self._free_slots.append(slot)
        return pages

    def clear(self) -> None:
        """Free every slot, even after an interrupted `enter` or `leave`."""
        for sequence in self.sequences:
            if sequence is not None:
                sequence.slot = None
        self.sequences[:] = [None] * len(self.sequences)
        self.is_alive[:] = False
        self._free_slots[:] = range(len(self.sequences) - 1, -1, -1)

    def expect_remaining(self, slots: Int32s, at_least: int) -> Int32s:
        """Expected output tokens to come: at least `at_least`, but at most what is left of the
        sequence's limit."""
        likely = np.maximum(self.expected_total[slots] - self.total[slots], at_least)
        remaining: Int32s = np.minimum(likely, self.max_total[slots] - self.total[slots])
        return remaining

    def sequence(self, slot: int) -> Sequence:
        found = self.sequences[slot]
        assert found is not None
        return found

    def pages(self, slot: SeqSlot) -> Int32s:
        return self.page_table[slot, : self.num_pages[slot]].copy()

    def output_ids(self, slot: int) -> Int32s:
        """The tokens sampled and read back so far."""
        return self.outputs[slot, : self.num_read_back(slot)].copy()

    def tokens(self, slot: int, begin: int, end: int) -> Int32s:
        """Known tokens of a sequence, prompt and output, from place `begin` on."""
        num_prompt = int(self.prompt_len[slot])
        if begin >= num_prompt:
            return self.outputs[slot, begin - num_prompt : end - num_prompt].copy()
        prompt_ids = self.sequence(slot).request.prompt_ids
        if end <= num_prompt:
            return prompt_ids[begin:end]
        return np.concatenate([prompt_ids[begin:], self.outputs[slot, : end - num_prompt]])

    @overload
    def num_read_back(self, slots: int) -> int: ...
    @overload
    def num_read_back(self, slots: Int32s) -> Int32s: ...
    def num_read_back(self, slots: int | Int32s) -> int | Int32s:
        """Output tokens whose ids are known here; `pending` more are on the device."""
        count = self.total.take(slots)  # a third of the time of self.total[slots]
        count -= self.prompt_len.take(slots)
        count -= self.pending.take(slots)
        return count

    def append_pages(self, slots: Int32s, pages: Int32s) -> None:
        """Put pages[i] at the end of slots[i]'s table; `slots` are distinct."""
        column = self.num_pages[slots]
        self._widen_pages(int(column.max()) + 1)
        self.page_table[slots, column] = pages
        self.num_pages[slots] += 1

    def move_on(self, step_id: StepId, slots: Int32s, counts: Int32s, sample_slots: Int32s) -> None:
        """Count the tokens of a step: it computes `counts` more tokens of `slots`, and samples one
        token for some slots."""
        at, sampled = slots.astype(np.intp), sample_slots.astype(np.intp)  # numpy's index type
        self.computed[at] += counts
        self.last_step[at] = step_id
        self.total[sampled] += 1
        self.pending[sampled] += 1
        self.sample_row[sampled] = np.arange(len(sampled), dtype=np.int32)

    def append_samples(self, slots: Int32s, token_ids: Int32s) -> None:
        """Append samples that were read back; `total` counts them already."""
        if len(slots) == 0:
            return
        at = slots.astype(np.intp)
        column = self.num_read_back(slots)
        self._widen_outputs(int(column.max()) + 1)
        self.outputs[at, column] = token_ids
        self.last_token[at] = token_ids
        self.pending[at] -= 1

    def is_stop(self, slots: Int32s, token_ids: Int32s) -> Bools:
        """Which of these new samples end their sequence."""
        stops: Bools = np.zeros(len(slots), np.bool_)
        stops[(self.stop_ids.take(slots, axis=0) == token_ids[:, None]).nonzero()[0]] = True
        for row in self.has_many_stops.take(slots).nonzero()[0]:
            stops[row] = int(token_ids[row]) in self.sequence(slots[row]).request.stop_ids
        for row in stops.nonzero()[0]:
            stops[row] = self.num_read_back(slots[row]) > self.min_output[slots[row]]
        return stops

    def sample_batch(self, slots: Int32s) -> SampleBatch:
        """Return how the next token of each of these slots is chosen."""
        seen = slots.tobytes()
        if self._kept_samples is None or self._kept_samples[0] != seen:
            self._kept_samples = (seen, self._settings(slots))
        batch = self._kept_samples[1]
        if len(batch.mask_rows):
            batch = replace(batch, masks=self._masks(slots[batch.mask_rows]))
        if batch.temperature.any():
            num_output = self.total[slots] - self.prompt_len[slots]
            batch = replace(batch, noise_keys=noise_keys(self.seed[slots], num_output))
        return batch

    def _settings(self, slots: Int32s) -> SampleBatch:
        """Return the settings that are the same for all tokens: everything except masks and noise
        keys."""
        temperature = self.temperature[slots]
        special = self.edits_logits[slots].nonzero()[0].astype(np.int32)
        masked = self.has_mask[slots].nonzero()[0].astype(np.int32)
        wants_logprobs = self.wants_logprobs[slots]
        is_edited = len(special) or len(masked)
        return SampleBatch(
            temperature=temperature,
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            noise_keys=np.zeros(len(slots), np.int64),
            num_logprobs=self.num_logprobs[slots],
            wants_logprobs=wants_logprobs,
            special_rows=special,
            is_greedy=not (is_edited or temperature.any() or wants_logprobs.any()),
            mask_rows=masked,
            masks=np.zeros((0, -(-self._vocab_size // 8)), np.uint8),
        )

    def _masks(self, slots: Int32s) -> Bytes:
        """The tokens that may come next in sequences with a grammar, packed as in SampleBatch."""
        return np.stack(
            [self._form(slot).allowed_tokens(self.output_ids(slot)) for slot in slots.tolist()]
        )

    def form_fault(self, slot: SeqSlot) -> str | None:
        """Return why a sequence with a grammar cannot continue; None if it can."""
        return self._form(slot).fault(self.output_ids(slot))

    def _form(self, slot: SeqSlot) -> AnswerForm:
        form = self.sequence(slot).form
        assert form is not None
        assert self.pending[slot] == 0, "a mask needs to know every token before it"
        return form

    def _widen_pages(self, width: int) -> None:
        if width > self.page_table.shape[1]:
            self.page_table = _widened(self.page_table, width)

    def _widen_outputs(self, width: int) -> None:
        if width > self.outputs.shape[1]:
            self.outputs = _widened(self.outputs, width)

    def _grow_slots(self, count: int) -> None:
        old = len(self.sequences)
        for name in [*self._vectors, "page_table", "outputs"]:
            array = getattr(self, name)
            grown = np.zeros((old + count, *array.shape[1:]), array.dtype)
            grown[:old] = array
            setattr(self, name, grown)
        self.sequences += [None] * count
        self._free_slots += range(old + count - 1, old - 1, -1)


def _widened(matrix: Int32s, width: int) -> Int32s:
    """Return a copy with at least `width` columns. The width is doubled, so that the total cost of
    copies is linear."""
    wider = np.zeros((matrix.shape[0], max(width, 2 * matrix.shape[1])), matrix.dtype)
    wider[:, : matrix.shape[1]] = matrix
    return wider
