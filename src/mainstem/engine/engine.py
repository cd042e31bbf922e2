"""The engine: schedule, run, commit. Token ids in, token ids out; any runner."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from os import getpid
from time import perf_counter

from mainstem.core.config import StoreConfig
from mainstem.core.errors import (
    EngineAsleep,
    EngineLost,
    ForkedProcess,
    InvalidRequest,
    OutOfDeviceMemory,
    WeightsLost,
)
from mainstem.core.events import EventBus, StepStarted
from mainstem.core.ids import RequestId
from mainstem.core.interrupts import held_interrupts
from mainstem.core.request import Output, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import InFlight, Int32s, Runner, Step
from mainstem.core.weights import (
    BOTH_TAGS,
    ModelWeights,
    Tag,
    Update,
    UpdateMode,
    version_name,
)
from mainstem.kv.store import PinnedPrefix
from mainstem.sched.scheduler import Scheduler

# the engine is lost after this many failed steps without a request to blame, or after this many
# with one if every request has failed in a step of its own
MAX_FAILURES = 8
MAX_BLAMED = 64  # the limit for steps with a request to blame while other requests are left to try

log = logging.getLogger("mainstem.engine")


class Engine:
    """One model on one device. Not thread-safe: one owner calls it. On the main thread, where
    Ctrl-C may come, the owner calls it within `guarded_interrupts`.

    next_step n+1 --> launch n+1 --> wait n --> commit n       (runner can overlap)
    next_step n   --> launch n   --> wait n --> commit n       (it cannot)
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        bus: EventBus,
        identity: bytes = b"",
        weights: ModelWeights | None = None,
    ) -> None:
        """`identity` identifies the model: its weights, dtype, quantization and page layout.
        `weights` changes them; None: they cannot change."""
        self._scheduler = scheduler
        self._store = scheduler.store
        self._runner = runner
        self._in_flight: _Launched | None = None
        # steps that failed since the last success: without a request to blame, and with one
        self._num_failures = 0
        self._num_blamed = 0
        self._asleep: frozenset[Tag] = frozenset()
        self._is_torn = False  # a step was interrupted, and the engine has not recovered since
        self._owner = getpid()
        self._pinned: dict[str, list[PinnedPrefix]] = {}
        self.bus = bus
        self.identity = identity
        scheduler.name_weights(identity)
        self._weights = weights
        self._changes: deque[_Change] = deque()  # in the order of the calls
        self._fault: InvalidRequest | None = None  # why no request is accepted

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that made the engine; a fork does not have its
        threads."""
        return getpid() != self._owner

    def check_process(self) -> None:
        """Raise ForkedProcess in a fork, where a call would wait for threads that do not exist."""
        if self.is_forked:
            raise ForkedProcess(self._owner, getpid())

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._changes)

    @property
    def step_tokens(self) -> int:
        """The maximum number of tokens in a step."""
        return self._scheduler.step_tokens

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of prompt and answer together."""
        return self._scheduler.max_model_len

    @held_interrupts()
    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest if it can never run. After an interrupt it may
        be queued or not; `abort` works in both cases."""
        self.check_process()
        if self._fault is not None and not self._scheduler.is_holding:
            raise self._fault
        self._scheduler.submit(request)

    @held_interrupts()
    def expect(self, shared_with_next: Int32s) -> int:
        """Announce prompts in the order they will be submitted; see Scheduler.expect."""
        return self._scheduler.expect(shared_with_next)

    @held_interrupts()
    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is; its last Output comes with the next step."""
        self._scheduler.abort(request_id)

    @held_interrupts()
    def stop(self, request_id: RequestId, index: int) -> None:
        """End one answer after the tokens that the caller has read."""
        self._scheduler.stop(request_id, index)

    # --- weights and memory that change ---------------------------------------------------------

    @property
    def weights_version(self) -> str:
        """The name of the version in force."""
        return version_name(self.identity)

    def update_weights(self, update: Update, mode: UpdateMode = UpdateMode.FINISH) -> "Future[str]":
        """Bring other weights into force between two steps, which the caller runs until the future
        has the name of the new version, or an error. Requests that are submitted from now on are
        answered with the new weights."""
        weights = self._changeable()
        if mode is UpdateMode.CONTINUE and not self._store.can_rename_running:
            raise InvalidRequest(
                "mode",
                "continue is not supported for a model with recurrent or windowed layers; finish "
                "and abort are",
            )

        def work() -> str:
            was_lost = isinstance(self._fault, WeightsLost)
            try:
                identity = weights.update(update)
            except WeightsLost as error:
                self._fault = error
                self._scheduler.abort_all()  # nothing can go on without weights
                raise
            self.identity = identity
            self._scheduler.change_weights(identity)
            if was_lost:
                self._fault = EngineAsleep()
            self._note_awake(frozenset({Tag.WEIGHTS}))
            return self.weights_version

        return self._change(work, mode)

    def lose_weights(self) -> None:
        """Refuse requests until all weights are updated, or `resume_weights`: the process that
        this one replaces had other weights, which are lost."""
        if self._weights is not None:
            self._weights.lose()
        self._fault = WeightsLost(
            "the engine's process ended, and with it the weights that it was given. Update all "
            "weights again, or go on with those that the engine was started with"
        )

    def resume_weights(self) -> str:
        """Undo `lose_weights`: answer with the weights that the engine was started with."""
        if isinstance(self._fault, WeightsLost):
            self._changeable().resume()
            self._fault = EngineAsleep()
            self._note_awake(frozenset({Tag.WEIGHTS}))
        return self.weights_version

    def sleep(self, level: int, mode: UpdateMode = UpdateMode.FINISH) -> "Future[str]":
        """Give memory back, and accept no request until `wake`; otherwise like `update_weights`.
        Level 1 keeps the weights in host memory, level 2 drops them."""
        weights = self._changeable()
        if level not in (1, 2):
            raise InvalidRequest("level", f"must be 1 or 2, got {level!r}")
        if mode is UpdateMode.CONTINUE:
            raise InvalidRequest("mode", "a request cannot continue while the engine sleeps")

        def work() -> str:
            if self._asleep:
                raise InvalidRequest("engine", "it sleeps already")
            self._scheduler.change_weights(self.identity)  # the pages are lost
            weights.sleep(level)
            if self._fault is None:
                self._fault = EngineAsleep()
            self._asleep = BOTH_TAGS
            return self.weights_version

        return self._change(work, mode)

    def wake(self, tags: frozenset[Tag] = BOTH_TAGS) -> "Future[str]":
        """Undo `sleep`, or a part of it; requests are accepted when everything is awake."""
        weights = self._changeable()

        def work() -> str:
            try:
                weights.wake(tags & self._asleep)
            except WeightsLost as error:
                self._fault = error
            self._note_awake(tags)
            return self.weights_version

        return self._change(work, UpdateMode.FINISH)

    def _note_awake(self, tags: frozenset[Tag]) -> None:
        self._asleep -= tags
        if not self._asleep and isinstance(self._fault, EngineAsleep):
            self._fault = None

    @property
    def refusal(self) -> InvalidRequest | None:
        """Why no request is accepted; None: they are."""
        return self._fault

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def _changeable(self) -> ModelWeights:
        self.check_process()
        if self._weights is None:
            reason = "cannot change here: with tensor_parallel above 1 they are in other processes"
            raise InvalidRequest("weights", reason)
        return self._weights

    def _change(self, work: Callable[[], str], mode: UpdateMode) -> "Future[str]":
        future: Future[str] = Future()
        self._changes.append(_Change(work, mode, future))
        self._begin_change()
        return future

    def _begin_change(self) -> None:
        """Prepare the first change: requests of callers that come now are answered after it."""
        mode = self._changes[0].mode
        if mode is not UpdateMode.CONTINUE:
            self._scheduler.hold()
        if mode is UpdateMode.ABORT:
            self._scheduler.abort_all()

    def _make_changes(self) -> None:
        """Make the changes that need not wait any longer; no step is in flight."""
        while self._changes:
            change = self._changes[0]
            if change.mode is not UpdateMode.CONTINUE and self._scheduler.has_sequences:
                return
            self._runner.drain()
            with held_interrupts():
                self._changes.popleft()
                try:
                    change.future.set_result(change.work())
                except Exception as error:  # raised in the caller
                    change.future.set_exception(error)
                if self._changes:
                    self._begin_change()
            if not self._changes:
                self._scheduler.release(self._fault)

    def step(self) -> list[Output]:
        """Advance by one step; returns the new outputs.

        After a failed step all sequences restart, and the device's cache is cleared. Those that
        fail again are tried alone; a request that fails alone, while others do not, ends with the
        error in its last Output. Raises EngineLost if every step fails, whatever is in it, or if a
        rank has ended. After an interrupt, which is raised again, all sequences wait, and outputs
        come with the next step.
        """
        self.check_process()
        if self._is_torn:  # another interrupt came before recovery was complete
            self._recover()
        self._is_torn = True
        try:
            self._step()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._recover()
            raise
        self._is_torn = False
        return self._scheduler.take_outputs()

    def _step(self) -> None:
        launched = None
        if self._changes and self._in_flight is None:
            self._make_changes()
        # the first change waits for the step in flight
        step = self._next_step() if not self._is_change_next else None
        if step is not None:
            launched = self._launch(step)
        if self._in_flight is None and not self._runner.can_overlap:
            self._in_flight, launched = launched, None
        if self._in_flight is None and launched is None:
            self._runner.check()
            self._scheduler.rest()
        done, self._in_flight = self._in_flight, launched
        if done is not None:
            self._take_in(done)

    @property
    def _is_change_next(self) -> bool:
        """Whether a change waits only for the step in flight."""
        return bool(self._changes) and self._changes[0].mode is UpdateMode.CONTINUE

    @held_interrupts()
    def _next_step(self) -> Step | None:
        try:
            if self._in_flight is None:
                return self._scheduler.next_step()
            return self._scheduler.next_step(self._in_flight.handle.has_ended)
        except Exception as error:
            self._fail(error, None)
            return None

    def _launch(self, step: Step) -> "_Launched | None":
        if self.bus.has_listeners(StepStarted):
            self.bus.publish(StepStarted(step.num_tokens))
        began_s = perf_counter()
        try:
            handle = self._runner.launch(step)
        except Exception as error:
            self._fail(error, step)
            return None
        launch_s = perf_counter() - began_s if self._runner.can_overlap else 0.0
        return _Launched(step, handle, began_s, launch_s)

    def _take_in(self, done: "_Launched") -> None:
        try:
            result = done.handle.wait()
            device_s = result.device_s
            if device_s is None:
                device_s = perf_counter() - done.began_s
            with held_interrupts():
                self._scheduler.commit(done.step, result, device_s, done.launch_s)
        except Exception as error:
            self._fail(error, done.step)
            return
        self._num_failures = self._num_blamed = 0

    def _drop_steps(self) -> None:
        """Wait for the steps in flight: pages may be given back only when no step can write to
        them."""
        self._runner.drain()
        self._in_flight = None

    @held_interrupts()
    def _recover(self) -> None:
        """Put all sequences back into the queue."""
        self._drop_steps()
        self._scheduler.recover()
        self._is_torn = False

    @held_interrupts()
    def _fail(self, error: Exception, step: Step | None) -> None:
        """Drop a step that failed (None: it could not be made), and continue with the other
        requests."""
        self._drop_steps()
        if isinstance(error, EngineLost):
            raise error
        if isinstance(error, OutOfDeviceMemory) and self._scheduler.shrink_steps():
            self._scheduler.recover()
            return
        log.error("a step failed", exc_info=error)
        if self._scheduler.fail(step, f"{type(error).__name__}: {error}"):
            self._num_blamed += 1
        else:
            self._num_failures += 1
        most_blamed = MAX_FAILURES if self._scheduler.is_all_at_fault else MAX_BLAMED
        if self._num_failures >= MAX_FAILURES or self._num_blamed >= most_blamed:
            raise EngineLost(f"every step failed, whichever requests it had: {error}") from error

    def snapshot(self) -> EngineSnapshot:
        """What is running and shared at this moment."""
        return self._scheduler.snapshot()

    @held_interrupts()
    def pin(
        self, name: str, prefixes: Sequence[Int32s], salt: bytes = b"", public_tokens: int = 0
    ) -> int:
        """Pin what is cached of some prefixes, instead of what was pinned under this name before:
        it is evicted only if nothing could run otherwise. Returns the number of pages."""
        for prefix in self._pinned.pop(name, ()):  # first: it may include the new pages
            self._store.unpin(prefix)
        chains = [self._store.chain(ids, salt, public_tokens) for ids in prefixes]
        if chains:
            self._pinned[name] = [self._store.pin(chain) for chain in chains]
        return sum(len(prefix.pages) for prefix in self._pinned.get(name, ()))

    def change_store(self, config: StoreConfig) -> None:
        """Use other settings of the store from now on: `fetch`, `preload` and `save`."""
        self._store.saver.when = config.save
        self._scheduler.change_store(config)

    def flush(self) -> None:
        """Return when every page that must be saved is saved."""
        self.check_process()
        self._store.flush()

    def clear_cache(self) -> int:
        """Forget every page that no sequence holds, in every tier; returns how many of them were on
        the device. Waits for saves, since a page is held while it is copied."""
        self.flush()
        with held_interrupts():
            return self._store.clear()

    @held_interrupts()
    def clear_device(self) -> int:
        """Forget the cached pages on the device, since their contents may be wrong. Lower tiers
        keep their pages, which come from successful steps."""
        return self._store.clear_device()

    def check(self) -> None:
        """Raise if a page, slot or sequence was lost."""
        self._scheduler.check()

    def close(self) -> None:
        """Drop everything that runs and free the device. In a fork of the process that made
        the engine nothing happens: everything belongs to the parent."""
        if self.is_forked:
            return
        try:
            if self._in_flight is not None:
                self._end_last(self._in_flight)
        finally:
            try:
                self._scheduler.close()
            finally:
                self._runner.close()

    def _end_last(self, launched: "_Launched") -> None:
        """Wait for a step whose tokens are not needed; if it failed, drop the pages it wrote."""
        try:
            launched.handle.wait()
            self._in_flight = None
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            log.error("the last step failed", exc_info=error)


@dataclass(frozen=True, slots=True)
class _Change:
    """Something that is done between two steps."""

    work: Callable[[], str]
    mode: UpdateMode  # what happens to the requests before it
    future: "Future[str]"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that runs."""

    step: Step
    handle: InFlight
    began_s: float
    launch_s: float  # host time of the launch; 0 if launching runs the step
