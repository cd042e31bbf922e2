"""`mainstem calibrate`: measures the rates of this device for the cost model. If attention is not
tuned for this GPU, it also measures the costs that the planner of attention needs.

The results are written to `cards.json` and `paces.json` in the cache folder, where
`plan.cost.card_for` and `kernels.attention.tuning.choose_tiles` find them.
"""

import argparse
import json
from dataclasses import asdict

from mainstem.plan.cost import save_card
from mainstem.runner.calibrate import is_tuned, keep_paces, measure, measure_paces, present_device


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("mainstem calibrate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--dry-run", action="store_true", help="measure, but save nothing")
    args = parser.parse_args(argv)
    probe = present_device()
    card = measure(probe)
    paces = measure_paces(probe)
    paths = [] if args.dry_run else [save_card(card)]
    if paces and not is_tuned(probe) and not args.dry_run:
        paths.append(keep_paces(probe, paces))
    fitted = {head_dim: asdict(pace) for head_dim, pace in paces.items()}
    if args.json:
        print(json.dumps({**asdict(card), "paces": fitted}))
        return 0
    for name, value in asdict(card).items():
        print(f"{name:<15} {_short(value)}")
    for head_dim, fields in fitted.items():
        print(f"head_dim {head_dim}: " + ", ".join(f"{k} {_short(v)}" for k, v in fields.items()))
    if not paces:
        print("attention on a CPU needs no measured costs: none were fitted")
    elif is_tuned(probe):
        print(f"attention on {probe.name} has tuned costs: the fitted ones are not saved")
    for path in paths:
        print(f"saved to {path}")
    return 0


def _short(value: str | float) -> str:
    return str(value) if isinstance(value, str | int) else f"{value:.3g}"
