"""Engines with random weights that share one loaded model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, Share
from mainstem.core.events import EventBus
from mainstem.core.step import InFlight, Runner, Step
from mainstem.engine.build import join, with_chunk
from mainstem.engine.engine import Engine
from mainstem.models.shapes import SHAPES
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.load import load_runner
from mainstem.runner.origin import RandomOrigin


class KeptRunner:
    """A runner that an engine cannot close: the next engine uses it again."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def can_overlap(self) -> bool:
        return self._runner.can_overlap

    def launch(self, step: Step) -> InFlight:
        return self._runner.launch(step)

    def drain(self) -> None:
        self._runner.drain()

    def check(self) -> None:
        self._runner.check()

    def close(self) -> None:
        self._runner.drain()


@dataclass(slots=True)
class _Loaded:
    shape: str
    config: EngineConfig
    runner: Runner
    facts: RunnerFacts
    shares: set[Share] = field(default_factory=set)  # of the engines made so far

    def holds(self, shape: str, kv_tokens: int) -> bool:
        return (self.shape, self.config.cache.kv_tokens) == (shape, kv_tokens)


@dataclass(slots=True)
class Engines:
    """Holds at most one loaded model; engines around it differ in what they share."""

    _loaded: _Loaded | None = field(default=None)

    @contextmanager
    def engine(
        self,
        shape: str,
        kv_tokens: int,
        share: Share = Share.READS,
        max_seqs: int | None = None,
    ) -> Iterator[Engine]:
        """An engine around random weights of `shape` with room for `kv_tokens`, nothing cached."""
        loaded = self._load(shape, kv_tokens)
        sched = replace(loaded.config.sched, share=share, max_seqs=max_seqs)
        config = replace(loaded.config, sched=sched)
        engine = join(loaded.runner, loaded.facts, config, EventBus(), around=KeptRunner)
        try:
            yield engine
            engine.check()
        finally:
            engine.close()

    def is_new(self, share: Share) -> bool:
        """Whether this is the first call with `share` since the model was loaded."""
        assert self._loaded is not None, "no model is loaded"
        is_new = share not in self._loaded.shares
        self._loaded.shares.add(share)
        return is_new

    def close(self) -> None:
        """Free the device's memory, including tensors of engines that other code made."""
        if self._loaded is not None:
            self._loaded.runner.close()
            self._loaded = None
        gc.collect()  # engines are in reference cycles with their event buses
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, shape: str, kv_tokens: int) -> _Loaded:
        if self._loaded is not None and self._loaded.holds(shape, kv_tokens):
            return self._loaded
        self.close()
        config = with_chunk(
            EngineConfig(model=ModelConfig(model=shape), cache=CacheConfig(kv_tokens=kv_tokens)),
            SHAPES[shape],
        )
        runner, facts = load_runner(RandomOrigin(SHAPES[shape], seed=0), config)
        self._loaded = _Loaded(shape, config, runner, facts)
        return self._loaded
