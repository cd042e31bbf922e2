"""Config -> Engine: the only place where parts are chosen and joined."""

from functools import partial
from pathlib import Path

from mainstem.core.config import DType, EngineConfig
from mainstem.core.events import EventBus
from mainstem.engine.engine import Engine
from mainstem.kv.store import KVStore
from mainstem.plan.cost import GENERIC_CPU, Heads, worth_sharing
from mainstem.runner.runner import load_runner
from mainstem.sched.scheduler import Scheduler


def build_engine(folder: Path, config: EngineConfig, bus: EventBus | None = None) -> Engine:
    """Load the model in `folder` and put an engine around it.

    Raises UnsupportedModel for a checkpoint we cannot run, ConfigError for impossible settings.
    """
    bus = bus or EventBus()
    runner, facts = load_runner(folder, config.model, config.cache, config.sched.max_model_len)
    store = KVStore(facts.num_pages, facts.page_size, facts.identity, bus)
    element_bytes = 4 if facts.dtype is DType.FP32 else 2
    heads = Heads(facts.num_heads, facts.num_kv_heads, facts.head_dim, element_bytes)
    scheduler = Scheduler(
        config.sched,
        store,
        facts.vocab_size,
        facts.max_model_len,
        bus,
        worth_sharing=partial(worth_sharing, GENERIC_CPU, heads),
    )
    return Engine(scheduler, runner, bus)
