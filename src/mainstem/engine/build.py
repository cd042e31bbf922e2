"""Config -> Engine: the only place where parts are chosen and joined."""

from pathlib import Path

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.kv.store import KVStore
from mainstem.runner.runner import load_runner
from mainstem.sched.scheduler import Scheduler


def build_engine(folder: Path, config: EngineConfig, bus: EventBus | None = None) -> Engine:
    """Load the model in `folder` and put an engine around it.

    Raises UnsupportedModel for a checkpoint we cannot run, ConfigError for impossible settings.
    """
    bus = bus or EventBus()
    runner, facts = load_runner(folder, config.model, config.cache, config.sched.max_model_len)
    store = KVStore(facts.num_pages, facts.page_size, facts.identity, bus)
    scheduler = Scheduler(config.sched, store, facts.vocab_size, facts.max_model_len, bus)
    return Engine(scheduler, runner, bus)
