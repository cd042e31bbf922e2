"""Command-line flags that several commands share, and the config that they give."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mainstem.cli.parser import add_flag
from mainstem.core.config import SETTINGS, EngineConfig, load_config, with_arguments
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.core.settings import Setting
from mainstem.text.parsers.formats import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from mainstem.text.tokenizer import GENERATION_FILE, Tokenizer

DRAW_FLAGS: dict[str, tuple[type, str, str]] = {  # field of SamplingParams -> type, metavar, help
    "temperature": (float, "T", "0 always takes the likeliest token"),
    "top_p": (float, "P", "draw from the likeliest tokens whose probabilities sum to P"),
    "top_k": (int, "K", "draw from the K likeliest tokens; 0: from all"),
    "min_p": (float, "P", "drop tokens less likely than P times the likeliest"),
    "repetition_penalty": (float, "X", "above 1: make tokens that have occurred less likely"),
    "presence_penalty": (float, "X", "lower logits of tokens that are in the answer"),
    "frequency_penalty": (float, "X", "lower a token's logit for each time it is in the answer"),
}
GREEDY = dict.fromkeys(DRAW_FLAGS, 0.0) | {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for model, memory and scheduling. If a flag is not given, the config file's value
    is used."""
    engine = parser.add_argument_group("engine")
    add_flag(engine, "--config", Path, "file with settings; flags override it", metavar="FILE.toml")
    store = parser.add_argument_group("KV store")
    for setting in SETTINGS:
        _add_flag(store if setting.section == "store" else engine, setting)


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    if setting.flag is None:
        return
    if setting.kind is bool:
        words = setting.about.help.replace("%", "%%")
        group.add_argument(setting.flag, action="store_true", default=None, help=words)
        return
    words = f"{setting.about.help} ({setting.shown_default})".replace("%", "%%")
    if setting.choices is not None:
        group.add_argument(setting.flag, choices=setting.choices, help=words)
        return
    if setting.kind is tuple:
        group.add_argument(setting.flag, action="append", metavar=setting.metavar, help=words)
        return
    kind = {int: int, float: float}.get(setting.kind, str)
    group.add_argument(setting.flag, type=kind, metavar=setting.metavar, help=words)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the config file's settings, if there is one, overridden by the flags that were
    given."""
    config = load_config(args.config) if args.config else EngineConfig()
    return with_arguments(config, given_settings(args), "flags")


def given_settings(args: argparse.Namespace) -> dict[str, object]:
    """The settings that flags gave, by argument name."""
    names = [setting.argument for setting in SETTINGS if setting.flag is not None]
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    flag = partial(add_flag, group)
    flag("--max-tokens", int, "maximum tokens of the answer", max_tokens)
    add_draw_flags(group, GREEDY)
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same tokens")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; repeatable",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the end tokens of the model"
    )


def add_draw_flags(group: argparse._ArgumentGroup, defaults: Mapping[str, float]) -> None:
    """Add flags for sampling. A flag that is not given has the value in `defaults`, or None."""
    for name, (kind, metavar, text) in DRAW_FLAGS.items():
        default = defaults.get(name)
        shown = text if default is None else f"{text} ({default:g})"
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown)


def add_generation_flag(group: argparse._ActionsContainer) -> None:
    """Add --generation-config, for commands whose requests may leave out sampling fields."""
    group.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="defaults of sampling: those of the model's generation_config.json (auto) or of "
        "OpenAI's API (none) (auto)",
    )


def add_parser_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for commands whose answers separate reasoning and tool calls from the text."""
    parser.add_argument(
        "--tool-call-parser",
        "--tool-parser",
        choices=[AUTO, NONE, *TOOL_PARSERS],
        default=AUTO,
        help="how the model writes tool calls; auto: found in its chat template (auto)",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=[AUTO, NONE, *REASONING_PARSERS],
        default=AUTO,
        help="how the model writes its reasoning, which becomes reasoning_content; none: it stays "
        "in the content (auto)",
    )


def model_defaults(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, object]:
    """The model's own sampling defaults, unless --generation-config is none; raises ConfigError."""
    if args.generation_config == "none":
        return {}
    try:
        SamplingParams(**tokenizer.sampling_defaults)  # type: ignore[arg-type]  # it checks them
    except InvalidRequest as error:
        reason = "use --generation-config none to ignore the file"
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
