"""Says what a served model of one shape should take, by the measurement of another shape.

    mainstem bench scaled llama31-8b qwen36-27b --bytes-per-weight 1 --prompt 1930 --running 18

FLOPs of a token of a prompt: 2 for each weight of the layers that the token goes through, and
attention to half of the prompt. A model whose tokens have r times the FLOPs has the same load at a
rate of requests of 1 / r, and its first tokens should take r times as long.

Bytes of a step that decodes: the weights of the layers and the head, K and V of all tokens that are
read, and each sequence's state twice, since it is read and written. A token of an answer should
take as many times longer as a step has more bytes.
"""

import argparse
from functools import partial

from mainstem.cli.flag_types import not_negative_count, positive, positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.models.spec import ModelSpec
from mainstem.plan.cost import Heads
from mainstem_bench.report import show
from mainstem_bench.shapes import SHAPES

ELEMENT_BYTES = 2  # of the head, K and V; recurrent states have their own dtypes


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench scaled", description=__doc__)
    made.add_argument("measured", choices=list(SHAPES))
    made.add_argument("other", choices=list(SHAPES))
    flag = partial(add_flag, made)
    flag("--bytes-per-weight", positive, "of the layers", float(ELEMENT_BYTES), metavar="B")
    flag("--prompt", positive_count, "tokens of a prompt", 2000)
    flag("--running", positive_count, "sequences in a step", 16)
    flag("--keys", not_negative_count, "tokens whose K and V a step reads, shared ones once", 0)
    made.add_argument("--json", action="store_true")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    shapes = [SHAPES[name] for name in (args.measured, args.other)]
    flops = [token_flops(shape, args.prompt) for shape in shapes]
    moved = [step_bytes(each, args.bytes_per_weight, args.running, args.keys) for each in shapes]
    result = {
        "measured": args.measured,
        "other": args.other,
        "prompt": args.prompt,
        "running": args.running,
        "keys": args.keys,
        "gflops_per_token": [round(each / 1e9, 2) for each in flops],
        "gb_per_step": [round(each / 1e9, 2) for each in moved],
        "flops_ratio": round(flops[1] / flops[0], 3),
        "bytes_ratio": round(moved[1] / moved[0], 3),
    }
    show("scaled", result, args.json)
    return 0


def token_flops(shape: ModelSpec, prompt: int) -> float:
    """Return the mean FLOPs of a token of a prompt, without the head."""
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, ELEMENT_BYTES)
    attention = len(shape.attentions) * heads.pair_flops * prompt / 2
    return float(2 * shape.num_layer_params + attention)


def step_bytes(shape: ModelSpec, bytes_per_weight: float, running: int, keys: int) -> float:
    """Return the bytes that a step of `running` decodes moves, if it reads K and V of `keys`
    tokens."""
    weights = shape.num_layer_params * bytes_per_weight + shape.num_head_params * ELEMENT_BYTES
    states = 2 * running * shape.state_bytes(ELEMENT_BYTES)
    return weights + states + keys * shape.kv_elements_per_token * ELEMENT_BYTES
