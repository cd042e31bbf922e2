"""The tiers below the device, as the config wants them, and what is fetched from them."""

from pathlib import Path

from mainstem.core.config import StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.step import Runner
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.bytes.ledger import ledger_of
from mainstem.kv.ranking import PolicyKind
from mainstem.kv.store import KVStore
from mainstem.kv.tier import LowerTier
from mainstem.kv.tiers import LowerTiers
from mainstem.plan.cost import Card, ModelSize, step_s
from mainstem.runner.transfer import connect
from mainstem.sched.fetching import Fetching, StepTimes

PROMPT_TOKENS = 512  # a step of so many is what a prompt's token costs


def make_tiers(
    runner: Runner, identity: bytes, name: str, config: StoreConfig, bus: EventBus
) -> LowerTiers | None:
    """Host memory and disk for a runner's pages; None: the config wants none. `name` is what people
    call the model of this identity."""
    if config.host_bytes == 0:
        return None
    copier = connect(runner, config.host_bytes)
    below: list[LowerTier] = []
    if config.disk_dir is not None:
        folder = store_folder(Path(config.disk_dir), identity)
        disk = DiskTier(
            folder,
            copier.page_bytes,
            config.disk_bytes,
            identity.hex(),
            model=name,
            ledger=ledger_of(folder),
        )
        below.append(disk)
    kind = PolicyKind(config.policy.value)
    return LowerTiers(copier, kind, config.ttl_s, below, bus)


def store_folder(root: Path, identity: bytes) -> Path:
    """Where one model's pages lie; models and forms of one model do not share pages."""
    return root.expanduser() / identity.hex()[:16]


def make_fetching(card: Card, num_params: int, config: StoreConfig, store: KVStore) -> Fetching:
    """What is loaded and what computed again, for a model of so many weights in its layers."""
    assert store.tiers is not None
    size = ModelSize(num_params, 0.0, 0.0)
    token_s = step_s(card, size, PROMPT_TOKENS, 0, 0) / PROMPT_TOKENS
    steps = StepTimes(token_s, floor_s=step_s(card, size, 0, 0, 0))
    return Fetching(config, store.tiers, store.page_size, steps)
