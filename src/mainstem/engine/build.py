"""Config -> Engine: loads a model, and joins runner, tiers, store and scheduler."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mainstem.core.config import DType, EngineConfig
from mainstem.core.events import EventBus
from mainstem.core.step import Runner
from mainstem.engine.engine import Engine
from mainstem.engine.store_log import StoreLog
from mainstem.engine.tiers import make_fetching, make_tiers
from mainstem.kv.parts import WindowParts
from mainstem.kv.store import KVStore
from mainstem.models.spec import ModelSpec
from mainstem.plan.cost import Heads, card_for, full_speed_tokens, prefill_tokens, worth_sharing
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.load import CPU, device_name
from mainstem.runner.origin import RandomOrigin, folder_origin
from mainstem.runner.ranks.load import load_model, weights_of
from mainstem.sched.scheduler import Scheduler

# limited, since each token needs memory for one Partial per few hundred keys
DETERMINISTIC_CHUNK_TOKENS = 1024

log = logging.getLogger("mainstem.engine")


def build_engine(
    folder: Path,
    config: EngineConfig,
    bus: EventBus | None = None,
    *,
    around: Callable[[Runner], Runner] | None = None,
) -> Engine:
    """Load the model in `folder` and put an engine around it.

    `around` lets a benchmark watch the steps. Raises UnsupportedModel for a checkpoint we cannot
    run, ConfigError for impossible settings.
    """
    runner, facts, config = load_folder(folder, config)
    with closed_on_error(runner):
        return join(runner, facts, config, bus or EventBus(), around)


def load_folder(folder: Path, config: EngineConfig) -> tuple[Runner, RunnerFacts, EngineConfig]:
    """Load the model in `folder`. Also returns the config with the step size of this model."""
    config.check()
    origin = folder_origin(folder, config.model.ignore_config_fields or ())
    config = with_chunk(config, origin.spec)
    if ignored := origin.spec.ignored_fields:
        log.warning(
            "config.json of %s: ignored %s because of ignore_config_fields; answers are wrong if "
            "the model depends on it",
            config.model.model,
            ", ".join(ignored),
        )
    if dropped := origin.spec.dropped:
        log.warning("%s is loaded without %s", config.model.model, ", ".join(dropped))
    runner, facts = load_model(origin, config)
    return runner, facts, config


def build_random_engine(
    shape: ModelSpec, config: EngineConfig, bus: EventBus | None = None, seed: int = 0
) -> Engine:
    """An engine around random weights of a known shape, for measuring speed."""
    config.check()
    config = with_chunk(config, shape)
    runner, facts = load_model(RandomOrigin(shape, seed), config)
    name = f"random weights, {config.model.model or shape.architecture}"
    named = replace(config, model=replace(config.model, model=name))
    with closed_on_error(runner):
        return join(runner, facts, named, bus or EventBus())


@contextmanager
def closed_on_error(runner: Runner) -> Iterator[None]:
    """Close the runner if the block raises: it holds processes and device memory."""
    try:
        yield
    except BaseException:
        runner.close()
        raise


def with_chunk(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the config. If it has no step size and the device is a GPU, the cost model chooses
    one."""
    name = device_name(config.model)
    if config.sched.chunk_tokens is not None or name == CPU:
        return config
    tokens = full_speed_tokens(card_for(name), spec.moved_bytes_per_param)
    if config.model.deterministic:
        tokens = min(tokens, DETERMINISTIC_CHUNK_TOKENS)
    return replace(config, sched=replace(config.sched, chunk_tokens=tokens))


def join(
    runner: Runner,
    facts: RunnerFacts,
    config: EngineConfig,
    bus: EventBus,
    around: Callable[[Runner], Runner] | None = None,
) -> Engine:
    """An engine around a loaded runner, with the tiers below the device. Steps go through the
    runner that `around` returns."""
    log.info("memory of each rank: %s", facts.budget)
    StoreLog(bus)
    parts = None
    if facts.num_parts:
        assert facts.window is not None
        parts = WindowParts(facts.num_pages, facts.num_parts, facts.window, facts.page_size)
    stack = make_tiers(runner, facts.identity, config.model.model, config.store, bus)
    store = KVStore(
        facts.num_pages,
        facts.page_size,
        facts.identity,
        bus,
        stack,
        config.store,
        facts.num_states,
        pages_per_state=facts.pages_per_state,
        rows_per_slot=facts.rows_per_slot,
        row_slots_per_state=facts.row_slots_per_state,
        parts=parts,
        state_cost=partial(prefill_tokens, facts.num_params, facts.pair_flops),
        has_whole_pages=facts.num_open_pages is not None,
    )
    if facts.num_states and stack.tiers and store.stored_states is None:
        log.warning(
            "states of recurrent layers stay on the device: host_gb=%g has no room for two of them",
            config.store.host_bytes / 1e9,
        )
    element_bytes = 4 if facts.dtype is DType.FP32 else 2
    heads = Heads(facts.num_heads, facts.num_kv_heads, facts.head_dim, element_bytes)
    card = card_for(facts.device_name)
    sched = config.sched
    scheduler = Scheduler(
        replace(
            sched,
            span_levels=sched.span_levels or facts.max_span_levels,
            max_seqs=facts.num_open_pages or sched.max_seqs,
        ),
        store,
        facts.vocab_size,
        facts.max_model_len,
        bus,
        worth_sharing=partial(worth_sharing, card, heads),
        max_step_tokens=facts.max_step_tokens,
        span_align_tokens=facts.span_align_tokens,
        fetching=make_fetching(card, facts, config.store, store) if stack.tiers else None,
    )
    weights = weights_of(runner)
    wrapped = runner if around is None else around(runner)
    return Engine(scheduler, wrapped, bus, facts.identity, weights)
