"""Settings: frozen sections, from defaults, a TOML file and flags; a flag overrides the file.
Their help texts (core/settings.py) are written here and nowhere else.

MAINSTEM_REMOTE_USERNAME, _PASSWORD and _KEY are the only variables that are read here, see
RemoteSecrets; the others are in core/environment.py.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path

from mainstem.core.errors import ConfigError
from mainstem.core.settings import (
    BITS_64,
    LAYERS,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    POWER_OF_TWO,
    SHARE,
    at_least,
    check_ranges,
    setting,
    settings_of,
)
from mainstem.core.spelling import did_you_mean


@dataclass(frozen=True, slots=True)
class RemoteSecrets:
    """The account on the server of a remote store, and the key that pages there are signed with.
    They are never command-line arguments, because other users can read those."""

    username: str | None = None
    password: str | None = None
    key: str | None = None

    @classmethod
    def read(cls, path: Path | None) -> "RemoteSecrets":
        """Read the secrets from a TOML file with these names. Those that are not in it, or all if
        there is no file, come from the environment."""
        names = [field.name for field in fields(cls)]
        found = {name: os.environ.get(f"MAINSTEM_REMOTE_{name.upper()}") for name in names}
        if path is None:
            return cls(**found)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read remote_secrets {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            raise ConfigError(f"remote_secrets {path} is not valid TOML") from None
        for name, value in table.items():
            if name not in names or not isinstance(value, str) or not value:
                known = ", ".join(names)
                raise ConfigError(f"{path}: {name!r} is unknown, empty or no text. Known: {known}")
        return cls(**found | table)

    def __repr__(self) -> str:
        return "RemoteSecrets(...)"


class Share(Enum):
    """What sequences with a common prefix share (the three systems in RelayAttention)."""

    NONE = "none"  # everything computed, stored and read per sequence
    STORAGE = "storage"  # computed and stored once, read per sequence
    READS = "reads"  # computed once, stored once, read once per step


class Siblings(Enum):
    """Whether sequences that start from one state of recurrent layers read it together."""

    AUTO = "auto"  # on a CPU; on a GPU no whole job has gained from it yet
    ON = "on"
    OFF = "off"


class DType(Enum):
    AUTO = "auto"  # the checkpoint's, unless the device is slow with it
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"


class Device(Enum):
    AUTO = "auto"  # the first GPU, or the CPU if there is none
    CPU = "cpu"
    CUDA = "cuda"


class Quantize(Enum):
    NONE = "none"
    INT8 = "int8"  # CPU: int8 weights per channel, activations quantized per token
    FP8 = "fp8"  # GPU: e4m3 weights per channel, activations quantized per token


class KvDType(Enum):
    AUTO = "auto"  # the compute dtype; fp8 if the checkpoint declares it
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, a scale for each full page and head; the page being filled stays as it is


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which form."""

    model: str = setting(
        "smollm2", "a folder in Hugging Face layout, a hub id, or the embedded model"
    )
    dtype: DType = setting(
        DType.AUTO,
        "type of the weights; auto: the checkpoint's, or float32 if the CPU is slow with that",
    )
    device: Device = setting(
        Device.AUTO, "where to run; auto is the first GPU, or the CPU if there is none"
    )
    quantize: Quantize = setting(
        Quantize.NONE,
        "smaller weights: int8 (CPU) raises smollm2's perplexity by 1.2 %, fp8 (GPU) by 3 %",
    )
    threads: int | None = setting(None, "CPU threads", unset="all cores", range=at_least(1))
    chat_template: str | None = setting(
        None,
        "a Jinja file that turns messages into a prompt",
        unset="the model's own",
        metavar="FILE.jinja",
    )
    allow_special_tokens: bool = setting(
        False, "read special tokens in messages as control tokens, and allow any role"
    )
    deterministic: bool = setting(
        False,
        "the same answers bit for bit in any batch; GPU only, up to 2x slower (not measured for "
        "hybrids)",
    )
    tensor_parallel: int = setting(
        1,
        "ranks that share the model, one GPU each; on a CPU, processes that share its cores",
        range=at_least(1),
    )
    ranks_on_one_gpu: bool = setting(
        False, "put all ranks on one GPU: to check answers, not for speed"
    )
    ignore_config_fields: tuple[str, ...] | None = setting(
        None,
        "unknown fields of config.json to ignore, by name; repeatable",
        unset="none",
        metavar="NAME[,NAME]",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.ranks_on_one_gpu and self.tensor_parallel == 1:
            raise ConfigError("ranks_on_one_gpu needs tensor_parallel above 1")


DEFAULT_CHUNK_TOKENS = 512  # on a CPU
EXPECTED_TOKENS = 2048  # of a sequence, to divide memory between pages and states
MOST_STATES = 1024  # sequences that states are allocated for, unless max_seqs is more


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV memory."""

    page_size: int = setting(16, "tokens per page; 16, 32 or 64 on a GPU", range=POWER_OF_TWO)
    kv_dtype: KvDType = setting(
        KvDType.AUTO,
        "form of full pages of K and V. fp8: half of 16 bits on the device and in every tier. "
        "auto: the compute dtype, or on a CPU fp8 with the checkpoint's scales if it has them",
    )
    kv_tokens: int | None = setting(None, "tokens of KV on the device", unset="from free memory")
    expected_tokens: int | None = setting(
        None,
        "length of a sequence to expect: memory is divided for it between pages and their windowed "
        "parts, if only some layers have a window, and the open pages of kv_dtype=fp8, which limit "
        "the answers in progress",
        unset="the context window, at most 8,192; open pages take 1/32 of the memory, or with "
        "max_seqs up to 1/4",
        range=at_least(1),
    )
    states: int | None = setting(
        None,
        "states of recurrent layers on the device: one for each answer in progress (with tiers "
        "below the device, two), the others are kept for later requests",
        unset="from free memory, for sequences of 2,048 tokens",
        range=at_least(2),
    )
    memory_share: float | None = setting(
        None,
        "share of the memory (on a CPU, of the available memory) for weights and pages, if "
        "kv_tokens is not set",
        unset="0.9 on a GPU; on a CPU, pages take 40 % of what the weights leave",
        range=SHARE,
        argument="gpu_memory_utilization",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ConfigError(
                f"kv_tokens must be at least {self.page_size} (one page), got {self.kv_tokens}"
            )

    def num_states(
        self,
        free_bytes: int,
        token_bytes: int,
        state_bytes: int,
        max_seqs: int | None,
        *,
        has_tiers: bool = False,
    ) -> int:
        """States to allocate in `free_bytes`, in which pages must fit, too: the number that was
        set, or two for each sequence of EXPECTED_TOKENS that fits, and three with tiers below the
        device (sched/states.py). 0 if the model has no recurrent layers."""
        if state_bytes == 0:
            return 0
        if self.states is not None:
            return self.states
        per_seq = 3 if has_tiers else 2
        if self.kv_tokens is not None:
            most = -(-self.kv_tokens // EXPECTED_TOKENS)
        else:
            most = free_bytes // (per_seq * state_bytes + EXPECTED_TOKENS * token_bytes)
        return per_seq * max(1, min(most, max_seqs or MOST_STATES)) + 2

    def num_pages(self, free_bytes: int, page_bytes: int) -> int:
        """Pages to allocate: the number that was set, or what fits into `free_bytes`."""
        if self.kv_tokens is not None:
            return -(-self.kv_tokens // self.page_size)
        return max(1, free_bytes // page_bytes)

    def check_fits(self, num_bytes: int, free_bytes: int) -> None:
        """Raise ConfigError if pages of `num_bytes` do not fit into memory."""
        if num_bytes > free_bytes:
            need = f"{num_bytes / 1e9:.1f} GB for KV"
            raise ConfigError(
                f"kv_tokens={self.kv_tokens} needs {need}; {free_bytes / 1e9:.1f} GB are free"
            )


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """What goes into a step. It is limited by memory and tokens, and by the number of requests if
    that is set."""

    # S_chunk of BatchLLM
    chunk_tokens: int | None = setting(
        None,
        "maximum tokens per step; step_ms keeps streams smooth",
        unset="chosen for the device",
        range=at_least(1),
    )
    step_ms: float | None = setting(
        None,
        "maximum milliseconds of a step that prompts share with answers in progress; prompts "
        "still get 32 tokens of it. 0: no limit",
        unset="250 in a server, unless deterministic; elsewhere no limit",
        range=NOT_NEGATIVE,
        metavar="MS",
    )
    max_seqs: int | None = setting(
        None, "maximum answers in progress", unset="memory is the limit", range=at_least(1)
    )
    share: Share = setting(
        Share.READS,
        "what equal prefixes share: nothing (none), computation and storage (storage), or also "
        "reads, once per step (reads)",
    )
    siblings: Siblings = setting(
        Siblings.AUTO,
        "whether sequences that start from one state of recurrent layers read it together, and "
        "keep only rows of their own tokens; needs share=reads. auto: on a CPU. On a GPU no whole "
        "job has gained from it yet",
    )
    max_model_len: int | None = setting(
        None, "context window", unset="the model's own", range=at_least(2)
    )
    seed: int = setting(0, "for requests without a seed", range=BITS_64, has_flag=False)
    span_levels: int | None = setting(
        None,
        "how deep shared reads may be nested, at most 8 on a GPU",
        unset="no limit on a CPU, 8 on a GPU",
        range=at_least(1),
    )
    truncation_ratio: float = setting(
        0.5, "part of the window that is dropped when a conversation fills it", range=PART
    )
    sink_tokens: int | None = setting(
        None,
        "first tokens of a conversation that are never dropped",
        unset="a page",
        range=at_least(0),
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class Saving(Enum):
    """When filled pages go from the device to host memory and on (AttentionStore 3.2.2)."""

    DECODING = "decoding"  # all pages as soon as they are full, while the next steps run
    # pages of prompts as soon as they are full, those of answers when their sequence ends
    END = "end"
    SYNC = "sync"  # all pages when their sequence ends, and the next step waits: a baseline


class Fetch(Enum):
    """Whether pages in host memory or on disk are loaded or computed again."""

    AUTO = "auto"  # whichever is faster, by the cost model
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where pages go that do not fit on the device."""

    host_gb: float | None = setting(
        None,
        "host memory for pages",
        unset="none; 1 with a disk or remote",
        range=NOT_NEGATIVE,
        metavar="GB",
    )
    disk_dir: str | None = setting(
        None, "folder for pages that outlive the process", unset="none", metavar="DIR"
    )
    disk_gb: float = setting(
        20.0, "maximum size of one model's pages on disk", range=POSITIVE, metavar="GB"
    )
    remote: str | None = setting(
        None,
        "a Redis or Valkey server for pages that several processes share: redis://, rediss:// "
        "(TLS), valkey://, valkeys:// or unix://",
        unset="none",
        metavar="URL",
    )
    remote_gb: float = setting(
        20.0,
        "maximum memory to use on the remote server, if the server has no limit of its own",
        range=POSITIVE,
        metavar="GB",
    )
    remote_ttl_s: float = setting(
        86400.0,
        "seconds after which unused pages expire on the remote server",
        range=POSITIVE,
        metavar="S",
        argument="remote_ttl",
    )
    remote_secrets: str | None = setting(
        None,
        "TOML file with username, password and key (what pages are signed with)",
        unset="from MAINSTEM_REMOTE_USERNAME, _PASSWORD, _KEY",
        metavar="FILE",
    )
    ttl_s: float | None = setting(
        None,
        "seconds after which unused pages are dropped",
        unset="never",
        range=POSITIVE,
        metavar="S",
        argument="store_ttl",
    )
    policy: str = setting(
        "lookahead",
        "which pages leave first, in every tier: those that no waiting request needs "
        "(lookahead), or the least recently used (lru)",
        argument="store_policy",
        choices=("lookahead", "lru"),
    )  # names in kv/eviction.py
    save: Saving = setting(
        Saving.DECODING,
        "when pages of answers are saved: as they fill (decoding), or when a sequence ends (end)",
        argument="store_save",
        choices=("decoding", "end"),
    )
    fetch: Fetch = setting(
        Fetch.AUTO,
        "whether stored pages are loaded: if that is faster than computing them (auto), "
        "always, or never",
        argument="store_fetch",
    )
    # auto: few enough layers that the others are loaded before they are needed
    preload: str = setting(
        "auto",
        "layers of a history that must be loaded before its prompt starts: auto, all or a number",
        range=LAYERS,
        metavar="LAYERS",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.host_gb == 0 and (self.disk_dir is not None or self.remote is not None):
            raise ConfigError("pages go through host memory: host_gb must be above 0")

    @property
    def host_bytes(self) -> int:
        """Host memory for pages; 0: there is no tier below the device."""
        given = self.host_gb
        if given is None:
            given = 0.0 if self.disk_dir is None and self.remote is None else 1.0
        return int(given * 1e9)

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_gb * 1e9)

    @property
    def remote_bytes(self) -> int:
        return int(self.remote_gb * 1e9)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All sections; each part of the engine receives only its own."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    store: StoreConfig = field(default_factory=StoreConfig)

    def check(self) -> None:
        """Raise ConfigError if a setting would be ignored because of another.

        Call it for complete configs, before the model is loaded. While a file and flags are being
        joined, one of them may still set what the other needs.
        """
        store = self.store
        tiers = "host_gb, disk_dir or remote"
        if not store.host_bytes:
            self._refuse("store", "save fetch preload ttl_s", f"set {tiers}")
        if store.disk_dir is None:
            self._refuse("store", "disk_gb", "set disk_dir")
        if store.remote is None:
            self._refuse("store", "remote_gb remote_ttl_s remote_secrets", "set remote")
        if store.fetch is Fetch.NEVER:
            self._refuse("store", "preload", "set store_fetch to auto or always")
        if self.sched.share is Share.NONE:
            needed = "set share to storage or reads"
            self._refuse("store", "disk_dir remote policy", needed)
            if store.host_bytes:
                self._refuse("store", "host_gb", needed)
        if self.sched.share is not Share.READS:
            self._refuse("sched", "span_levels", "set share to reads")
        if self.cache.kv_tokens is not None:
            self._refuse("cache", "memory_share", "leave out kv_tokens")
        if self.model.deterministic and self.sched.step_ms:
            raise ConfigError(
                f"step_ms={self.sched.step_ms:g} and deterministic exclude each other: where "
                "prompts are cut would depend on time. Leave one of them out; chunk_tokens limits "
                "steps, too"
            )

    def _refuse(self, section: str, names: str, needed: str) -> None:
        """Raise ConfigError if one of these settings is not at its default."""
        for row in SETTINGS:
            value = getattr(getattr(self, section), row.name, None)
            if row.section == section and row.name in names.split() and value != row.default:
                shown = value.value if isinstance(value, Enum) else value
                raise ConfigError(
                    f"{row.argument}={shown} would have no effect: {needed}, or leave it out"
                )

    def sharing(self, share: Share) -> "EngineConfig":
        """A copy with this `share`, without settings that have no effect then. Used by runs that
        compare ways of sharing."""
        sched = replace(self.sched, share=share)
        if share is not Share.READS:
            sched = replace(sched, span_levels=None)
        return replace(
            self, sched=sched, store=StoreConfig() if share is Share.NONE else self.store
        )


SETTINGS = tuple(
    row
    for section in fields(EngineConfig())
    for row in settings_of(section.name, type(getattr(EngineConfig(), section.name)))
)


def load_config(path: Path) -> EngineConfig:
    """Read a TOML file with sections as in EngineConfig; unknown names are refused."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, section in table.items():
        _check_section(path, name, section)
    config = EngineConfig()
    for name, values in table.items():
        config = _updated(config, name, values, f"{path} [{name}]")
    return config


def _check_section(path: Path, name: str, value: object) -> None:
    """Raise ConfigError unless a file's top-level entry is a known section."""
    sections = [section.name for section in fields(EngineConfig())]
    listed = ", ".join(f"[{section}]" for section in sections)
    if isinstance(value, dict):
        if name not in sections:
            raise ConfigError(
                f"{path}: unknown section [{name}].{did_you_mean(name, sections)} "
                f"Sections are {listed}"
            )
        return
    home = next((row for row in SETTINGS if name in (row.name, row.argument)), None)
    if home is None:
        raise ConfigError(
            f"{path}: {name!r} is outside a section, and no setting has that name."
            f"{did_you_mean(name, [row.name for row in SETTINGS])} Sections are {listed}"
        )
    raise ConfigError(
        f"{path}: {name!r} is outside a section. Put {home.name} below a line [{home.section}]"
    )


def _advice(name: str, section: str) -> str:
    """What a user probably meant by a name that is not in this section."""
    for row in SETTINGS:
        if name in (row.name, row.argument):
            here = "" if row.section == section else f", in section [{row.section}]"
            return f"It is called {row.name}{here}"
    known = sorted(row.name for row in SETTINGS if row.section == section)
    return f"{did_you_mean(name, known).lstrip()} Known: {', '.join(known)}".lstrip()


def with_arguments(config: EngineConfig, values: Mapping[str, object], where: str) -> EngineConfig:
    """A copy with other `values`. Their names are those of flags and of LLM's arguments; enum
    members are given by value."""
    known = [row.argument for row in SETTINGS]
    for name in values:
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}.{did_you_mean(name, known)}")
    for section in fields(config):
        rows = [row for row in SETTINGS if row.section == section.name]
        given = {row.name: values[row.argument] for row in rows if row.argument in values}
        config = _updated(config, section.name, given, where)
    return config


def _updated(
    config: EngineConfig, section: str, values: Mapping[str, object], where: str
) -> EngineConfig:
    """A copy with `values` put into a section."""
    known = {row.name: row for row in SETTINGS if row.section == section}
    for name in values:
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}. {_advice(name, section)}")
    changes = {name: known[name].read(value, where) for name, value in values.items()}
    # names and types were checked by `read`
    made = replace(getattr(config, section), **changes)
    return replace(config, **{section: made})
