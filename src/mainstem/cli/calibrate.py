"""`mainstem calibrate`: measures the rates of this device, which the cost model then uses.

Writes them to `cards.json` in the cache folder, where `plan.cost.card_for` finds them.
"""

import argparse
import json
from dataclasses import asdict

from mainstem.plan.cost import save_card
from mainstem.runner.calibrate import measure, present_device


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("mainstem calibrate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--dry-run", action="store_true", help="measure, but save nothing")
    args = parser.parse_args(argv)
    card = measure(present_device())
    path = None if args.dry_run else save_card(card)
    if args.json:
        print(json.dumps(asdict(card)))
        return 0
    for name, value in asdict(card).items():
        print(f"{name:<15} {value if isinstance(value, (str, int)) else f'{value:.3g}'}")
    if path is not None:
        print(f"kept in {path}")
    return 0
