"""Makes the configured tiers below the device, and what chooses between loading and computing."""

from pathlib import Path

from mainstem.core.config import RemoteSecrets, StoreConfig
from mainstem.core.events import EventBus
from mainstem.core.step import Runner
from mainstem.kv.bytes.disk import DiskTier
from mainstem.kv.bytes.ledger import ledger_of
from mainstem.kv.bytes.line import Address
from mainstem.kv.bytes.remote import RemoteSettings, RemoteTier
from mainstem.kv.eviction import policy_named
from mainstem.kv.stack import TierStack
from mainstem.kv.store import KVStore
from mainstem.kv.tier import LowerTier
from mainstem.plan.cost import Card, ModelSize, step_s
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.transfer import connect
from mainstem.sched.fetching import Fetching
from mainstem.sched.step_times import StepTimes

PROMPT_TOKENS = 512  # size of the step from which the cost of a prompt token is computed


def make_tiers(
    runner: Runner, identity: bytes, name: str, config: StoreConfig, bus: EventBus
) -> TierStack:
    """Make the configured tiers for a runner's pages: host memory, disk, a server; none if there is
    no host memory for pages. `name` is the name of the model with this identity."""
    if config.host_bytes == 0:
        return TierStack(bus)
    policy_named(config.policy)  # an unknown name is refused before anything is opened
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
    if config.remote is not None:
        below.append(make_remote(config.remote, identity, copier.page_bytes, config))
    return TierStack(bus, copier, below, config.policy, config.ttl_s)


def make_remote(url: str, identity: bytes, page_bytes: int, config: StoreConfig) -> RemoteTier:
    """Pages on a server that other processes of the same model share. Without a key pages are
    signed with the model's identity, which anyone with the model's files can compute, too."""
    path = None if config.remote_secrets is None else Path(config.remote_secrets).expanduser()
    secrets = RemoteSecrets.read(path)
    ttl_s = min(config.remote_ttl_s, config.ttl_s or config.remote_ttl_s)
    secret = identity if secrets.key is None else secrets.key.encode()
    settings = RemoteSettings(identity, secret, ttl_s, config.remote_bytes)
    return RemoteTier(Address(url, secrets.username, secrets.password), page_bytes, settings)


def store_folder(root: Path, identity: bytes) -> Path:
    """The folder of one model's pages; models, and variants of one model, do not share pages."""
    return root.expanduser() / identity.hex()[:16]


def make_fetching(card: Card, facts: RunnerFacts, config: StoreConfig, store: KVStore) -> Fetching:
    """Make the object that chooses between loading and computing pages."""
    size = ModelSize(
        facts.num_params,
        0.0,
        0.0,
        bytes_per_param=facts.bytes_per_param,
        num_idle_params=facts.num_idle_params,
    )
    token_s = step_s(card, size, PROMPT_TOKENS, 0, 0) / PROMPT_TOKENS
    steps = StepTimes(token_s, floor_s=step_s(card, size, 0, 0, 0))
    return Fetching(config, store.loader, store.page_size, steps)
