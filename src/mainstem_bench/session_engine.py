"""An engine on random weights, for timing the turns of returning conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.models.spec import ModelSpec
from mainstem_bench.feed import greedy_request
from mainstem_bench.shapes import SHAPES

Ids = list[int]


@dataclass(frozen=True, slots=True)
class ReturningSessions:
    """Sessions that return, and the lengths of their turns."""

    model_shape: str = "llama31-8b"
    sessions: int = 72
    history: int = 2000  # tokens of the first turn
    new: int = 100  # new tokens of a later turn
    output: int = 32
    at_once: int = 24
    turns: int = 3
    device_tokens: int = 64_000
    host_gb: float = 30.0


WORKLOADS = {
    "anchor": ReturningSessions(),
    "13b": ReturningSessions(
        "llama2-13b", 16, 1000, 100, at_once=16, device_tokens=40_000, host_gb=32.0
    ),
    "tiny": ReturningSessions("tiny", 6, 100, 10, 4, 3, 3, 512, 0.1),
}


@dataclass(slots=True)
class TurnTimes:
    """The results of one turn of a batch of sessions."""

    first_s: list[float]
    answers: list[Ids]
    cached: list[int]


def ask_all(engine: Engine, prompts: Sequence[Ids], output: int, first: int) -> TurnTimes:
    """Submit all at once; times to the first token count from before the first submit. Requests are
    named by numbers from `first` on."""
    turn = TurnTimes([0.0] * len(prompts), [[] for _ in prompts], [0] * len(prompts))
    began_s = perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(greedy_request(str(first + index), prompt, output))
    while engine.has_work:
        for news in engine.step():
            index = int(news.request_id) - first
            if not turn.answers[index]:
                turn.first_s[index] = perf_counter() - began_s
                turn.cached[index] = news.num_cached_tokens
            turn.answers[index] += news.token_ids
    return turn


class SessionEngine:
    """An engine on random weights that times the requests of a batch."""

    def __init__(self, work: ReturningSessions, config: EngineConfig) -> None:
        self.work, self.config = work, config
        self.shape: ModelSpec = SHAPES[work.model_shape]
        bus = EventBus()
        self.counters = Counters().attach(bus)
        self.engine: Engine = build_random_engine(self.shape, config, bus)
        self._num_asked = 0

    def __enter__(self) -> "SessionEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def random_ids(self, rng: Random, count: int) -> Ids:
        return [rng.randrange(10, min(self.shape.vocab_size, 30_000)) for _ in range(count)]

    def ask(self, prompts: Sequence[Ids], output: int) -> TurnTimes:
        """See `ask_all`."""
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        return ask_all(self.engine, prompts, output, first)

    def warm_up(self) -> None:
        """Run steps like the measured ones on other prompts; then forget everything."""
        rng, work = Random(99), self.work
        prompts = [self.random_ids(rng, work.history) for _ in range(min(4, work.at_once))]
        for _ in range(2):
            turn = self.ask(prompts, work.output)
            self.push_out()
            prompts = [
                [*prompt, *answer, *self.random_ids(rng, work.new)]
                for prompt, answer in zip(prompts, turn.answers, strict=True)
            ]
        self.engine.clear_cache()

    def push_out(self) -> None:
        """Evict everything from the device, as other requests would; only lower tiers keep the
        pages."""
        self.engine.flush()
        self.engine.clear_device()
