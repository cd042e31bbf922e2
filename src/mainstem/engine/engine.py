"""The engine: schedule, run, commit. Token ids in, token ids out; any runner."""

from dataclasses import dataclass
from time import perf_counter

from mainstem.core.config import StoreConfig
from mainstem.core.errors import OutOfDeviceMemory
from mainstem.core.events import EventBus
from mainstem.core.ids import PageKey, RequestId
from mainstem.core.request import Output, Request
from mainstem.core.snapshot import EngineSnapshot
from mainstem.core.step import InFlight, Int32s, Runner, Step, StepResult
from mainstem.plan.pace import Limits
from mainstem.sched.scheduler import Scheduler


class Engine:
    """One model on one device. Not thread-safe: one owner calls it.

    next_step n+1 --> launch n+1 --> wait n --> commit n       (runner can overlap)
    next_step n   --> launch n   --> wait n --> commit n       (it cannot)
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, bus: EventBus) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: _Launched | None = None
        self.bus = bus

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def limits(self) -> Limits:
        """What there is for a job that runs alone."""
        return self._scheduler.limits

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

        When scheduler or runner raise, sequences go back to the queue and the cache is emptied;
        calling again tries again, with nothing lost but time.
        """
        launched = None
        step = self._next_step()
        if step is not None:
            try:
                launched = self._launch(step)
            except OutOfDeviceMemory:
                if not self._scheduler.shrink_steps():
                    raise
                return self._scheduler.take_outputs()  # everything is back in the queue
        if self._in_flight is None and not self._runner.can_overlap:
            self._in_flight, launched = launched, None
        outputs = self._scheduler.take_outputs()
        if self._in_flight is None and launched is None and not outputs:
            self._scheduler.rest()
        if self._in_flight is not None:
            done = self._in_flight
            result = self._wait(done.handle)
            device_s = result.device_s
            if device_s is None:
                device_s = perf_counter() - done.began_s
            outputs += self._scheduler.commit(done.step, result, device_s, done.launch_s)
        self._in_flight = launched
        return outputs

    def _next_step(self) -> Step | None:
        try:
            return self._scheduler.next_step()
        except BaseException:
            self._recover()
            raise

    def _launch(self, step: Step) -> "_Launched":
        began_s = perf_counter()
        try:
            handle = self._runner.launch(step)
        except BaseException:
            self._recover()
            raise
        launch_s = perf_counter() - began_s if self._runner.can_overlap else 0.0
        return _Launched(step, handle, began_s, launch_s)

    def _wait(self, handle: InFlight) -> StepResult:
        try:
            return handle.wait()
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """A step failed, or was interrupted: nothing of it counts, everything else goes on.

        Pages are given back only when no step can write to them any more.
        """
        self._runner.drain()
        self._in_flight = None
        self._scheduler.recover()

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
