"""The engine: schedule, run, commit. Token ids in, token ids out; any runner."""

import logging
from dataclasses import dataclass
from time import perf_counter

from mainstem.core.config import StoreConfig
from mainstem.core.errors import EngineLost, OutOfDeviceMemory
from mainstem.core.events import EventBus
from mainstem.core.ids import PageKey, RequestId
from mainstem.core.request import Output, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import InFlight, Int32s, Runner, Step
from mainstem.sched.scheduler import Scheduler

MAX_FAILURES = 8  # in a row: with other requests in each step, it is not theirs

log = logging.getLogger("mainstem.engine")


class Engine:
    """One model on one device. Not thread-safe: one owner calls it.

    next_step n+1 --> launch n+1 --> wait n --> commit n       (runner can overlap)
    next_step n   --> launch n   --> wait n --> commit n       (it cannot)
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, bus: EventBus) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: _Launched | None = None
        self._num_failures = 0  # steps since the last that ended well
        self.bus = bus

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def step_tokens(self) -> int:
        """What a step takes at most."""
        return self._scheduler.step_tokens

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._scheduler.max_model_len

    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest if it can never run."""
        self._scheduler.submit(request)

    def expect(self, shared_with_next: Int32s) -> int:
        """Announce prompts in the order they will be submitted; see Scheduler.expect."""
        return self._scheduler.expect(shared_with_next)

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is; its last Output comes with the next step."""
        self._scheduler.abort(request_id)

    def stop(self, request_id: RequestId, index: int) -> None:
        """End one answer at what the caller has seen of it."""
        self._scheduler.stop(request_id, index)

    def step(self) -> list[Output]:
        """Advance by one step; returns what callers should hear.

        A step that fails costs its sequences a restart and everybody the cache. What fails again is
        tried alone; a request that fails alone ends, with what failed in its last Output. Raises
        EngineLost when step after step fails. An interrupt goes through, wherever it comes:
        everything waits again, but what ended in that very step may go unheard.
        """
        try:
            return self._step()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._drop_steps()
                self._scheduler.recover()
            raise

    def _step(self) -> list[Output]:
        launched = None
        step = self._next_step()
        if step is not None:
            launched = self._launch(step)
        if self._in_flight is None and not self._runner.can_overlap:
            self._in_flight, launched = launched, None
        outputs = self._scheduler.take_outputs()
        if self._in_flight is None and launched is None and not outputs:
            self._scheduler.rest()
        if self._in_flight is not None:
            done, self._in_flight = self._in_flight, launched
            outputs += self._take_in(done)
        else:
            self._in_flight = launched
        return outputs

    def _next_step(self) -> Step | None:
        try:
            return self._scheduler.next_step()
        except Exception as error:
            self._fail(error, None)
            return None

    def _launch(self, step: Step) -> "_Launched | None":
        began_s = perf_counter()
        try:
            handle = self._runner.launch(step)
        except Exception as error:
            self._fail(error, step)
            return None
        launch_s = perf_counter() - began_s if self._runner.can_overlap else 0.0
        return _Launched(step, handle, began_s, launch_s)

    def _take_in(self, done: "_Launched") -> list[Output]:
        try:
            result = done.handle.wait()
        except Exception as error:
            self._fail(error, done.step)
            return self._scheduler.take_outputs()
        device_s = result.device_s
        if device_s is None:
            device_s = perf_counter() - done.began_s
        self._num_failures = 0
        return self._scheduler.commit(done.step, result, device_s, done.launch_s)

    def _drop_steps(self) -> None:
        """Pages are given back only when no step can write to them any more."""
        self._runner.drain()
        self._in_flight = None

    def _fail(self, error: Exception, step: Step | None) -> None:
        """A step failed, or the making of one (None): nothing of it counts, all else goes on."""
        self._drop_steps()
        if isinstance(error, OutOfDeviceMemory) and self._scheduler.shrink_steps():
            self._scheduler.recover()
            return
        log.error("a step failed", exc_info=error)
        self._num_failures += 1
        self._scheduler.fail(step, f"{type(error).__name__}: {error}")
        if self._num_failures >= MAX_FAILURES:
            raise EngineLost(f"{MAX_FAILURES} steps in a row failed: {error}") from error

    def snapshot(self) -> EngineSnapshot:
        """What is running and shared at this moment."""
        return self._scheduler.snapshot()

    def pin(self, token_ids: Int32s, salt: bytes) -> list[PageKey]:
        """Keep what is cached of a prefix; see Scheduler.pin."""
        return self._scheduler.pin(token_ids, salt)

    def unpin(self, keys: list[PageKey]) -> None:
        """End what `pin` began; takes what it returned."""
        self._scheduler.unpin(keys)

    def fetch_as(self, config: StoreConfig) -> None:
        """Change how stored pages are fetched: `fetch` and `preload` of the config."""
        self._scheduler.fetch_as(config)

    def flush(self) -> None:
        """Return when every page that is to be saved is saved."""
        self._scheduler.flush()

    def clear_cache(self) -> int:
        """Forget every page no sequence holds, in every tier; returns how many on the device."""
        return self._scheduler.clear_cache()

    def clear_device(self) -> int:
        """Forget cached pages on the device, whose contents are in doubt; lower tiers keep theirs,
        which steps that ended well have filled."""
        return self._scheduler.clear_device()

    def check(self) -> None:
        """Raise if a page, slot or sequence was lost."""
        self._scheduler.check()

    def close(self) -> None:
        """Drop everything that runs and free the device."""
        if self._in_flight is not None:
            self._in_flight.handle.wait()
            self._in_flight = None
        self._scheduler.close()
        self._runner.close()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that runs."""

    step: Step
    handle: InFlight
    began_s: float
    launch_s: float  # the host's part in it; 0 where launching is running
