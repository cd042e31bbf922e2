"""A model that is loaded once for many engines."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus
from mainstem.core.step import InFlight, Runner, Step
from mainstem.engine.build import join, load_folder
from mainstem.engine.engine import Engine
from mainstem.runner.facts import RunnerFacts


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
class _LoadedRunner:
    given: EngineConfig
    chunk_tokens: int | None
    runner: Runner
    facts: RunnerFacts


class KeptModel:
    """The model in a folder. It is loaded again only for other settings of the model or of its
    memory; engines may differ in what they share, in sinks and in tiers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: _LoadedRunner | None = None

    def build(
        self,
        config: EngineConfig,
        bus: EventBus | None = None,
        *,
        around: Callable[[Runner], Runner] | None = None,
    ) -> Engine:
        """Return an engine with an empty cache; steps go through the runner that `around` returns.
        Close it before you build the next one."""
        config.check()
        gc.collect()  # the last engine's host memory, which may be most of this machine's
        loaded = self._load(config)
        sched = replace(config.sched, chunk_tokens=loaded.chunk_tokens)
        config = replace(config, sched=sched)

        def kept(runner: Runner) -> Runner:
            return KeptRunner(runner) if around is None else around(KeptRunner(runner))

        return join(loaded.runner, loaded.facts, config, bus or EventBus(), around=kept)

    def close(self) -> None:
        """Free the device's memory."""
        if self._loaded is not None:
            self._loaded.runner.close()
            self._loaded = None
        free_memory()

    def _load(self, config: EngineConfig) -> _LoadedRunner:
        if self._loaded is None or _of_runner(self._loaded.given) != _of_runner(config):
            self.close()
            runner, facts, sized = load_folder(self.folder, config)
            self._loaded = _LoadedRunner(config, sized.sched.chunk_tokens, runner, facts)
        return self._loaded


def _of_runner(config: EngineConfig) -> tuple[object, ...]:
    """The settings that a loaded model depends on."""
    return config.model, config.cache, config.sched.max_model_len, config.sched.chunk_tokens


def free_memory() -> None:
    """Free the device's memory, including tensors of engines that were closed. Call it before a
    model is loaded: pages may take most of a card."""
    gc.collect()  # engines are in reference cycles with their event buses
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
