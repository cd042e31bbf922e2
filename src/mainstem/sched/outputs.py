"""Outputs for callers: new tokens, logprobs, the end of a sequence."""

import numpy as np

from mainstem.core.ids import SeqSlot
from mainstem.core.request import FinishReason, Output
from mainstem.core.step import Int32s, Step, StepResult
from mainstem.sched.sequence import Sequence
from mainstem.sched.table import SeqTable


class OutputMaker:
    """Makes Outputs of running sequences; every token is delivered once."""

    def __init__(self, table: SeqTable) -> None:
        self._table = table

    def stream(self, slots: Int32s, token_ids: Int32s) -> list[Output]:
        """Deliver one new token for each of many sequences. This is the fast path."""
        outputs: list[Output] = []
        sequences = self._table.sequences
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            sequence = sequences[slot]
            assert sequence is not None
            if sequence.logprobs or sequence.prompt_logprobs is not None:
                outputs.append(self.deliver(SeqSlot(slot), None))
                continue
            sequence.num_delivered += 1
            outputs.append(
                Output(
                    sequence.request.request_id,
                    sequence.index,
                    (token_id,),
                    num_cached_tokens=sequence.num_cached_tokens or 0,
                    num_dropped_tokens=sequence.num_dropped_tokens,
                )
            )
        return outputs

    def has_undelivered(self, slot: SeqSlot) -> bool:
        """Whether there are tokens that were not delivered yet."""
        return self._table.sequence(slot).num_delivered < self._table.num_read_back(slot)

    def drop_unread(self, slot: SeqSlot) -> None:
        """Forget the logprobs of a token that was not read back."""
        sequence = self._table.sequence(slot)
        del sequence.logprobs[self._table.num_read_back(slot) - sequence.num_delivered :]

    def deliver(
        self, slot: SeqSlot, reason: FinishReason | None, fault: str | None = None
    ) -> Output:
        """Deliver everything that one sequence produced since the last delivery."""
        table = self._table
        sequence = table.sequence(slot)
        known = int(table.num_read_back(slot))
        new = table.outputs[slot, sequence.num_delivered : known]
        output = make_output(sequence, new, reason, fault)
        sequence.num_delivered = known
        return output

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
                wanted, request = sequence.prompt_logprobs, sequence.request
                assert wanted is not None
                wanted.append(logprobs)
                if len(wanted) == len(request.prompt_ids) and request.sampling.prompt_logprobs:
                    complete.append(sequence)
        return complete


def make_output(
    sequence: Sequence, new: Int32s, reason: FinishReason | None, fault: str | None = None
) -> Output:
    """Make an Output with `new` tokens and the logprobs that were kept."""
    logprobs, sequence.logprobs = tuple(sequence.logprobs), []
    prompt_logprobs = None
    if sequence.prompt_logprobs is not None:
        prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
    return Output(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=tuple(new.tolist()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_dropped_tokens=sequence.num_dropped_tokens,
        fault=fault,
        is_form_fault=sequence.has_form_fault,
    )
