"""The tiers below the device as configured, and the choice between loading and computing."""

from pathlib import Path

from mainstem.core.config import StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.step import Runner
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.bytes.ledger import ledger_of
from mainstem.kv.policy import PolicyKind
from mainstem.kv.store import KVStore
from mainstem.kv.tiers import LowerTiers
from mainstem.plan.cost import Card, ModelSize, step_s
from mainstem.runner.transfer import connect
from mainstem.sched.fetching import Fetching, StepTimes

PROMPT_TOKENS = 512  # of the step that gives the cost of a prompt token


def make_tiers(
    runner: Runner, identity: bytes, name: str, config: StoreConfig, bus: EventBus
) -> LowerTiers | None:
    """Host memory and disk for a runner's pages; None: not configured. `name` is the name of the
    model with this identity."""
    if config.host_bytes == 0:
        return None
    copier = connect(runner, config.host_bytes)
    disk = None
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
    kind = PolicyKind(config.policy.value)
    return LowerTiers(copier, kind, config.ttl_s, disk, bus)


def store_folder(root: Path, identity: bytes) -> Path:
    """The folder of one model's pages; models, and variants of one model, do not share pages."""
    return root.expanduser() / identity.hex()[:16]


def make_fetching(card: Card, num_params: int, config: StoreConfig, store: KVStore) -> Fetching:
    """Decides between loading and computing, for a model with `num_params` in its layers."""
    assert store.tiers is not None
    size = ModelSize(num_params, 0.0, 0.0)
    token_s = step_s(card, size, PROMPT_TOKENS, 0, 0) / PROMPT_TOKENS
    steps = StepTimes(token_s, floor_s=step_s(card, size, 0, 0, 0))
    return Fetching(config, store.tiers, store.page_size, steps)
