"""Command-line flags that several commands share, and what they mean for the config."""

import argparse
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from mainstem.core.config import (
    Device,
    DType,
    EngineConfig,
    Fetch,
    Quantize,
    Share,
    StorePolicy,
    load_config,
    update_section,
)
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.text.tokenizer import GENERATION_FILE, Tokenizer

MODEL_FLAGS = (
    "model",
    "dtype",
    "device",
    "quantize",
    "threads",
    "chat_template",
    "deterministic",
)
CACHE_FLAGS = ("page_size", "kv_tokens", "memory_share")
SCHED_FLAGS = (
    "chunk_tokens",
    "share",
    "max_model_len",
    "span_levels",
    "truncation_ratio",
    "sink_tokens",
)

STORE_FLAGS = {  # flag -> setting
    "host_gb": "host_gb",
    "disk_dir": "disk_dir",
    "disk_gb": "disk_gb",
    "store_ttl": "ttl_s",
    "store_policy": "policy",
    "store_fetch": "fetch",
    "preload": "preload",
}

DRAW_FLAGS: dict[str, tuple[type, str, str]] = {  # field of SamplingParams -> type, metavar, help
    "temperature": (float, "T", "0 always takes the likeliest token"),
    "top_p": (float, "P", "draw from the likeliest tokens that have P together"),
    "top_k": (int, "K", "draw from the K likeliest tokens; 0: from all"),
    "min_p": (float, "P", "drop tokens below P times the likeliest"),
    "repetition_penalty": (float, "X", "divide logits of tokens that occurred"),
    "presence_penalty": (float, "X", "lower logits of tokens the answer has"),
    "frequency_penalty": (float, "X", "the same, as often as it has them"),
}
GREEDY = dict.fromkeys(DRAW_FLAGS, 0.0) | {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def _values(kind: type[Enum]) -> list[str]:
    return [str(member.value) for member in kind]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Model, memory and scheduling. A flag that is not given leaves the config file's value."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", type=Path, metavar="FILE.toml", help="settings; flags win")
    group.add_argument(
        "--model", help="a folder in Hugging Face layout, a hub id, or smollm2 (the default)"
    )
    group.add_argument("--dtype", choices=_values(DType), help="form of the weights (auto)")
    group.add_argument("--device", choices=_values(Device), help="where to run (auto)")
    group.add_argument(
        "--quantize",
        choices=_values(Quantize),
        help="smaller weights (none): int8 on a CPU costs smollm2 1.2 %% of perplexity, "
        "fp8 on a GPU 3 %%",
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (all cores)")
    group.add_argument(
        "--chat-template",
        metavar="FILE.jinja",
        help="what chats go through instead of the model's own",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="answers to the bit the same whatever runs beside them (GPU; up to 2x slower)",
    )
    group.add_argument("--page-size", type=int, metavar="N", help="tokens per KV page (16)")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="KV memory (from free memory)")
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        dest="memory_share",
        metavar="X",
        help="share of the memory for weights and KV together, where --kv-tokens is not given; "
        "on a CPU, of the memory that is available",
    )
    group.add_argument(
        "--chunk-tokens", type=int, metavar="N", help="most tokens in a step (by device)"
    )
    group.add_argument(
        "--share",
        choices=_values(Share),
        help="what equal prefixes share: nothing, storage, or storage and reads (reads)",
    )
    group.add_argument(
        "--span-levels",
        type=int,
        metavar="N",
        help="shared reads nested at most so deep (no limit on a CPU; 4, the most, on a GPU)",
    )
    group.add_argument("--max-model-len", type=int, metavar="N", help="context (the model's own)")
    group.add_argument(
        "--truncation-ratio",
        type=float,
        metavar="X",
        help="part of the context that is dropped when a conversation fills it (0.5)",
    )
    group.add_argument(
        "--sink-tokens",
        type=int,
        metavar="N",
        help="first tokens of a conversation that are never dropped (a page)",
    )
    _add_store_flags(parser)


def _add_store_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV store")
    group.add_argument("--host-gb", type=float, metavar="GB", help="host memory for pages (none)")
    group.add_argument("--disk-dir", metavar="DIR", help="keep pages in a folder, across restarts")
    group.add_argument("--disk-gb", type=float, metavar="GB", help="most a model takes there (20)")
    group.add_argument(
        "--store-ttl", type=float, metavar="S", help="drop stored pages unused for so long (never)"
    )
    group.add_argument(
        "--store-policy", choices=_values(StorePolicy), help="what leaves first (lookahead)"
    )
    group.add_argument(
        "--store-fetch",
        choices=_values(Fetch),
        help="load stored pages where that is faster than computing them, always, or never (auto)",
    )
    group.add_argument(
        "--preload",
        metavar="LAYERS",
        help="layers loaded before a prompt starts on its history: auto, all or a number (auto)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The config file, if any, with the flags that were given on top."""
    config = load_config(args.config) if args.config else EngineConfig()

    def given(names: tuple[str, ...]) -> dict[str, object]:
        values = {name: getattr(args, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    return EngineConfig(
        model=update_section(config.model, given(MODEL_FLAGS), "flags"),
        cache=update_section(config.cache, given(CACHE_FLAGS), "flags"),
        sched=update_section(config.sched, given(SCHED_FLAGS), "flags"),
        store=update_section(
            config.store,
            {STORE_FLAGS[name]: value for name, value in given(tuple(STORE_FLAGS)).items()},
            "flags",
        ),
    )


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help="most tokens of the answer (%(default)s)",
    )  # fmt: skip
    add_draw_flags(group, GREEDY)
    group.add_argument("--seed", type=int, metavar="N", help="draw the same tokens again")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")


def add_draw_flags(group: argparse._ArgumentGroup, defaults: Mapping[str, float]) -> None:
    """How a token is drawn; None where `defaults` has no value."""
    for name, (kind, metavar, text) in DRAW_FLAGS.items():
        default = defaults.get(name)
        shown = text if default is None else f"{text} ({default:g})"
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown)


def add_generation_flag(group: argparse._ActionsContainer) -> None:
    """For commands whose requests may leave open how tokens are drawn."""
    group.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="how tokens are drawn where nobody says: as the model's generation_config.json "
        "advises, or as OpenAI's API does (auto)",
    )


def model_defaults(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, object]:
    """What the model's makers advise, where --generation-config wants it; raises ConfigError."""
    if args.generation_config == "none":
        return {}
    try:
        SamplingParams(**tokenizer.sampling_defaults)  # type: ignore[arg-type]  # it checks them
    except InvalidRequest as error:
        reason = "--generation-config none does without it"
        raise ConfigError(f"{GENERATION_FILE}: {error}; {reason}") from None
    return tokenizer.sampling_defaults


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        **{name: getattr(args, name) for name in DRAW_FLAGS},
    )
