"""`mainstem calibrate`: measures the rates of this device for the cost model. On a GPU, it also
measures the costs that the planner of attention needs.

Each result is written, as soon as it is measured, to `cards.json` or `paces.json` in the cache
folder, where `plan.cost.card_for` and `kernels.attention.tuning.with_fitted_pace` find it. If
attention is already tuned for this GPU, its costs are not saved.
"""

import json
from dataclasses import asdict

from mainstem.cli.parser import Parser
from mainstem.core.words import with_prefix
from mainstem.plan.cost import CARDS
from mainstem.runner.calibrate import (
    is_tuned,
    keep_tiles,
    measure,
    measure_tiles,
    present_device,
)


def main(argv: list[str]) -> int:
    parser = Parser("mainstem calibrate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--dry-run", action="store_true", help="measure, but save nothing")
    args = parser.parse_args(argv)
    probe = present_device()
    card = measure(probe)
    kept = [] if args.dry_run else [CARDS.save(card.name, card)]
    fitted = {}
    for name, tiles in measure_tiles(probe):
        fitted[name] = asdict(tiles.pace)
        if not args.dry_run and not is_tuned(probe):
            kept.append(keep_tiles(name, tiles))
    if args.json:
        print(json.dumps({**asdict(card), "paces": fitted}))
        return 0
    for field, value in asdict(card).items():
        print(f"{field:<15} {_short(value)}")
    for name, fields in fitted.items():
        print(f"{name}: " + ", ".join(f"{k} {_short(v)}" for k, v in fields.items()))
    if not fitted:
        print("attention on a CPU needs no measured costs: none were fitted")
    elif is_tuned(probe):
        print(f"attention on {probe.name} has tuned costs: the fitted ones are not saved")
    for path in dict.fromkeys(kept):
        print(f"saved to {path}")
    return 0


def _short(value: str | float) -> str:
    return str(value) if isinstance(value, str | int) else with_prefix(value)
