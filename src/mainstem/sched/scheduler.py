"""The scheduler: requests in, Steps out, results back in.

    submit -> waiting -> running -> done          next_step: decodes, then prompt chunks, then
                 ^---------'  preempted           new sequences while pages and tokens last

One step may be in flight while the next is made: samples not read back are carried on the device.
A sequence that ends while it is part of a step in flight keeps slot and pages until that commits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter, sleep

import numpy as np

from mainstem.core.config import SchedConfig, Share, StoreConfig
from mainstem.core.errors import InvalidRequest, OutOfPages
from mainstem.core.events import (
    EventBus,
    PagesMoved,
    PromptTruncated,
    RequestSubmitted,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    SequenceResumed,
    StepFinished,
)
from mainstem.core.ids import PageKey, RequestId, SeqSlot
from mainstem.core.request import FinishReason, Output, Overflow, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import Int32s, StartedSequence, Step, StepId, StepResult
from mainstem.kv.keys import PageChain
from mainstem.kv.store import KVStore, Lookup, Match, StoredRun
from mainstem.sched.admission import Admission, Outlook
from mainstem.sched.batching import Batch, Chunk, PageCopy, PageMove, build_step
from mainstem.sched.fetching import Fetching
from mainstem.sched.lookahead import OutputLengths, PlannedOrder
from mainstem.sched.news import News, make_output
from mainstem.sched.origins import NO_MOVES, Origins, truncated_chain
from mainstem.sched.queue import WaitingQueue
from mainstem.sched.random import mix
from mainstem.sched.sequence import SeqState, Sequence, urgency
from mainstem.sched.sharing import SharingTree
from mainstem.sched.spans import SpanBuilder, WorthSharing, share_all, share_none
from mainstem.sched.table import SeqTable
from mainstem.sched.truncation import DEFAULT_RULES, Truncation, TruncationRules, Truncator

DEFAULT_CHUNK_TOKENS = 512
SMALLEST_CHUNK_TOKENS = 64
LOAD_AHEAD = 64  # waiting sequences whose pages are brought up before it is their turn
LOOK_UP_PAGES = 8192  # looked up in a step for those that do not start in it; later steps go on
REST_S = 0.0003
NO_LOADS = np.empty(0, np.int32)


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
        """`max_step_tokens` is what the runner's buffers hold; None: any number. `fetching` decides
        what is loaded from tiers below the device; None: nothing."""
        self._fetching = fetching
        self._config = config
        self._chunk_tokens = config.chunk_tokens or DEFAULT_CHUNK_TOKENS
        self._max_step_tokens = max_step_tokens
        if max_step_tokens is not None:
            self._chunk_tokens = min(self._chunk_tokens, max_step_tokens)
        self._store = store
        self._bus = bus
        self._vocab_size = vocab_size
        # a sequence must fit into the pages when it is alone
        self.max_model_len = min(max_model_len, store.num_pages * store.page_size)
        self._table = SeqTable(vocab_size)
        self._news = News(self._table)
        self._queue = WaitingQueue()
        self._tree = SharingTree()
        policy = worth_sharing if config.share is Share.READS else share_none
        self._spans = SpanBuilder(store.page_size, policy, config.span_levels, span_align_tokens)
        self._admission = Admission(store.page_size)
        self._truncator = Truncator(config, self.max_model_len, store.page_size, truncation)
        self._lengths = OutputLengths()
        self._order = PlannedOrder()
        self._running: Int32s = np.empty(0, np.int32)  # slots, in the order they started
        self._sequences: dict[RequestId, list[Sequence]] = {}
        self._arrivals = count()
        self._step_ids = count()
        self._in_flight: Step | None = None
        # pages that are copied or moved, leased until that step commits
        self._copy_sources: list[tuple[StepId, Int32s]] = []
        self._leaving: list[SeqSlot] = []  # ended, but part of the step in flight
        self._outputs: list[Output] = []  # of sequences that ended outside a commit
        self._host_s = 0.0

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest if it can never run."""
        is_untold = any(output.request_id == request.request_id for output in self._outputs)
        if request.request_id in self._sequences or is_untold:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already running")
        largest = int(request.prompt_ids.max())
        if largest >= self._vocab_size:
            raise InvalidRequest(
                "prompt", f"token id {largest} is outside the vocabulary of {self._vocab_size}"
            )
        sampling = request.sampling
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", sampling.logit_bias or ())
        if request.plan_place is not None and not 0 <= request.plan_place < len(self._order):
            raise InvalidRequest("plan_place", f"{request.plan_place} was not announced")
        given = request
        request, truncation = self._truncator.fit(given)
        num_prompt = len(request.prompt_ids)
        room = self.max_model_len - num_prompt
        max_output = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        chain, origins = self._names(given, request, truncation)
        num_dropped = 0 if truncation is None else truncation.num_dropped
        answers = []
        for index in range(sampling.n):
            arrival = next(self._arrivals)
            seed = sampling.seed if sampling.seed is not None else _mix(self._config.seed, arrival)
            if index:
                seed = _mix(seed, index)
            expected = request.expected_tokens
            sequence = Sequence(
                request, index, seed, arrival, max_output, expected, chain, origins, num_dropped
            )
            answers.append(sequence)
        self._sequences[request.request_id] = answers
        for sequence in answers:
            self._queue.push(sequence)
            self._expect(sequence)
        self._bus.publish(RequestSubmitted(request.request_id, num_prompt))
        if truncation is not None:
            self._bus.publish(
                PromptTruncated(request.request_id, truncation.policy, num_dropped, num_prompt)
            )

    def expect(self, shared_with_next: Int32s) -> int:
        """Announce a known workload in the order it will be submitted: how many leading tokens
        each prompt shares with the one after it. Returns the first `plan_place`.

        Pages that no prompt to come can use are then the first to go.
        """
        return self._order.announce(shared_with_next)

    def abort(self, request_id: RequestId) -> None:
        """Stop all answers to a request; unknown or finished requests are left in peace."""
        for sequence in list(self._sequences.get(request_id, ())):
            self._end_early(sequence, FinishReason.ABORT)

    def stop(self, request_id: RequestId, index: int) -> None:
        """End one answer as if it had met a stop token (the caller found a stop string)."""
        for sequence in list(self._sequences.get(request_id, ())):
            if sequence.index == index:
                self._end_early(sequence, FinishReason.STOP)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._leaving or self._outputs or self._in_flight)

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """The next step, or None when nothing can run before the one in flight commits."""
        begin = perf_counter()
        self._queue.unpark(self._store.poll())
        decodes = self._grow_decodes()
        if decodes is None:
            return None
        # decodes go first, but never keep prompts out altogether
        budget = max(self._chunk_tokens - len(decodes), self._chunk_tokens // 8, 1)
        prompts = _Prompts(budget)
        try:
            return self._make_step(decodes, prompts, begin)
        except BaseException:
            for source in prompts.sources():
                self._store.release(np.array([source], np.int32))
            raise

    def _make_step(self, decodes: Int32s, prompts: "_Prompts", begin: float) -> Step | None:
        self._load_ahead(prompts)
        self._fill_prompts(prompts)
        self._store.prefetch()
        load_ids = np.unique(np.concatenate(prompts.loads)) if prompts.loads else NO_LOADS
        started = tuple(prompts.started)
        batch = Batch(decodes, prompts.chunks, started, prompts.copies, prompts.moves, load_ids)
        if batch.num_seqs == 0:
            return None
        step = build_step(StepId(next(self._step_ids)), batch, self._table, self._tree, self._spans)
        self._store.launched(step.step_id)
        if sources := prompts.sources():
            self._copy_sources.append((step.step_id, np.array(sources, np.int32)))
        self._in_flight = step
        self._host_s += perf_counter() - begin
        return step

    def commit(
        self, step: Step, result: StepResult, device_s: float = 0.0, launch_s: float = 0.0
    ) -> list[Output]:
        """Take in a step's tokens; returns what callers should hear. `launch_s` is what the host
        spent on launching it."""
        begin = perf_counter() - launch_s
        table = self._table
        if self._in_flight is step:
            self._in_flight = None
        self._store.settle(step.step_id)
        alive = table.is_alive[step.sample_slots]
        rows = np.flatnonzero(alive)
        slots, token_ids = step.sample_slots[rows], result.token_ids[rows]
        table.append_samples(slots, token_ids)
        self._news.keep_logprobs(step, result)

        is_stop = table.is_stop(slots, token_ids)
        is_full = table.total[slots] - table.pending[slots] >= table.max_total[slots]
        is_done = is_stop | is_full
        is_streaming = table.is_streaming[slots] & ~is_done
        outputs = self._news.stream(slots[is_streaming], token_ids[is_streaming])
        for row in np.flatnonzero(is_done).tolist():
            reason = FinishReason.STOP if is_stop[row] else FinishReason.LENGTH
            outputs.append(self._finish(SeqSlot(int(slots[row])), reason))
        self._release_left(step.step_id)
        self._release_sources(step.step_id)
        self._publish_step(step, device_s, self._host_s + perf_counter() - begin)
        self._host_s = 0.0
        return outputs

    def recover(self) -> None:
        """The step in flight failed: forget what it may have left in pages.

        Every sequence goes back to the queue with the tokens that are known of it, and the cache is
        emptied; stepping on tries again.
        """
        table = self._table
        self._in_flight = None
        self._release_left(StepId(int(table.last_step.max())))
        self._release_sources(StepId(int(table.last_step.max())))
        with self._store.distrust():
            for slot in self._running.tolist():
                table.total[slot] -= table.pending[slot]
                table.pending[slot] = 0
                table.computed[slot] = 0  # nothing of it is worth a name
                self._preempt(SeqSlot(slot))

    def shrink_steps(self) -> bool:
        """Make steps half as large from here on; False when they are as small as they get."""
        if self._max_step_tokens is None or self._chunk_tokens <= SMALLEST_CHUNK_TOKENS:
            return False
        self._chunk_tokens = max(self._chunk_tokens // 2, SMALLEST_CHUNK_TOKENS)
        return True

    def close(self) -> None:
        """Drop every sequence, without a word; nothing may be in flight. What steps that ended well
        have filled is saved."""
        self._in_flight = None
        self._release_left(StepId(int(self._table.last_step.max())))
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._outputs.clear()
        self._store.close()

    def take_outputs(self) -> list[Output]:
        """Outputs of sequences that ended outside a commit (aborted, stopped)."""
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
            stems=self._tree.view(store.page_size),
            num_host_pages=0 if store.tiers is None else store.tiers.num_host_pages,
            stored_page_bytes=0 if store.tiers is None else store.tiers.page_bytes,
            num_disk_pages=0 if store.tiers is None else store.tiers.num_disk_pages,
            num_copies=0 if store.tiers is None else store.tiers.num_copies,
        )

    def fetch_as(self, config: StoreConfig) -> None:
        """Decide by other settings from here on what is loaded, and when a prompt starts on it."""
        if self._fetching is not None:
            self._fetching = replace(self._fetching, config=config)

    def pin(self, token_ids: Int32s, salt: bytes) -> list[PageKey]:
        """Keep what is cached of a prefix until nothing could run without its pages."""
        if self._config.share is Share.NONE:
            return []
        return self._store.pin(self._store.chain(token_ids, salt))

    def unpin(self, keys: Iterable[PageKey]) -> None:
        """End what `pin` began; takes what it returned."""
        self._store.unpin(list(keys))

    def clear_cache(self) -> int:
        """Forget every cached page no sequence holds; returns how many."""
        return self._store.clear()

    def clear_device(self) -> int:
        """Forget every page on the device no sequence holds, and save none of them."""
        before = self._store.num_cached_pages
        with self._store.distrust():
            pass
        return before - self._store.num_cached_pages

    def check(self) -> None:
        """Raise if anything is out of order; when idle, also if a page is still held."""
        self._store.check()
        self._tree.check()
        assert self._table.num_used == len(self._running) + len(self._leaving), "a slot was lost"
        if not self.has_work:
            assert self._store.num_held() == 0, "a page is still held"
            assert len(self._queue) == 0, "a sequence was forgotten in the queue"

    # --- what goes into a step ------------------------------------------------------------------

    def _grow_decodes(self) -> Int32s | None:
        """Slots that decode, each with a page for its token; preempts if pages are short.

        None: pages are short and a step is in flight; its commit comes first.
        """
        table = self._table
        while True:
            running = self._running
            ready = table.computed[running] >= table.prefill_end[running]
            ready &= table.total[running] < table.max_total[running]
            ready &= ~(table.is_sync[running] & (table.pending[running] > 0))
            decodes: Int32s = self._within_step(running[ready])
            full = decodes[table.computed[decodes] >= table.num_pages[decodes] * self._page_size]
            if len(full) == 0:
                return decodes
            try:
                pages = self._store.take(len(full))
            except OutOfPages:
                if self._in_flight is not None or self._leaving:
                    return None
                self._preempt(self._victim())
                continue
            table.append_pages(full, pages)
            return decodes

    def _within_step(self, decodes: Int32s) -> Int32s:
        """Where the runner takes so many tokens only: those that waited longest, prompts' part
        left free."""
        if self._max_step_tokens is None:
            return decodes
        most = max(self._chunk_tokens - max(self._chunk_tokens // 8, 1), 1)
        if len(decodes) <= most:
            return decodes
        oldest = np.argsort(self._table.last_step[decodes], kind="stable")[:most]
        return decodes[np.sort(oldest)]

    def _fill_prompts(self, prompts: "_Prompts") -> None:
        """Prompt chunks for the budget: sequences under way, then new ones; by priority."""
        table = self._table
        is_unfinished = table.computed[self._running] < table.prefill_end[self._running]
        unfinished = [table.sequence(slot) for slot in self._running[is_unfinished].tolist()]
        for sequence in sorted(unfinished, key=urgency):
            self._start_waiting(prompts, before=sequence.request.priority)
            if prompts.budget <= 0:
                break
            assert sequence.slot is not None
            self._add_chunk(prompts, sequence.slot)
        self._start_waiting(prompts, before=None)

    def _start_waiting(self, prompts: "_Prompts", before: int | None) -> None:
        """Start sequences from the queue, or only those more urgent than `before`."""
        while prompts.has_room and (sequence := self._queue.head()) is not None:
            if before is not None and sequence.request.priority >= before:
                return
            slot = self._try_start(sequence, prompts)
            if slot is None:
                if sequence is self._queue.head():
                    return  # no room: nobody overtakes it
                prompts.num_parked_pages += sequence.num_named_pages
                continue
            self._running = np.append(self._running, np.int32(slot))
            if sequence.request.sampling.edits_logits:
                prompts.started.append(_started(sequence, slot))
            self._add_chunk(prompts, slot)

    def _add_chunk(self, prompts: "_Prompts", slot: SeqSlot) -> None:
        chunk = self._next_chunk(slot, prompts.budget)
        prompts.chunks.append(chunk)
        prompts.budget -= len(chunk.token_ids)

    def _try_start(self, sequence: Sequence, prompts: "_Prompts") -> SeqSlot | None:
        """Give the queue's head its pages and a slot, or park it, or leave it where it is."""
        store = self._store
        num_known, chain, match = self._look_up(sequence)
        if match.outcome is Lookup.LOADING:
            assert match.awaited is not None
            self._queue.park(self._queue.pop(), match.awaited)
            return None
        cached = match.pages
        store.lease(cached)  # before counting: leased pages cannot be given up for room
        held = [cached]
        try:
            return self._start_leased(sequence, chain, match, num_known, prompts, held)
        except BaseException:
            for pages in held:
                self._queue.unpark(store.abort(pages))
                store.release(pages)
            if len(held) > 1:  # it has left the queue already
                self._queue.push(sequence)
            raise

    def _start_leased(
        self,
        sequence: Sequence,
        chain: PageChain | None,
        match: Match,
        num_known: int,
        prompts: "_Prompts",
        held: list[Int32s],
    ) -> SeqSlot | None:
        """As _try_start, with the cached pages leased; what it takes more is added to `held`."""
        store, page_size, cached = self._store, self._page_size, match.pages
        num_new = -(-num_known // page_size) - len(cached)
        expected = self._lengths.expect(sequence)
        to_come = expected - len(sequence.output_ids)
        if prompts.outlook is None:
            prompts.outlook = self._outlook()
        # pinned pages are for nobody, unless nothing could run without them
        available = store.num_available() if len(self._running) else store.num_takeable()
        if not self._admission.may_start(num_new, to_come, available, prompts.outlook):
            store.release(cached)
            return None
        if self._must_wait_to_load(match):
            store.release(cached)
            return None
        awaited = self._load(sequence, chain, match, self._num_unfinished())
        moves = NO_MOVES
        if awaited is None and sequence.origins is not None:
            wanted = range(len(cached), (num_known - 1) // page_size)
            moves = sequence.origins.find(store, wanted, prompts.filled_pages)
            awaited = moves.awaited
        if awaited is not None:
            store.release(cached)
            self._queue.park(self._queue.pop(), awaited)
            return None
        prompts.outlook = prompts.outlook.joined_by(num_new, to_come)
        if len(moves.pages):
            match = replace(match, similar_page=None, similar_tokens=0)  # it is moved as a whole
        similar = np.array([] if match.similar_page is None else [match.similar_page], np.int32)
        num_moved = moves.lease(store, num_new)
        store.lease(similar)  # until the step that copies from it has run
        if store.num_takeable() < num_new:  # it is the page that was counted on
            store.release(similar)
            match = replace(match, similar_page=None, similar_tokens=0)
        fresh = store.take(num_new)
        held.append(fresh)
        self._queue.pop()
        if match.similar_page is not None:
            copy = PageCopy(match.similar_page, int(fresh[0]), match.similar_tokens)
            prompts.copies.append(copy)
        if chain is not None:
            store.reserve(chain, len(cached), fresh[: len(chain.keys) - len(cached)])
        if num_moved:
            sources = moves.pages[:num_moved].tolist()
            places = zip(sources, fresh.tolist(), moves.distances, strict=False)
            prompts.moves += [PageMove(*place) for place in places]
            self._queue.unpark(store.commit(fresh[:num_moved]))
            self._bus.publish(PagesMoved(sequence.request.request_id, num_moved))
        pages = np.concatenate([cached, fresh])
        num_cached = (len(cached) + num_moved) * page_size + match.similar_tokens
        prompts.loads += [loads for loads in (match.loads, moves.loads) if loads is not None]
        store.dismiss(sequence.arrival)
        slot = self._table.enter(sequence, pages, num_cached, expected)
        self._tree.attach(slot, pages[: num_known // page_size])
        self._announce(sequence, num_cached, num_known)
        return slot

    def _look_up(self, sequence: Sequence) -> tuple[int, PageChain | None, Match]:
        """How many tokens a waiting sequence has, their chain, and what is there of it."""
        known = sequence.known_ids()
        chain = sequence.chain
        if chain is not None and len(known) > len(chain.token_ids):
            chain = chain.extended(known)
        if chain is None or sequence.prompt_logprobs is not None:
            return len(known), chain, Match(np.empty(0, np.int32), Lookup.MISS)
        # the last token is always computed: its logits are wanted
        return len(known), chain, self._store.lookup(chain, len(known) - 1)

    def _load_ahead(self, prompts: "_Prompts") -> None:
        """Start loads for those next in the queue while others run, in order and while the pages
        that those before them need are left."""
        if self._fetching is None:
            return
        tokens_ahead, pages_ahead, num_looked_up = self._num_unfinished(), 0, 0
        for sequence in self._queue.first(LOAD_AHEAD):
            if sequence.num_to_compute is None:
                if num_looked_up >= LOOK_UP_PAGES:
                    return
                num_looked_up += sequence.num_named_pages
                num_known, chain, match = self._look_up(sequence)
                if match.outcome is Lookup.LOADING:
                    continue
                if self._must_wait_to_load(match):
                    return
                num_new = -(-num_known // self._page_size) - len(match.pages)
                expected = self._lengths.expect(sequence) - len(sequence.output_ids)
                if prompts.outlook is None:
                    prompts.outlook = self._outlook()
                available = self._store.num_available()
                if not self._admission.may_start(
                    pages_ahead + num_new, expected, available, prompts.outlook
                ):
                    return
                pages_ahead += num_new
                sequence.num_to_compute = num_known - len(match.pages) * self._page_size
                if self._load(sequence, chain, match, tokens_ahead) is not None:
                    sequence.num_to_compute -= match.stored.num_pages * self._page_size
                    pages_ahead -= match.stored.num_pages
            tokens_ahead += sequence.num_to_compute

    def _must_wait_to_load(self, match: Match) -> bool:
        """Whether a sequence is better loaded, and the way to it is not free yet."""
        fetching, stored = self._fetching, match.stored
        if fetching is None or not stored.num_pages or not fetching.is_busy(stored):
            return False
        return fetching.is_worth_it(stored, self._num_unfinished(), len(self._queue))

    def _load(
        self, sequence: Sequence, chain: PageChain | None, match: Match, tokens_ahead: int
    ) -> PageKey | None:
        """Load what lower tiers have of a sequence, where that is the faster way; returns the key
        to wait for."""
        fetching, num_known = self._fetching, len(sequence.known_ids())
        if fetching is None or chain is None:
            return None
        runs, kept = [StoredRun(chain, len(match.pages), match.stored.num_pages)], match.pages
        if sequence.origins is not None:
            if sequence.has_fetched:  # what came up is gone again: rather compute than try for ever
                return None
            wanted = range(len(match.pages), (num_known - 1) // self._page_size)
            runs, sources = sequence.origins.find_stored(self._store, chain, wanted)
            kept = np.union1d(kept, sources).astype(np.int32)
        stored = self._store.stored([key for run in runs for key in run.keys])
        if not stored.num_pages:
            return None
        if not fetching.is_worth_it(stored, tokens_ahead, len(self._queue)):
            self._store.dismiss(sequence.arrival)  # nothing need be read ahead for it
            return None
        num_there = (len(kept) + stored.num_pages) * self._page_size
        layers = fetching.start_layers(stored, max(num_known - num_there, 1))
        if match.similar_page is not None:  # wanted still, if nothing can be loaded after all
            kept = np.append(kept, np.int32(match.similar_page))
        awaited: PageKey | None = None
        try:
            for run in runs:
                awaited = self._store.load(run, kept, layers) or awaited
        except OutOfPages:  # the pages it has itself were counted on
            pass
        sequence.has_fetched = awaited is not None
        return awaited

    def _num_unfinished(self) -> int:
        """Prompt tokens of running sequences that are still to be computed."""
        table, running = self._table, self._running
        return int(np.maximum(table.prefill_end[running] - table.computed[running], 0).sum())

    def _outlook(self) -> Outlook:
        running = self._running
        in_tree, part = self._tree.shares(running)
        return Outlook(
            remaining=self._table.expect_remaining(running, at_least=self._page_size),
            own_pages=self._table.num_pages[running] - in_tree + part,
        )

    def _next_chunk(self, slot: SeqSlot, budget: int) -> Chunk:
        """The next tokens to compute; pages they fill become readable for this very step."""
        table, page_size = self._table, self._page_size
        num_before = int(table.computed[slot])
        length = min(budget, int(table.prefill_end[slot]) - num_before)
        prompt_ids = table.sequence(slot).request.prompt_ids
        end = num_before + length
        token_ids = prompt_ids[num_before:end]
        if end > len(prompt_ids):  # back from preemption: output tokens are computed again
            output = table.outputs[
                slot, max(0, num_before - len(prompt_ids)) : end - len(prompt_ids)
            ]
            token_ids = np.concatenate([token_ids, output])
        filled = table.page_table[slot, num_before // page_size : end // page_size]
        self._queue.unpark(self._store.commit(filled))
        return Chunk(slot, num_before, token_ids)

    def _announce(self, sequence: Sequence, num_cached: int, num_known: int) -> None:
        request_id, index = sequence.request.request_id, sequence.index
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            if sequence.request.plan_place is not None:
                self._order.start(sequence.request.plan_place)
            self._bus.publish(SequenceAdmitted(request_id, index, num_known, num_cached))
        else:
            self._bus.publish(SequenceResumed(request_id, index, num_known - num_cached))

    # --- how sequences end ----------------------------------------------------------------------

    def _finish(self, slot: SeqSlot, reason: FinishReason) -> Output:
        """A running sequence is done: deliver, and free its slot as soon as no step uses it."""
        table = self._table
        sequence = table.sequence(slot)
        output = self._news.deliver(slot, reason)
        num_output = len(table.output_ids(slot))
        if reason is not FinishReason.ABORT:
            self._lengths.observe(num_output)
        self._close(sequence, reason, num_output)
        self._leave_running(slot)
        if self._in_flight is not None and table.last_step[slot] == self._in_flight.step_id:
            self._leaving.append(slot)
        else:
            self._release(slot)
        return output

    def _end_early(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SeqState.RUNNING:
            assert sequence.slot is not None
            self._outputs.append(self._finish(sequence.slot, reason))
        elif sequence.state is SeqState.WAITING:
            undelivered = sequence.output_ids[sequence.num_delivered :]
            self._outputs.append(make_output(sequence, undelivered, reason))
            self._close(sequence, reason, len(sequence.output_ids))
            self._queue.forget(sequence)
            self._store.dismiss(sequence.arrival)

    def _close(self, sequence: Sequence, reason: FinishReason, num_output: int) -> None:
        sequence.state = SeqState.DONE
        request_id = sequence.request.request_id
        answers = self._sequences[request_id]
        answers.remove(sequence)
        if not answers:
            del self._sequences[request_id]
        self._bus.publish(SequenceFinished(request_id, sequence.index, reason, num_output))

    def _preempt(self, slot: SeqSlot) -> None:
        """Take a sequence's pages; it starts again later from what is still cached."""
        sequence = self._table.sequence(slot)
        sequence.output_ids = self._table.output_ids(slot)
        sequence.reset_prompt_logprobs()
        num_pages = int(self._table.num_pages[slot])
        self._leave_running(slot)
        self._release(slot)
        sequence.state = SeqState.WAITING
        sequence.num_to_compute = None
        self._queue.push(sequence)
        self._expect(sequence)
        request_id = sequence.request.request_id
        self._bus.publish(SequencePreempted(request_id, sequence.index, num_pages))

    def _leave_running(self, slot: SeqSlot) -> None:
        self._running = self._running[self._running != slot]
        self._table.is_alive[slot] = False

    def _victim(self) -> SeqSlot:
        """The least urgent of the running sequences, and of these the last to arrive."""
        sequences = (self._table.sequence(slot) for slot in self._running.tolist())
        worst = max(sequences, key=urgency)
        assert worst.slot is not None
        return worst.slot

    def _release_left(self, step_id: StepId) -> None:
        """Free the slots of ended sequences that no step in flight uses any more."""
        still: list[SeqSlot] = []
        for slot in self._leaving:
            if self._table.last_step[slot] <= step_id:
                self._release(slot)
            else:
                still.append(slot)
        self._leaving = still

    def _release_sources(self, step_id: StepId) -> None:
        """End the leases on pages that steps up to this one copied from."""
        while self._copy_sources and self._copy_sources[0][0] <= step_id:
            for source in self._copy_sources.pop(0)[1]:
                self._store.release(source[None])

    def _release(self, slot: SeqSlot) -> None:
        """Free slot and pages; full pages of known tokens stay behind as cache."""
        table, store, page_size = self._table, self._store, self._page_size
        sequence = table.sequence(slot)
        pages = table.pages(slot)
        chain = sequence.chain
        if chain is not None:
            self._queue.unpark(store.abort(pages))
            output_ids = table.output_ids(slot)
            # of the last token only the id is known, K and V are not computed
            num_known = len(chain.token_ids) + len(output_ids)
            num_full = min(int(table.computed[slot]), num_known - 1) // page_size
            first = len(chain.keys)
            if num_full > first:
                known = np.concatenate([chain.token_ids, output_ids])
                store.name(chain.extended(known), first, pages[first:num_full])
        num_wanted = None
        if sequence.state is SeqState.DONE and sequence.request.plan_place is not None:
            num_wanted = self._order.tokens_wanted(sequence.request.plan_place) // page_size
        self._tree.detach(slot)
        table.leave(slot)
        store.give_back(pages, num_wanted)

    def _names(
        self, given: Request, request: Request, truncation: Truncation | None
    ) -> tuple[PageChain | None, Origins | None]:
        """Names of a prompt's pages, and where those that outlive its truncation may be found."""
        if self._config.share is Share.NONE:
            return None, None
        if truncation is None or truncation.policy is Overflow.RECOMPUTE:
            return self._store.chain(request.prompt_ids, request.salt, request.public_tokens), None
        whole = self._store.chain(given.prompt_ids, given.salt, given.public_tokens)
        chain = truncated_chain(whole, given, truncation.cut)
        return chain, Origins(whole, given, truncation)

    # --- tiers below the device -----------------------------------------------------------------

    def _expect(self, sequence: Sequence) -> None:
        """Tell the store what a waiting sequence will ask for."""
        if sequence.chain is not None:
            self._store.expect(sequence.arrival, sequence.chain)

    def flush(self) -> None:
        """Return when every page that is to be saved is saved."""
        self._store.flush()

    def rest(self) -> None:
        """Nothing can run before a copy is done: leave the processor to it for a moment."""
        if self._sequences and not self._outputs:
            sleep(REST_S)

    # --- odds -----------------------------------------------------------------------------------

    @property
    def _page_size(self) -> int:
        return self._store.page_size

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

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidRequest(
                    field, f"token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )


@dataclass(slots=True)
class _Prompts:
    """Prompt work of the step being made."""

    budget: int  # tokens left
    chunks: list[Chunk] = field(default_factory=list)
    loads: list[Int32s] = field(default_factory=list)
    started: list[StartedSequence] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    moves: list[PageMove] = field(default_factory=list)
    outlook: Outlook | None = None  # made when the first sequence wants to start
    num_parked_pages: int = 0  # looked up in vain

    @property
    def has_room(self) -> bool:
        return self.budget > 0 and self.num_parked_pages < LOOK_UP_PAGES

    def sources(self) -> list[int]:
        """Pages that copies and moves of this step read, leased once for each."""
        return [copy.source for copy in self.copies] + [move.source for move in self.moves]

    @property
    def filled_pages(self) -> list[int]:
        """Pages that get their content by copies and moves of this step."""
        return [copy.target for copy in self.copies] + [move.target for move in self.moves]


def _mix(seed: int, index: int) -> int:
    return int(mix(np.array([seed], np.int64), np.array([index], np.int64))[0])


def _started(sequence: Sequence, slot: SeqSlot) -> StartedSequence:
    request = sequence.request
    return StartedSequence(
        slot, request.sampling, request.prompt_ids, sequence.output_ids, request.stop_ids
    )
