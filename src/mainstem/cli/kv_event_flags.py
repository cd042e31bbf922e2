"""Flags of `mainstem serve` for KV events; see docs/kv-events.md."""

import argparse
import re
from importlib.util import find_spec

from mainstem.cli.parser import add_flag
from mainstem.core.errors import ConfigError
from mainstem.server.link.kv_events import NO_ZMQ, KvEventsConfig

PLACE = re.compile(r"tcp://(\*|[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})|ipc://.+", re.ASCII)


def endpoint(text: str) -> str:
    """Check an address in ZeroMQ's form, and return it."""
    found = PLACE.fullmatch(text)
    if found is None or int(found[2] or 0) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"must be like tcp://127.0.0.1:5557, got {text}")
    return text


def add_kv_event_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags as a separate group."""
    group = parser.add_argument_group("KV events, as vLLM sends them to routers (off)")
    for end, words in (
        ("", "publish at an address like tcp://127.0.0.1:5557; events hold token ids of prompts"),
        ("-connect", "publish to a subscriber that listens at this address"),
        ("-replay", "where subscribers request batches that they missed"),
    ):
        add_flag(group, f"--kv-events{end}", endpoint, words, metavar="ADDRESS")
    add_flag(group, "--kv-events-topic", str, "topic that subscribers can filter by", "")


def kv_events_config(args: argparse.Namespace) -> KvEventsConfig | None:
    """Return the config of KV events, or None if no flag asks for them. Raises ConfigError."""
    config = KvEventsConfig(
        args.kv_events, args.kv_events_connect, args.kv_events_replay, args.kv_events_topic
    )
    if config == KvEventsConfig():
        return None
    if config.bind is None and config.connect is None:
        raise ConfigError(
            "--kv-events-replay and --kv-events-topic need --kv-events or --kv-events-connect"
        )
    if find_spec("zmq") is None:
        raise ConfigError(NO_ZMQ)
    return config
