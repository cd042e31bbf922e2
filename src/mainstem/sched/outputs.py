"""What a step's result means for callers: new tokens, logprobs, the end of a sequence."""

import numpy as np

from mainstem.core.ids import RequestId, SeqSlot
from mainstem.core.request import FinishReason, Output, Request
from mainstem.core.step import Int32s, Step, StepResult
from mainstem.sched.sequence import Sequence
from mainstem.sched.table import SeqTable


class OutputMaker:
    """Makes Outputs, and keeps them until they are taken; every token is delivered once."""

    def __init__(self, table: SeqTable) -> None:
        self._table = table
        self._weights: tuple[str, ...] = ()  # the name of the version in force; none: unknown
        self._made: list[Output] = []
        self._ended: set[RequestId] = set()  # requests whose last Output was not taken yet

    def name_weights(self, version: str) -> None:
        """Tokens from now on are made by this version of the weights."""
        self._weights = (version,) if version else ()

    def _weights_of(self, sequence: Sequence) -> tuple[str, ...]:
        earlier = sequence.earlier_weights
        return earlier + self._weights if earlier else self._weights

    @property
    def has_outputs(self) -> bool:
        return bool(self._made)

    def has_last(self, request_id: RequestId) -> bool:
        """Whether the last Output of a request was not taken yet."""
        return request_id in self._ended

    def note_last(self, request_id: RequestId) -> None:
        """The last Output of a request was made."""
        self._ended.add(request_id)

    def take(self) -> list[Output]:
        """The Outputs since the last call."""
        self._ended.clear()
        made, self._made = self._made, []
        return made

    @property
    def weights(self) -> tuple[str, ...]:
        return self._weights

    def stream(self, slots: Int32s, token_ids: Int32s) -> None:
        """Deliver one new token for each of many sequences. This is the fast path."""
        made, sequences = self._made, self._table.sequences
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            sequence = sequences[slot]
            assert sequence is not None
            if sequence.logprobs or sequence.prompt_logprobs is not None:
                self.deliver(SeqSlot(slot), None)
                continue
            sequence.num_delivered += 1
            made.append(
                Output(
                    sequence.request.request_id,
                    sequence.index,
                    (token_id,),
                    num_cached_tokens=sequence.num_cached_tokens or 0,
                    num_dropped_tokens=(
                        0 if sequence.truncated is None else sequence.truncated.num_dropped
                    ),
                    weights=self._weights_of(sequence),
                )
            )

    def deliver(self, slot: SeqSlot, reason: FinishReason | None, fault: str | None = None) -> None:
        """Deliver everything that a running sequence produced since the last delivery."""
        table = self._table
        sequence = table.sequence(slot)
        known = int(table.num_read_back(slot))
        self._make(sequence, table.outputs[slot, sequence.num_delivered : known], reason, fault)
        sequence.num_delivered = known

    def deliver_waiting(self, sequence: Sequence, reason: FinishReason, fault: str | None) -> None:
        """Deliver the rest of a sequence that ends while it waits."""
        self._make(sequence, sequence.output_ids[sequence.num_delivered :], reason, fault)

    def refuse(self, request: Request, reason: FinishReason, fault: str | None = None) -> None:
        """Deliver the end of a request that never had a sequence."""
        self._ended.add(request.request_id)
        for index in range(request.sampling.n):
            self._made.append(
                Output(request.request_id, index, (), finish_reason=reason, fault=fault)
            )

    def keep_logprobs(self, step: Step, result: StepResult) -> list[Sequence]:
        """Store a step's logprobs with their sequences until they are delivered. Returns the
        sequences whose prompt logprobs are now complete and useful to other sequences."""
        table = self._table
        for row, logprobs in result.logprobs.items():
            slot = int(step.sample_slots[row])
            if table.is_alive[slot]:
                table.sequence(slot).logprobs.append(logprobs)
        if not result.prompt_logprobs:
            return []
        complete: list[Sequence] = []
        owners = np.searchsorted(step.seq_starts, step.prompt_logprob_rows, side="right") - 1
        for seq_index, logprobs in zip(owners.tolist(), result.prompt_logprobs, strict=True):
            slot = int(step.seq_slots[seq_index])
            if table.is_alive[slot]:
                sequence = table.sequence(slot)
                assert sequence.prompt_logprobs is not None
                sequence.prompt_logprobs.found.append(logprobs)
                if sequence.prompt_logprobs.is_complete:
                    complete.append(sequence)
        return complete

    def keep_masses(self, step: Step, result: StepResult) -> None:
        """Store the attention to pages with the readers that asked for it."""
        for weighed, masses in zip(step.weighings, result.page_masses, strict=True):
            number = int(np.searchsorted(step.seq_starts, weighed.first_row, side="right")) - 1
            slot = int(step.seq_slots[number])
            weighing = self._table.sequence(slot).weighing if self._table.is_alive[slot] else None
            if weighing is not None:
                weighing.add(masses)

    def _make(
        self, sequence: Sequence, new: Int32s, reason: FinishReason | None, fault: str | None
    ) -> None:
        """Make an Output with `new` tokens and the logprobs that were kept."""
        logprobs, sequence.logprobs = tuple(sequence.logprobs), []
        collected, truncated = sequence.prompt_logprobs, sequence.truncated
        if collected is not None:
            collected.is_dropped = True
            sequence.prompt_logprobs = None
        output = Output(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=tuple(new.tolist()),
            logprobs=logprobs,
            prompt_logprobs=None if collected is None else tuple(collected.found),
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_dropped_tokens=0 if truncated is None else truncated.num_dropped,
            fault=fault,
            is_form_fault=sequence.form is not None and sequence.form.is_broken,
            weights=self._weights_of(sequence),
        )
        self._made.append(output)
