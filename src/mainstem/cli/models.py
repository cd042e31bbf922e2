"""`mainstem models`: the embedded default and the cached models, with their sizes."""

import argparse
import json

from mainstem.checkpoints.embedded import SMOLLM2, FolderCheck
from mainstem.checkpoints.fetch import fetch_model
from mainstem.checkpoints.hub import list_models, resolve_model
from mainstem.checkpoints.progress import StageBar
from mainstem.cli.parser import Parser
from mainstem.core.config import EngineConfig, with_arguments
from mainstem.core.errors import InvalidRequest
from mainstem.core.tables import gigabytes, table
from mainstem.models.families import FAMILIES
from mainstem.models.quantized.packing import SUPPORTED


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem models", description=__doc__)
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument(
        "--families", action="store_true", help="the model families that can be loaded"
    )
    either = made.add_mutually_exclusive_group()
    either.add_argument("--fetch", metavar="MODEL", help="fetch (and convert) a model now")
    either.add_argument(
        "--verify",
        metavar="MODEL",
        help=f"check every byte of {SMOLLM2.name}, and rebuild it if one is wrong",
    )
    made.add_argument(
        "--ignore-config-fields",
        action="append",
        metavar="NAME[,NAME]",
        help="with --fetch: unknown fields of config.json to ignore, by name; repeatable",
    )
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.verify not in (None, SMOLLM2.name):
        raise InvalidRequest("--verify", f"only {SMOLLM2.name} comes with checksums")
    if args.ignore_config_fields and not args.fetch:
        raise InvalidRequest("--ignore-config-fields", "has no effect without --fetch")
    if args.verify:
        with StageBar() as bar:
            print(resolve_model(args.verify, bar, FolderCheck.HASHES))
        return 0
    if args.fetch:
        values = {"model": args.fetch, "ignore_config_fields": args.ignore_config_fields}
        model = with_arguments(EngineConfig(), values, "flags").model
        with StageBar() as bar:
            folder, _ = fetch_model(model, bar)
        print(folder)
        return 0
    if args.families:
        _print_families(args.json)
        return 0
    records = list_models()
    if args.json:
        for record in records:
            print(json.dumps(record.to_json()))
        return 0
    rows = [
        [r.name, r.state.value, gigabytes(r.num_bytes), r.origin, str(r.path or "")]
        for r in records
    ]
    print(table(["model", "state", "size", "origin", "folder"], rows))
    print("\nAny folder in Hugging Face layout or hub id (owner/name) works as --model too.")
    return 0


def _print_families(is_json: bool) -> None:
    if is_json:
        for family in FAMILIES:
            entry = {
                "name": family.name,
                "architectures": list(family.architectures),
                "notes": family.notes,
            }
            print(json.dumps(entry))
        return
    rows = [[f.name, ", ".join(f.architectures), f.notes] for f in FAMILIES]
    print(table(["family", "architectures in config.json", "notes"], rows))
    print("\nOther models are refused; docs/add-a-model.md shows how to add one.")
    print(f"\nWeights in 32 or 16 bits, or quantized. {SUPPORTED}.")
