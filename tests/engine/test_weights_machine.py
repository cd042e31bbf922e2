"""Random interleavings of updates, requests, conversations, sleeps and aborts: an answer that names
one version of the weights equals that of a fresh engine with it.

Chance cannot explain a failure: greedy answers of one engine with one set of weights are the same
tokens however requests meet in steps, as the tests of the scheduler and of the models show.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig, StoreConfig
from mainstem.core.errors import InvalidRequest
from mainstem.core.request import FinishReason, SamplingParams
from mainstem.core.weights import FolderUpdate, Tag, TensorUpdate, UpdateMode
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from tests.builders import a_request
from tests.engine.test_weights import change, tensors_of, varied
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.torch
SHORT_RUNS, LONG_RUNS, ACTS = 6, 1000, 14
VOCAB, OUTPUT = 199, 6
FOLDERS = ("a", "b", "c")


@dataclass
class Asked:
    prompt: list[int]
    found: list[int] = field(default_factory=list)
    weights: tuple[str, ...] = ()
    reason: FinishReason | None = None


@dataclass
class World:
    """An engine whose weights change, and what a fresh engine with each set of weights answers."""

    engine: Engine
    truth: dict[str, Engine]  # by the folder
    root: Path
    known: dict[tuple[str, tuple[int, ...]], list[int]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # version -> folder

    def expected(self, version: str, prompt: list[int]) -> list[int]:
        key = self.versions[version], tuple(prompt)
        if key not in self.known:
            fresh = self.truth[key[0]]
            fresh.clear_cache()
            fresh.submit(a_request(prompt, OUTPUT, name="truth"))
            found: list[int] = []
            while fresh.has_work:
                for output in fresh.step():
                    found += output.token_ids
            self.known[key] = found
        return self.known[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("weights")
    for name in FOLDERS:
        model = make_checkpoint("llama", root / name, num_hidden_layers=2)
        if name != "a":
            varied(model, root / name, seed=ord(name))
    model_config = ModelConfig(model="tiny", threads=1)
    plain = EngineConfig(model=model_config, cache=CacheConfig(kv_tokens=512, page_size=4))
    config = EngineConfig(
        model=model_config,
        cache=CacheConfig(kv_tokens=128, page_size=4),  # few pages: sequences are preempted
        sched=SchedConfig(chunk_tokens=16),
        store=StoreConfig(host_gb=0.001),
    )
    truth = {name: build_engine(root / name, plain) for name in FOLDERS}
    return World(build_engine(root / "a", config), truth, root)


class Run:
    """One random interleaving."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.engine = world, world.engine
        self.random = random.Random(seed)
        self.asked: dict[str, Asked] = {}
        self.prefixes = [self.tokens(9) for _ in range(2)]
        self.folder = self.random.choice(FOLDERS)
        self.name = f"run-{seed}"
        change(self.engine, FolderUpdate(world.root / self.folder))
        world.versions[self.engine.weights_version] = self.folder

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, VOCAB) for _ in range(count)]

    def go(self) -> None:
        acts: list[Callable[[], None]] = [
            self.ask, self.ask, self.ask, self.converse, self.step, self.step, self.step,
            self.abort, self.update, self.update, self.sleep,
        ]  # fmt: skip
        for _ in range(ACTS):
            self.random.choice(acts)()
        self.step_until(lambda: not self.engine.has_work)
        self.engine.check()
        self.check()

    def ask(self) -> None:
        self.submit([*self.random.choice(self.prefixes), *self.tokens(self.random.randrange(1, 9))])

    def converse(self) -> None:
        """The next turn of a conversation: a prompt and its answer, and new tokens."""
        ended = [each for each in self.asked.values() if each.reason is FinishReason.LENGTH]
        if ended:
            last = self.random.choice(ended)
            self.submit([*last.prompt, *last.found, *self.tokens(3)][-60:])

    def submit(self, prompt: list[int]) -> None:
        name = f"{self.name}-{len(self.asked)}"
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        self.engine.submit(a_request(prompt, sampling=sampling, name=name))
        self.asked[name] = Asked(prompt)

    def step(self) -> None:
        for _ in range(self.random.randrange(1, 4)):
            self.take()

    def take(self) -> None:
        for output in self.engine.step():
            asked = self.asked[output.request_id]
            asked.found += output.token_ids
            if output.finish_reason is not None:
                asked.reason, asked.weights = output.finish_reason, output.weights

    def step_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.take()

    def abort(self) -> None:
        if self.asked:
            self.engine.abort(a_request([1], name=self.random.choice([*self.asked])).request_id)

    def update(self) -> None:
        """To another folder; by its name, its tensors, or some of them. One in four fails."""
        target, mode = self.random.choice(FOLDERS), self.random.choice([*UpdateMode])
        folder = self.world.root / target
        tensors = [*tensors_of(folder).items()]
        kind = self.random.randrange(4)
        update: FolderUpdate | TensorUpdate = TensorUpdate(tensors)
        if kind == 0:
            update = FolderUpdate(folder)
        if kind == 1:
            update = TensorUpdate([*tensors[:3], ("no.such.tensor", tensors[0][1])])
        future = self.engine.update_weights(update, mode)
        if self.random.random() < 0.5:
            self.ask()  # while the update waits
        self.step_until(future.done)
        if kind == 1:
            with pytest.raises(InvalidRequest, match=r"no\.such\.tensor"):
                future.result()
        else:
            self.folder = target
            self.world.versions[future.result()] = target

    def sleep(self) -> None:
        level = self.random.choice((1, 2))
        asleep = self.engine.sleep(level, self.random.choice((UpdateMode.FINISH, UpdateMode.ABORT)))
        self.step_until(asleep.done)
        asleep.result()
        for tags in ({Tag.WEIGHTS}, {Tag.KV_CACHE}):
            awake = self.engine.wake(frozenset(tags))
            self.step_until(awake.done)
        if self.engine.refusal is not None:  # the weights came from tensors, and were dropped
            change(self.engine, FolderUpdate(self.world.root / self.folder))
            self.world.versions[self.engine.weights_version] = self.folder

    def check(self) -> None:
        for name, asked in self.asked.items():
            assert asked.reason is not None, f"{name} has no end"
            if len(asked.weights) == 1:
                expected = self.world.expected(asked.weights[0], asked.prompt)
                if asked.reason is FinishReason.LENGTH:
                    assert asked.found == expected, name
                else:
                    assert asked.found == expected[: len(asked.found)], name


@pytest.mark.parametrize("seed", range(SHORT_RUNS))
def test_answers_are_those_of_the_version_they_name(world: World, seed: int) -> None:
    Run(world, seed).go()


@pytest.mark.slow
def test_a_thousand_interleavings(world: World) -> None:
    for seed in range(SHORT_RUNS, SHORT_RUNS + LONG_RUNS):
        Run(world, seed).go()


def test_some_answers_name_one_version_and_some_two(world: World) -> None:
    """Otherwise the tests above would show nothing."""
    runs = [Run(world, seed) for seed in range(10_000, 10_004)]
    counts = []
    for run in runs:
        run.__init__(world, int(run.name[4:]))  # type: ignore[misc]
        run.go()
        counts += [len(asked.weights) for asked in run.asked.values()]
    assert np.bincount(counts, minlength=3)[1] > 5
    assert np.bincount(counts, minlength=3)[2:].sum() > 0
