"""Engines with random weights that share one loaded model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, Share
from mainstem.core.events import EventBus
from mainstem.core.step import Runner
from mainstem.engine.build import join, with_chunk
from mainstem.engine.engine import Engine
from mainstem.models.spec import ModelSpec
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.load import load_runner
from mainstem.runner.origin import RandomOrigin
from mainstem_bench.kept import KeptRunner, free_memory
from mainstem_bench.packed import shape_with


@dataclass(frozen=True, slots=True)
class Size:
    """A model and the KV memory that it gets."""

    shape: str
    kv_tokens: int
    weights: str | None = None  # a format of quantized checkpoints; None: 16 bits

    @property
    def spec(self) -> ModelSpec:
        return shape_with(self.shape, self.weights)

    def has(self, other: "Size") -> bool:
        """Whether it is the same model, with at least as much KV memory."""
        is_same = (self.shape, self.weights) == (other.shape, other.weights)
        return is_same and self.kv_tokens >= other.kv_tokens


@dataclass(slots=True)
class _Loaded:
    size: Size
    config: EngineConfig
    runner: Runner
    facts: RunnerFacts
    shares: set[Share] = field(default_factory=set)  # kinds of sharing of the engines made so far


@dataclass(slots=True)
class Engines:
    """Holds at most one loaded model; engines around it differ in what they share."""

    _loaded: _Loaded | None = field(default=None)

    @contextmanager
    def engine(
        self, size: Size, share: Share = Share.READS, max_seqs: int | None = None
    ) -> Iterator[Engine]:
        """Return an engine around random weights, with an empty cache. It uses as much KV memory
        as `size` says, also if the loaded model has more."""
        loaded = self._load(size)
        sched = replace(loaded.config.sched, share=share, max_seqs=max_seqs)
        config = replace(loaded.config, sched=sched)
        facts = _within(loaded.facts, size.kv_tokens)
        engine = join(loaded.runner, facts, config, EventBus(), around=KeptRunner)
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
        free_memory()

    def _load(self, size: Size) -> _Loaded:
        if self._loaded is not None and self._loaded.size.has(size):
            return self._loaded
        self.close()
        model, cache = ModelConfig(model=size.shape), CacheConfig(kv_tokens=size.kv_tokens)
        config = with_chunk(EngineConfig(model=model, cache=cache), size.spec)
        runner, facts = load_runner(RandomOrigin(size.spec, seed=0), config)
        self._loaded = _Loaded(size, config, runner, facts)
        return self._loaded


def _within(facts: RunnerFacts, kv_tokens: int) -> RunnerFacts:
    """The same model with pages for `kv_tokens` only."""
    num_pages = -(-kv_tokens // facts.page_size)
    if num_pages >= facts.num_pages:
        return facts
    assert not facts.num_parts, "pages with windowed parts cannot be left out"
    assert not facts.num_states, "pages beside states cannot be left out"
    longest = min(facts.max_model_len, num_pages * facts.page_size)
    return replace(facts, num_pages=num_pages, max_model_len=longest)
