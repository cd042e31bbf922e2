"""The scheduler takes requests, makes Steps, and takes their results.

    submit -> waiting -> running -> done          next_step: decodes, then prompt chunks, then
                 ^---------'  preempted           new sequences while pages and tokens last

One step may be in flight while the next is made; the next one takes the samples of the
first from the device.
A sequence that ends while it is part of a step in flight keeps slot and pages until that step
commits.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from time import perf_counter, sleep

import numpy as np

from mainstem.core.config import SchedConfig, Share, StoreConfig
from mainstem.core.errors import InvalidRequest, OutOfPages
from mainstem.core.events import (
    EventBus,
    PromptTruncated,
    RequestSubmitted,
    SequenceFinished,
    SequencePreempted,
    StepFailed,
    StepFinished,
    StepsResized,
)
from mainstem.core.ids import RequestId, SeqSlot
from mainstem.core.request import FinishReason, Output, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import Bools, Int32s, Step, StepId, StepResult
from mainstem.kv.store import KVStore
from mainstem.sched.batching import StepWork, build_step
from mainstem.sched.fetching import Fetching
from mainstem.sched.intake import Intake
from mainstem.sched.loading import Loader
from mainstem.sched.lookahead import OutputLengths, PlannedOrder
from mainstem.sched.outputs import OutputMaker, make_output
from mainstem.sched.prompt_work import PromptWork
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.retry import Retry
from mainstem.sched.running import RunningSet
from mainstem.sched.sequence import SeqState, Sequence
from mainstem.sched.spans import SpanBuilder, WorthSharing, share_all, share_none
from mainstem.sched.starting import Starter
from mainstem.sched.step_size import StepSize
from mainstem.sched.truncation import DEFAULT_RULES, TruncationRules

REST_S = 0.0003
MAKE_S = 0.006  # a step is made this long before the device needs it
LOOK_S = 0.001  # between two checks of disk reads
NO_LOADS = np.empty(0, np.int32)

_End = tuple[SeqSlot, FinishReason, str | None]  # the slot that ends, how, and the error


class Scheduler:
    """Decides what runs next; owns the sequences and, through the store, their pages."""

    def __init__(  # noqa: PLR0913  # the parts it is joined from
        self,
        config: SchedConfig,
        store: KVStore,
        vocab_size: int,
        max_model_len: int,
        bus: EventBus,
        worth_sharing: WorthSharing = share_all,
        max_step_tokens: int | None = None,
        fetching: Fetching | None = None,
        *,
        truncation: TruncationRules = DEFAULT_RULES,
        span_align_tokens: int | None = None,
    ) -> None:
        """`max_step_tokens` is the size of the runner's buffers; None: no limit. `fetching` decides
        what is loaded from tiers below the device; None: nothing is loaded."""
        self._config = config
        self._size = StepSize(config.chunk_tokens, max_step_tokens)
        self._store = self.store = store
        self._page_size = store.page_size
        self._bus = bus
        # a sequence must fit into all pages together
        self.max_model_len = min(max_model_len, store.num_pages * store.page_size)
        self._intake = Intake(config, store, vocab_size, self.max_model_len, truncation)
        self._queue = WaitingQueue()
        store.watch_queue(self._queue.awaited)
        self._order = PlannedOrder()
        self._lengths = OutputLengths()
        self._running = RunningSet(store, self._queue, self._order, vocab_size)
        self._table = self._running.table
        self._loader = Loader(self._running, self._queue, self._lengths, fetching)
        self._starter = Starter(
            self._running,
            self._queue,
            self._lengths,
            self._order,
            self._loader,
            bus,
            config.max_seqs,
        )
        self._output_maker = OutputMaker(self._table)
        policy = worth_sharing if config.share is Share.READS else share_none
        self._spans = SpanBuilder(store.page_size, policy, config.span_levels, span_align_tokens)
        self._sequences: dict[RequestId, list[Sequence]] = {}
        self._step_ids = count()
        self._in_flight: Step | None = None
        # pages that a step copies or moves, leased until it commits
        self._copy_sources: list[tuple[StepId, Int32s]] = []
        self._outputs: list[Output] = []  # outputs that were not taken yet
        # requests that ended, whose last Output is in `_outputs`
        self._undelivered: set[RequestId] = set()
        self._retry = Retry(self._sequences, self._queue, self._running, self._end_with_fault)
        self._host_s = 0.0

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest if it can never run."""
        if request.request_id in self._sequences or request.request_id in self._undelivered:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already running")
        if request.plan_place is not None and not 0 <= request.plan_place < len(self._order):
            raise InvalidRequest("plan_place", f"{request.plan_place} was not announced")
        taken = self._intake.take(request)
        self._sequences[request.request_id] = taken.sequences
        for sequence in taken.sequences:
            self._wait(sequence)
        num_prompt, truncation = len(taken.request.prompt_ids), taken.truncation
        self._bus.publish(RequestSubmitted(request.request_id, num_prompt))
        if truncation is not None:
            self._bus.publish(
                PromptTruncated(
                    request.request_id, truncation.policy, truncation.num_dropped, num_prompt
                )
            )

    def expect(self, shared_with_next: Int32s) -> int:
        """Announce a known workload in the order it will be submitted: how many leading tokens
        each prompt shares with the one after it. Returns the first `plan_place`.

        Pages that no later prompt can use are then evicted first.
        """
        return self._order.announce(shared_with_next)

    def abort(self, request_id: RequestId) -> None:
        """Stop all answers to a request; ignores unknown and finished requests."""
        for sequence in list(self._sequences.get(request_id, ())):
            self._end_early(sequence, FinishReason.ABORT)

    def stop(self, request_id: RequestId, index: int) -> None:
        """End one answer as if it had met a stop token (the caller found a stop string)."""
        for sequence in list(self._sequences.get(request_id, ())):
            if sequence.index == index:
                self._end_early(sequence, FinishReason.STOP)
        left = self._sequences.get(request_id, ())
        if all(sequence.weighing is not None for sequence in left):  # only readers are left
            self.abort(request_id)

    @property
    def step_tokens(self) -> int:
        """The token budget of a step; smaller after a step that ran out of device memory. Many
        decodes may exceed it if the runner's buffers have no limit."""
        return self._size.tokens

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        ending = self._running.has_leaving or self._in_flight is not None
        return bool(self._sequences or self._outputs or ending)

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self, has_ended: Callable[[], bool] = lambda: True) -> Step | None:
        """Return the next step, or None if nothing can run now, perhaps until the step in flight
        commits. `has_ended` says whether the device has finished the step in flight. After an
        error, call `recover`."""
        self._look_at_reads(has_ended)
        begin = perf_counter()
        self._queue.unpark(self._store.poll(self._loader.lead_s(self._in_flight)))
        self._queue.unpark(self._loader.settled())
        if not self._make_way():
            return None
        decodes = self._grow_decodes()
        if decodes is None:
            return None
        work = PromptWork(self._size.prompt_tokens(len(decodes)))
        self._loader.load_ahead(work)
        self._starter.fill(work)
        self._store.loader.prefetch()
        load_ids = np.unique(np.concatenate(work.loads)) if work.loads else NO_LOADS
        started = tuple(work.started)
        batch = StepWork(decodes, work.chunks, started, work.copies, work.moves, load_ids)
        if batch.num_seqs == 0:
            return None
        step_id, tree = StepId(next(self._step_ids)), self._running.tree
        step = build_step(step_id, batch, self._table, tree, self._spans)
        self._store.saver.launched(step.step_id)
        if sources := work.sources():
            self._copy_sources.append((step.step_id, np.array(sources, np.int32)))
        self._in_flight = step
        self._loader.note_start(step.step_id)
        self._host_s += perf_counter() - begin
        return step

    def commit(
        self, step: Step, result: StepResult, device_s: float = 0.0, launch_s: float = 0.0
    ) -> None:
        """Take in a step's tokens; `take_outputs` then has the new outputs. `launch_s` is the host
        time of launching it. After an error, `recover` completes what was left undone."""
        begin = perf_counter() - launch_s
        table = self._table
        if self._in_flight is step:
            self._in_flight = None
        self._store.saver.settle(step.step_id)
        self._loader.note_end(step, device_s)
        slots, token_ids = step.sample_slots, result.token_ids
        is_alive = table.is_alive[slots]
        if not is_alive.all():
            slots, token_ids = slots[is_alive], token_ids[is_alive]
        for sequence in self._output_maker.keep_logprobs(step, result):
            assert sequence.prompt_logprobs is not None
            if sequence.chain is not None:
                self._store.keep_logprobs(sequence.chain, sequence.prompt_logprobs)
        self._take_masses(step, result)
        table.append_samples(slots, token_ids)
        self._running.name_filled(slots)
        is_done, ends = self._ends(slots)
        is_streaming = table.is_streaming[slots] & ~is_done
        self._outputs += self._output_maker.stream(slots[is_streaming], token_ids[is_streaming])
        for slot, reason, fault in ends:
            self._finish(slot, reason, fault)
        self._running.settle(step.step_id)
        self._release_sources(step.step_id)
        if self._retry.is_in_doubt:
            self._retry.note_good(slots)
        if not self._size.is_full and self._size.note_good():
            self._bus.publish(StepsResized(self._size.tokens))
        self._publish_step(step, device_s, self._host_s + perf_counter() - begin)
        self._host_s = 0.0

    def _ends(self, slots: Int32s) -> tuple[Bools, list[_End]]:
        """Return which of these slots end with the token that was just read back, and how."""
        table = self._table
        is_stop = table.is_stop(slots, table.last_token[slots])
        is_full = table.total[slots] - table.pending[slots] >= table.max_total[slots]
        is_done = is_stop | is_full
        ends: list[_End] = []
        for row in is_done.nonzero()[0].tolist():
            reason = FinishReason.STOP if is_stop[row] else FinishReason.LENGTH
            ends.append((SeqSlot(int(slots[row])), reason, None))
        for row in (table.has_mask[slots] & ~is_done).nonzero()[0].tolist():
            slot = SeqSlot(int(slots[row]))
            if (fault := table.form_fault(slot)) is not None:
                is_done[row] = table.sequence(slot).has_form_fault = True
                ends.append((slot, FinishReason.ERROR, fault))
        return is_done, ends

    def recover(self) -> None:
        """After a failed or interrupted step: forget what it may have written to pages.

        Every sequence goes back to the queue with the tokens that were read back, and the device's
        cache is emptied; the next step tries again. A commit that had begun is completed: the
        tokens it read are delivered, and sequences that end with them end. All slots and pages are
        freed together, not one by one, since the interrupt may have come while some were being
        given back.
        """
        table = self._table
        self._in_flight = None
        with self._store.distrust():
            ran = self._in_state(SeqState.RUNNING)
            # a sequence without a slot was about to wait: its tokens are saved already
            slots = np.array([s.slot for s in ran if s.slot is not None], np.int32)
            table.total[slots] -= table.pending[slots]
            table.pending[slots] = 0
            for slot in slots.tolist():
                self._output_maker.drop_unread(slot)
            is_done, ends = self._ends(slots)
            for slot, reason, fault in ends:
                self._tell_end(slot, reason, fault)
            for slot in slots[~is_done].tolist():
                if table.is_streaming[slot] and self._output_maker.has_undelivered(slot):
                    self._outputs.append(self._output_maker.deliver(slot, None))
                self._write_down(table.sequence(slot), slot)
            preempted = [
                (s, 0 if s.slot is None else int(table.num_pages[s.slot]))
                for s in self._in_state(SeqState.RUNNING)
            ]
            self._copy_sources.clear()
            self._running.clear()
            self._store.reclaim()
            self._queue.refill(self._in_state(SeqState.WAITING))
            for sequence, num_pages in preempted:
                self._wait_again(sequence, num_pages)

    def fail(self, step: Step | None, fault: str) -> bool:
        """Recover from a step that failed, or could not be made (None), and look for the cause (see
        Retry). Returns whether one request is to blame."""
        blamed = self._retry.part_of(step)
        is_certain = self._retry.blame(blamed, fault)
        self.recover()
        self._retry.line_up()
        self._bus.publish(StepFailed(fault, len(blamed)))
        return is_certain

    @property
    def is_all_at_fault(self) -> bool:
        """Whether every request has failed in a step of its own."""
        return self._retry.is_all_at_fault

    def shrink_steps(self) -> bool:
        """Halve the size of steps for a while; False: they cannot be smaller."""
        has_shrunk = self._size.shrink()
        if has_shrunk:
            self._bus.publish(StepsResized(self._size.tokens))
        return has_shrunk

    def close(self) -> None:
        """Drop every sequence, without Outputs; nothing may be in flight. Pages filled by
        successful steps are saved."""
        self._in_flight = None
        self._running.settle(self._running.last_step())
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._outputs.clear()
        self._store.close()

    def take_outputs(self) -> list[Output]:
        """The Outputs since the last call."""
        self._undelivered.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    def snapshot(self) -> EngineSnapshot:
        """What is running and shared at this moment."""
        store = self._store
        return EngineSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_pages=store.num_pages,
            page_size=store.page_size,
            num_held_pages=store.num_held(),
            num_cached_pages=store.num_cached_pages,
            stems=self._running.tree.view(store.page_size),
            num_host_pages=store.stack.num_pages("host"),
            stored_page_bytes=store.stack.page_bytes,
            num_disk_pages=store.stack.num_pages("disk"),
            num_copies=store.num_copies,
            prompts=self._running.prompts(),
            num_unsaved_pages=store.saver.num_unsaved,
        )

    def change_store(self, config: StoreConfig) -> None:
        """Change which pages are loaded, and when a prompt may start on them."""
        if self._loader.fetching is not None:
            self._loader.fetching = replace(self._loader.fetching, config=config)

    def check(self) -> None:
        """Raise if anything is out of order; when idle, also if a page is still held."""
        self._store.check()
        self._running.check()
        if not self.has_work:
            assert self._store.num_held() == 0, "a page is still held"
            assert len(self._queue) == 0, "a sequence was forgotten in the queue"

    # --- what goes into a step ------------------------------------------------------------------

    def _make_way(self) -> bool:
        """Preempt running sequences if a suspect must be tried alone. False: no step can be made
        before the step in flight has ended, because steps do not overlap while a sequence is in
        doubt."""
        self._retry.end_if_nobody_else_is_left()
        if not self._retry.is_in_doubt:
            return True
        if self._in_flight is not None or self._running.has_leaving:
            return False
        if self._retry.must_clear_the_way():
            for slot in self._running.slots.tolist():
                self._preempt(SeqSlot(slot))
        return True

    def _grow_decodes(self) -> Int32s | None:
        """Return the slots that decode, each with a page for its token. Preempts if there are too
        few pages.

        Returns None if there are too few pages and a step is in flight, which must commit first.
        """
        table = self._table
        while True:
            running = self._running.slots
            ready = table.computed[running] >= table.prefill_end[running]
            ready &= table.total[running] < table.max_total[running]
            ready &= ~(table.is_sync[running] & (table.pending[running] > 0))
            decodes = self._size.choose(running[ready], table.last_step)
            full = decodes[table.computed[decodes] >= table.num_pages[decodes] * self._page_size]
            if len(full) == 0:
                return decodes
            try:
                pages = self._store.take(len(full))
            except OutOfPages:
                if self._in_flight is not None or self._running.has_leaving:
                    return None
                self._preempt(self._running.victim())
                continue
            table.append_pages(full, pages)
            return decodes

    # --- how sequences wait and end -------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        """Queue a sequence, and announce its pages to the store."""
        self._queue.push(sequence)
        if sequence.chain is not None:
            self._store.expect(sequence.queue_place, sequence.chain)

    def _finish(self, slot: SeqSlot, reason: FinishReason, fault: str | None = None) -> None:
        """End a running sequence: deliver its tokens, and free its slot as soon as no step uses
        it."""
        self._tell_end(slot, reason, fault)
        self._running.leave(slot, None if self._in_flight is None else self._in_flight.step_id)

    def _tell_end(self, slot: SeqSlot, reason: FinishReason, fault: str | None = None) -> None:
        table = self._table
        sequence = table.sequence(slot)
        if sequence.weighing is not None:
            self._end_reader(sequence, reason)
            return
        self._outputs.append(self._output_maker.deliver(slot, reason, fault))
        num_output = len(table.output_ids(slot))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.observe(num_output)
        self._close(sequence, reason, num_output)

    def _end_early(
        self, sequence: Sequence, reason: FinishReason, fault: str | None = None
    ) -> None:
        if sequence.state is SeqState.RUNNING:
            assert sequence.slot is not None
            self._finish(sequence.slot, reason, fault)
        elif sequence.state is SeqState.WAITING:
            if sequence.weighing is not None:
                self._end_reader(sequence, reason)
            else:
                undelivered = sequence.output_ids[sequence.num_delivered :]
                self._outputs.append(make_output(sequence, undelivered, reason, fault))
                self._close(sequence, reason, len(sequence.output_ids))
            self._queue.forget(sequence)
            self._store.dismiss(sequence.queue_place)

    def _end_with_fault(self, request_id: RequestId, fault: str) -> None:
        for sequence in list(self._sequences.get(request_id, ())):
            self._end_early(sequence, FinishReason.ERROR, fault)

    def _take_masses(self, step: Step, result: StepResult) -> None:
        """Record the attention to pages that sequences of a step asked for."""
        for weighed, masses in zip(step.weighings, result.page_masses, strict=True):
            number = int(np.searchsorted(step.seq_starts, weighed.first_row, side="right")) - 1
            slot = SeqSlot(int(step.seq_slots[number]))
            weighing = self._table.sequence(slot).weighing if self._table.is_alive[slot] else None
            if weighing is not None:
                weighing.add(masses)

    def _end_reader(self, reader: Sequence, reason: FinishReason) -> None:
        """After a sequence that weighed pages has ended, let the answers that wait for it start. If
        it failed or was stopped, the caller ends them as well."""
        request_id, weighing = reader.request.request_id, reader.weighing
        assert weighing is not None
        reader.state = SeqState.DONE
        answers = self._sequences[request_id]
        answers.remove(reader)
        self._retry.forget(reader)
        if not answers:
            del self._sequences[request_id]
            self._undelivered.add(request_id)
        elif reason is FinishReason.LENGTH:
            self._intake.settle(weighing, answers)
            for answer in answers:
                if answer.chain is not None:
                    self._store.expect(answer.queue_place, answer.chain)
            self._queue.unpark([weighing.key])

    def _close(self, sequence: Sequence, reason: FinishReason, num_output: int) -> None:
        sequence.state = SeqState.DONE
        request_id = sequence.request.request_id
        answers = self._sequences[request_id]
        answers.remove(sequence)
        if not answers:
            del self._sequences[request_id]
            self._undelivered.add(request_id)
        self._retry.forget(sequence)
        self._bus.publish(SequenceFinished(request_id, sequence.index, reason, num_output))

    def _preempt(self, slot: SeqSlot) -> None:
        """Take a sequence's pages. It starts again later, from the pages that are still cached."""
        sequence, num_pages = self._table.sequence(slot), int(self._table.num_pages[slot])
        self._write_down(sequence, slot)
        self._running.leave(slot, None)
        self._wait_again(sequence, num_pages)

    def _write_down(self, sequence: Sequence, slot: SeqSlot) -> None:
        """Save the tokens that were read back, because the sequence loses its slot."""
        sequence.output_ids = self._table.output_ids(slot)
        sequence.reset_prompt_logprobs()

    def _wait_again(self, sequence: Sequence, num_pages: int) -> None:
        sequence.state = SeqState.WAITING
        sequence.num_to_compute = None
        sequence.num_pages_then = -1
        self._wait(sequence)
        request_id = sequence.request.request_id
        self._bus.publish(SequencePreempted(request_id, sequence.index, num_pages))

    def _in_state(self, state: SeqState) -> list[Sequence]:
        answers = [sequence for answers in self._sequences.values() for sequence in answers]
        return [sequence for sequence in answers if sequence.state is state]

    def _release_sources(self, step_id: StepId) -> None:
        """End the leases on pages that steps up to this one copied or moved."""
        while self._copy_sources and self._copy_sources[0][0] <= step_id:
            for source in self._copy_sources.pop(0)[1]:
                self._store.release(source[None])

    # --- tiers below the device -----------------------------------------------------------------

    def _look_at_reads(self, has_ended: Callable[[], bool]) -> None:
        """Delay the next step while the device is busy anyway. Pages that arrive from disk in this
        time are copied to the device at once, and the step can still use them."""
        while self._store.loader.is_reading:
            left_s = self._loader.lead_s(self._in_flight) - MAKE_S
            if left_s <= 0 or has_ended():
                return
            self._queue.unpark(self._store.poll(left_s))
            sleep(min(left_s, LOOK_S))

    def rest(self) -> None:
        """Yield the processor for a moment, because nothing can run before a copy is done."""
        if self._sequences and not self._outputs:
            sleep(REST_S)

    # --- helpers --------------------------------------------------------------------------------

    def _publish_step(self, step: Step, device_s: float, host_s: float) -> None:
        if not self._bus.has_listeners(StepFinished):
            return
        spans = step.spans
        last = step.seq_starts[1:] - 1
        self._bus.publish(
            StepFinished(
                num_tokens=step.num_tokens,
                num_prompt_tokens=step.num_tokens - step.num_decodes,
                num_seqs=len(step.seq_slots),
                num_spans=len(spans),
                key_tokens_read=int(spans.key_tokens.sum()),
                key_tokens_seen=int(step.positions[last].sum()) + len(last),
                host_s=host_s,
                device_s=device_s,
            )
        )
