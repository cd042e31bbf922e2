"""The scheduler takes requests, makes Steps, and takes their results.

What starts next, and why: next_step here, then sched/starting.py and sched/queue.py. What leaves so
that others can run: sched/room.py.

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

from mainstem.core.config import SchedConfig, Share, StoreConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.events import (
    EventBus,
    PromptTruncated,
    RequestSubmitted,
    StepFinished,
    StepsResized,
)
from mainstem.core.ids import RequestId
from mainstem.core.request import FinishReason, Output, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import Int32s, Step, StepId, StepResult
from mainstem.core.weights import version_name
from mainstem.kv.store import KVStore
from mainstem.sched.batching import StepWork, build_step
from mainstem.sched.ending import Endings
from mainstem.sched.fetching import Fetching
from mainstem.sched.intake import Intake
from mainstem.sched.loading import Loader
from mainstem.sched.outputs import OutputMaker
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.room import RoomMaker
from mainstem.sched.running import RunningSet
from mainstem.sched.spans import SpanBuilder, WorthSharing, share_all, share_none
from mainstem.sched.starting import OutputLengths, Starter
from mainstem.sched.step_size import StepSize

REST_S = 0.0003


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
        span_align_tokens: int | None = None,
    ) -> None:
        """`max_step_tokens` is the size of the runner's buffers; None: no limit. `fetching` decides
        what is loaded from tiers below the device; None: nothing is loaded."""
        self._config = config
        step_s = None if not config.step_ms else config.step_ms * 1e-3
        self._size = StepSize(config.chunk_tokens, max_step_tokens, step_s)
        self._store = self.store = store
        self._bus = bus
        # a sequence must fit into all pages together
        self.max_model_len = min(max_model_len, store.num_pages * store.page_size)
        self._intake = Intake(config, store, vocab_size, self.max_model_len)
        self._queue = WaitingQueue()
        store.watch_queue(self._queue.awaited)
        lengths = OutputLengths()
        running = self._running = RunningSet(store, self._queue, vocab_size)
        self._table = running.table
        self._outputs = OutputMaker(self._table)
        self._endings = Endings(running, self._intake, lengths, self._outputs, bus)
        self._sequences, self._retry = self._endings.sequences, self._endings.retry
        self._loader = Loader(store, self._queue, fetching)
        self._starter = Starter(running, lengths, self._loader, self._retry, bus, config.max_seqs)
        policy = worth_sharing if config.share is Share.READS else share_none
        self._room = RoomMaker(running, self._endings, self._loader, self._size)
        self._spans = SpanBuilder(store.page_size, policy, config.span_levels, span_align_tokens)
        self._step_ids = count()
        self._host_s = 0.0
        self._held: dict[RequestId, Request] | None = None  # submitted while an update waits

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest if it can never run."""
        request_id = request.request_id
        is_held = self._held is not None and request_id in self._held
        if is_held or request_id in self._sequences or self._outputs.has_last(request_id):
            raise InvalidRequest("request_id", f"{request_id!r} is already running")
        if request.plan_place is not None and not 0 <= request.plan_place < len(
            self._running.order
        ):
            raise InvalidRequest("plan_place", f"{request.plan_place} was not announced")
        sequences, cut = self._intake.accept(request)
        if self._held is not None:
            self._held[request_id] = request
            return
        self._sequences[request_id] = sequences
        for sequence in sequences:
            self._endings.wait(sequence)
        if self._running.states is not None:
            self._running.states.meet(sequences[-1])
        if self._running.windows is not None:
            self._running.windows.meet(sequences[-1])
        num_prompt = len(sequences[-1].request.prompt_ids)
        self._bus.publish(RequestSubmitted(request_id, num_prompt))
        if cut is not None:
            self._bus.publish(PromptTruncated(request_id, cut.policy, cut.num_dropped, num_prompt))

    def expect(self, shared_with_next: Int32s) -> int:
        """Announce a known workload in the order it will be submitted: how many leading tokens
        each prompt shares with the one after it. Returns the first `plan_place`.

        Pages that no later prompt can use are then evicted first.
        """
        return self._running.order.announce(shared_with_next)

    def abort(self, request_id: RequestId) -> None:
        """Stop all answers to a request; ignores unknown and finished requests."""
        if self._held is not None and request_id in self._held:
            self._outputs.refuse(self._held.pop(request_id), FinishReason.ABORT)
        for sequence in list(self._sequences.get(request_id, ())):
            self._endings.end(sequence, FinishReason.ABORT)

    def stop(self, request_id: RequestId, index: int) -> None:
        """End one answer as if it had met a stop token (the caller found a stop string)."""
        for sequence in list(self._sequences.get(request_id, ())):
            if sequence.index == index:
                self._endings.end(sequence, FinishReason.STOP)
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
        has_held = bool(self._held)
        return self.has_sequences or self._outputs.has_outputs or has_held

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence runs or waits to run, or a slot of an ended one is still in use."""
        return bool(self._sequences) or not self._running.is_settled

    # --- other weights --------------------------------------------------------------------------

    @property
    def is_holding(self) -> bool:
        """Whether requests are held instead of queued."""
        return self._held is not None

    def hold(self) -> None:
        """Queue no request from now on, until `release`: the weights are about to change."""
        if self._held is None:
            self._held = {}

    def release(self, fault: InvalidRequest | None) -> None:
        """Queue the requests that were submitted since `hold`; with a `fault`, end them."""
        held, self._held = self._held or {}, None
        for request in held.values():
            try:
                if fault is not None:
                    raise fault
                self.submit(request)
            except InvalidRequest as error:
                self._outputs.refuse(request, FinishReason.ERROR, str(error))

    def abort_all(self) -> None:
        """Abort every request that is not held."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def change_weights(self, identity: bytes) -> None:
        """The runner has other weights now; no step is in flight. Sequences that run go on, and
        their pages get no name: they depend on the old weights, too."""
        earlier = self._outputs.weights
        self._store.rename(identity)
        self._endings.rename(earlier)
        self.name_weights(identity)

    def name_weights(self, identity: bytes) -> None:
        """Answers that end from now on name this version."""
        self._outputs.name_weights(version_name(identity))

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self, has_ended: Callable[[], bool] = lambda: True) -> Step | None:
        """Return the next step, or None if nothing can run now, perhaps until the step in flight
        commits. `has_ended` says whether the device has finished the step in flight. After an
        error, call `recover`."""
        self._loader.look_at_reads(self._running.in_flight, has_ended)
        begin = perf_counter()
        self._loader.poll(self._running.in_flight)
        decodes = self._room.decodes()
        if decodes is None:
            return None
        is_awaited = len(decodes) > 0 or self._running.has_answers()
        work = StepWork(decodes, self._size.prompt_tokens(len(decodes), is_awaited=is_awaited))
        self._starter.fill(work)
        self._store.loader.prefetch()
        if work.num_seqs == 0:
            self._room.free_parts()
            return None
        step_id, tree = StepId(next(self._step_ids)), self._running.tree
        states = None
        if self._running.states is not None:
            states, reached = self._running.states.use(work)
        parts = None if self._store.parts is None else self._store.parts.snapshot()
        step = build_step(step_id, work, self._table, tree, self._spans, states, parts)
        if self._running.states is not None:
            self._queue.unpark(reached)
            self._running.states.launched(step_id)
        self._store.saver.launched(step_id)
        self._running.launch(step, work.sources())
        self._loader.note_start(step_id)
        self._host_s += perf_counter() - begin
        return step

    def commit(
        self, step: Step, result: StepResult, device_s: float = 0.0, launch_s: float = 0.0
    ) -> None:
        """Take in a step's tokens; `take_outputs` then has the new outputs. `launch_s` is the host
        time of launching it. After an error, `recover` completes what was left undone."""
        begin = perf_counter() - launch_s
        table = self._table
        if self._running.in_flight is step:
            self._running.in_flight = None
        self._store.saver.settle(step.step_id)
        self._loader.note_end(step, device_s)
        if device_s and not len(step.load_ids):
            self._size.note_time(step.num_tokens - step.num_decodes, device_s)
        slots, token_ids = step.sample_slots, result.token_ids
        is_alive = table.is_alive.take(slots)
        if not is_alive.all():
            slots, token_ids = slots[is_alive], token_ids[is_alive]
        for sequence in self._outputs.keep_logprobs(step, result):
            assert sequence.prompt_logprobs is not None
            if sequence.chain is not None:
                self._store.index.keep_logprobs(sequence.chain, sequence.prompt_logprobs.found)
        self._outputs.keep_masses(step, result)
        table.append_samples(slots, token_ids)
        self._running.name_filled(slots)
        is_done, ends = self._endings.complete(slots)
        is_streaming = table.is_streaming.take(slots) & ~is_done
        self._outputs.stream(slots[is_streaming], token_ids[is_streaming])
        for end in ends:
            self._endings.finish(*end)
        self._running.settle(step.step_id)
        if self._retry.is_in_doubt:
            self._retry.note_good(slots)
        if not self._size.is_full and self._size.note_good():
            self._bus.publish(StepsResized(self._size.tokens))
        self._publish_step(step, device_s, self._host_s + perf_counter() - begin)
        self._host_s = 0.0

    def recover(self) -> None:
        """Put all sequences back into the queue, after a failed or interrupted step."""
        self._endings.recover()

    def fail(self, step: Step | None, fault: str) -> bool:
        """Recover from a step that failed, or could not be made (None), and look for the cause.
        Returns whether one request is to blame."""
        return self._endings.fail(step, fault)

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
        self._running.in_flight = None
        self._running.settle(StepId(int(self._table.last_step.max())))
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._outputs.take()
        self._store.close()

    def take_outputs(self) -> list[Output]:
        """The Outputs since the last call."""
        return self._outputs.take()

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
            num_states=0 if (states := store.states) is None else states.num_states,
            num_held_states=0 if states is None else states.num_owned,
            num_kept_states=0 if states is None else states.num_kept,
            num_window_parts=0 if store.parts is None else store.parts.num_parts,
            num_held_window_parts=0 if store.parts is None else store.parts.num_needed,
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

    def rest(self) -> None:
        """Yield the processor for a moment, because nothing can run before a copy is done."""
        if self._sequences and not self._outputs.has_outputs:
            sleep(REST_S)

    def _publish_step(self, step: Step, device_s: float, host_s: float) -> None:
        if not self._bus.has_listeners(StepFinished):
            return
        spans, use = step.spans, step.states
        last = step.seq_starts[1:] - 1
        states = (0, 0, 0) if use is None else use.count_reads(step.num_decodes)
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
                states_read=states[0],
                states_saved=states[1],
                rows_folded=states[2],
            )
        )
