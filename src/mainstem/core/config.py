"""Settings: frozen sections, from defaults, a TOML file and flags, in that order of strength.

The only place that reads the environment:
    MAINSTEM_CACHE   folder for converted models and stores
    XDG_CACHE_HOME   where that folder lies otherwise
and writes to it:
    MIMALLOC_PURGE_DELAY   unless set, see keep_freed_memory
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import inf
from pathlib import Path
from typing import TypeVar

from mainstem.core.errors import ConfigError

# settings whose default does not show that they are not whole numbers
FRACTIONS = frozenset({"memory_share", "host_gb", "disk_gb", "ttl_s", "truncation_ratio"})
NAMES = frozenset({"disk_dir", "chat_template"})

S = TypeVar("S", "ModelConfig", "CacheConfig", "SchedConfig", "StoreConfig")


def cache_dir() -> Path:
    """Where converted models live; not created here."""
    if own := os.environ.get("MAINSTEM_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "mainstem"
    return Path.home() / ".cache" / "mainstem"


def keep_freed_memory() -> None:
    """Let torch reuse a layer's buffers for the next layer. To be called before torch is loaded.

    Its builds for Arm bring mimalloc, which hands memory back to the system 10 ms after it was
    freed: every layer of a long step then pays for fresh pages, a tenth of an int8 step's time.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # milliseconds


class Share(Enum):
    """What sequences with a common prefix share (the three systems RelayAttention compares)."""

    NONE = "none"  # everything computed, stored and read per sequence
    STORAGE = "storage"  # computed and stored once, read per sequence
    READS = "reads"  # computed once, stored once, read once per step


class DType(Enum):
    AUTO = "auto"  # the checkpoint's, except where the device is slow at it
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"


class Device(Enum):
    AUTO = "auto"  # the first GPU where there is one
    CPU = "cpu"
    CUDA = "cuda"


class Quantize(Enum):
    NONE = "none"
    INT8 = "int8"  # CPU: int8 weights per channel, activations quantized as they come
    FP8 = "fp8"  # GPU: e4m3 weights per channel, activations quantized per token


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which form."""

    model: str = "smollm2"
    dtype: DType = DType.AUTO
    device: Device = Device.AUTO
    quantize: Quantize = Quantize.NONE
    threads: int | None = None  # CPU threads; None: all cores
    chat_template: str | None = None  # a Jinja file to use instead of the model's own
    # a request's tokens do not depend on what runs beside it, to the bit; GPU, up to 2x slower
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV memory."""

    page_size: int = 16  # tokens per page; a power of two
    kv_tokens: int | None = None  # None: from free memory
    memory_share: float | None = None  # of the memory, for weights and pages; None: a cautious one

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1) or self.page_size > 1024:
            raise ConfigError(
                f"page_size must be a power of two, at most 1024, got {self.page_size}"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ConfigError(
                f"kv_tokens must hold a page of {self.page_size}, got {self.kv_tokens}"
            )
        if self.memory_share is not None and not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(
                f"memory_share must be above 0 and at most 1, got {self.memory_share}"
            )

    def num_pages(self, free_bytes: int, page_bytes: int) -> int:
        """Pages to allocate: what was asked for, or what fits in `free_bytes`."""
        if self.kv_tokens is not None:
            return -(-self.kv_tokens // self.page_size)
        return max(1, free_bytes // page_bytes)

    def check_fits(self, num_bytes: int, free_bytes: int) -> None:
        """Raise ConfigError if pages of `num_bytes` are more than there is memory for."""
        if num_bytes > free_bytes:
            need = f"{num_bytes / 1e9:.1f} GB for KV"
            raise ConfigError(
                f"kv_tokens={self.kv_tokens} needs {need}; {free_bytes / 1e9:.1f} GB are free"
            )


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """What goes into a step. Memory and tokens are the only limits; requests are not counted."""

    # most tokens in one step (S_chunk of BatchLLM); None: what keeps the device busy
    chunk_tokens: int | None = None
    share: Share = Share.READS
    max_model_len: int | None = None  # None: the model's own context window
    seed: int = 0  # for requests that bring none
    # shared spans above one another; None: no limit on a CPU, 4 (the most there is) on a GPU
    span_levels: int | None = None
    truncation_ratio: float = 0.5  # part of the window that is dropped when a conversation fills it
    sink_tokens: int | None = None  # first tokens that are never dropped; None: a page

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.span_levels is not None and self.span_levels < 1:
            raise ConfigError(f"span_levels must be at least 1, got {self.span_levels}")
        if not 0.0 < self.truncation_ratio < 1.0:
            raise ConfigError(
                f"truncation_ratio must be between 0 and 1, got {self.truncation_ratio}"
            )
        if self.sink_tokens is not None and self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens must be at least 0, got {self.sink_tokens}")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must fit into 64 bits, got {self.seed}")


class StorePolicy(Enum):
    """Which pages leave host memory and disk first."""

    LOOKAHEAD = "lookahead"  # what the waiting queue will not need (AttentionStore 3.3)
    LRU = "lru"
    FIFO = "fifo"


class Fetch(Enum):
    """Whether pages in host memory or on disk are loaded or computed again."""

    AUTO = "auto"  # whichever is there first, by the cost model
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where pages go that the device has no room for."""

    host_gb: float | None = None  # host memory; None: none, or 1 GB beside a disk
    disk_dir: str | None = None  # a folder for pages that outlive the process; None: no disk
    disk_gb: float = 20.0  # most that one model's pages take there
    ttl_s: float | None = None  # pages unused for so long are dropped; None: kept while they fit
    policy: StorePolicy = StorePolicy.LOOKAHEAD
    fetch: Fetch = Fetch.AUTO
    # layers that must be there before a prompt starts on a history that is still loading: a number,
    # auto (as many as the rest needs to arrive in time), or all
    preload: str = "auto"

    def __post_init__(self) -> None:
        if self.host_gb is not None and not 0 <= self.host_gb < inf:
            raise ConfigError(f"host_gb must be a number of at least 0, got {self.host_gb}")
        if not 0 < self.disk_gb < inf:
            raise ConfigError(f"disk_gb must be a number above 0, got {self.disk_gb}")
        if self.disk_dir is not None and self.host_gb == 0:
            raise ConfigError("pages reach the disk through host memory: host_gb must be above 0")
        if self.ttl_s is not None and not 0 < self.ttl_s < inf:
            raise ConfigError(f"ttl_s must be a number above 0, got {self.ttl_s}")
        if self.preload not in ("auto", "all") and not self.preload.isdecimal():
            raise ConfigError(f"preload must be auto, all or a number, got {self.preload!r}")

    @property
    def host_bytes(self) -> int:
        """Host memory for pages; 0: there is no tier below the device."""
        given = self.host_gb
        if given is None:
            given = 0.0 if self.disk_dir is None else 1.0
        return int(given * 1e9)

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_gb * 1e9)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All sections; each part of the engine receives only its own."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    store: StoreConfig = field(default_factory=StoreConfig)


def load_config(path: Path) -> EngineConfig:
    """Read a TOML file with sections as in EngineConfig; unknown names are refused."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    config = EngineConfig()
    known = {section.name for section in fields(config)}
    if unknown := set(table) - known:
        raise ConfigError(f"{path}: unknown section {sorted(unknown)}; known: {sorted(known)}")
    for name, section in table.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name} must be a section, [{name}]")
    return EngineConfig(
        model=update_section(config.model, table.get("model", {}), f"{path} [model]"),
        cache=update_section(config.cache, table.get("cache", {}), f"{path} [cache]"),
        sched=update_section(config.sched, table.get("sched", {}), f"{path} [sched]"),
        store=update_section(config.store, table.get("store", {}), f"{path} [store]"),
    )


def update_section(section: S, values: Mapping[str, object], where: str) -> S:
    """A copy of `section` with `values` put in; enum members are given by their value."""
    known = {f.name: getattr(section, f.name) for f in fields(section)}
    if unknown := set(values) - set(known):
        raise ConfigError(f"{where}: unknown setting {sorted(unknown)}; known: {sorted(known)}")
    changes: dict[str, object] = {}
    for name, value in values.items():
        old = known[name]
        if isinstance(old, Enum):
            try:
                changes[name] = type(old)(value)
            except ValueError:
                members = [member.value for member in type(old)]
                raise ConfigError(
                    f"{where}: {name} must be one of {members}, got {value!r}"
                ) from None
        elif isinstance(old, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{where}: {name} must be true or false, got {value!r}")
            changes[name] = value
        else:
            is_name = isinstance(old, str) or name in NAMES
            wanted = str if is_name else float if name in FRACTIONS else int
            allowed = (int, float) if wanted is float else wanted
            if value is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
                raise ConfigError(f"{where}: {name} must be {wanted.__name__}, got {value!r}")
            changes[name] = value
    return replace(section, **changes)  # type: ignore[arg-type]  # names and types checked above
