"""Quantizes a model to 4 bits, and measures the perplexity of a text before and after.

Weights of the layers' products are rounded in groups, with zero points or without, and written as a
compressed-tensors checkpoint (W4A16), which is then loaded and scored like any other. Embedding,
head and norms are not changed. The first tokens of each text are scored. Calibration uses the
tokens after them in the first text, or the tokens of another text.
"""

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mainstem.checkpoints.hub import resolve_model
from mainstem.cli.flag_types import positive_count
from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s
from mainstem.core.tables import gigabytes
from mainstem.models.config_file import CONFIG_FILE
from mainstem.models.cpu.decoder import load_decoder, pack
from mainstem.models.families import read_spec
from mainstem.models.weights import SINGLE_FILE, weight_files
from mainstem.runner.perplexity import perplexity
from mainstem_bench.calibration import CalibratedLayers
from mainstem_bench.report import line, load_average
from mainstem_bench.rounding import Grid, Rounded, nearest

WINDOW = 1024  # tokens that are scored together
SEQUENCE = 512  # tokens of one calibration sequence


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("mainstem bench quantized", description=__doc__)
    made.add_argument("--model", default="smollm2", help="folder, hub id or name (smollm2)")
    made.add_argument(
        "--text", required=True, type=Path, nargs="+", metavar="FILE", help="plain texts to score"
    )
    made.add_argument(
        "--score-tokens", type=positive_count, default=4096, metavar="N", help="in each text (4096)"
    )
    made.add_argument(
        "--inputs", type=int, default=4096, metavar="N",
        help="calibration tokens, after the scored ones (4096); 0: round to the nearest",
    )  # fmt: skip
    made.add_argument(
        "--inputs-text", type=Path, metavar="FILE", help="take calibration tokens from this file"
    )
    made.add_argument(
        "--group", type=positive_count, default=32, help="columns that share a scale (32)"
    )
    made.add_argument("--symmetric", action="store_true", help="without zero points")
    made.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep the checkpoint in this folder"
    )
    made.add_argument("--threads", type=positive_count, metavar="N")
    made.add_argument("--json", action="store_true", help="a JSON line for each text")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    load, begin = load_average(), perf_counter()
    folder = resolve_model(args.model)
    scored, inputs = _read_ids(args, folder)
    grid = Grid(args.group, args.symmetric)
    with TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        write_checkpoint(folder, out, round_products(folder, inputs, args.inputs, grid), grid)
        quantize_s = perf_counter() - begin
        before, after = _score(folder, scored), _score(out, scored)
        sizes = [sum(file.stat().st_size for file in weight_files(each)) for each in (folder, out)]
    made: dict[str, object] = {
        "model": args.model,
        "group": args.group,
        "zero_points": not args.symmetric,
        "inputs": args.inputs,
        "quantize_s": round(quantize_s, 1),
        "bytes": sizes[1],
        "load_before": load,
    }
    if not args.json:
        kind = "symmetric" if args.symmetric else "with zero points"
        how = f"for {args.inputs:,} tokens of input" if args.inputs else "to the nearest"
        print(f"4 bits, groups of {args.group}, {kind}, rounded {how}")
        print(f"weights {gigabytes(sizes[0])} -> {gigabytes(sizes[1])}, {quantize_s:.0f} s")
    for text, plain, quantized in zip(args.text, before, after, strict=True):
        change = quantized / plain - 1
        if not args.json:
            print(f"{text.name}: perplexity {plain:.3f} -> {quantized:.3f} ({change:+.2%})")
            continue
        result = {
            "text": text.name,
            "scored_tokens": args.score_tokens,
            "perplexity": round(plain, 4),
            "perplexity_quantized": round(quantized, 4),
            "change": round(change, 4),
        }
        print(line("quantized", made | result))
    return 0


def _read_ids(args: argparse.Namespace, folder: Path) -> tuple[list[Int32s], Int32s]:
    """Tokens to score, and tokens for calibration."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def read(file: Path, first: int, count: int) -> Int32s:
        ids = np.array(tokenizer.encode(file.read_text()).ids, np.int32)
        if len(ids) < first + count:
            raise ConfigError(f"{file} has {len(ids):,} tokens; {first + count:,} are asked for")
        return ids[first : first + count]

    scored = [read(text, 0, args.score_tokens) for text in args.text]
    if args.inputs_text is not None:
        return scored, read(args.inputs_text, 0, args.inputs)
    return scored, read(args.text[0], args.score_tokens, args.inputs)


def _score(folder: Path, texts: list[Int32s]) -> list[float]:
    decoder = load_decoder(folder, read_spec(folder), torch.float32)
    pack(decoder, 1 << 40)
    return [perplexity(decoder, ids, WINDOW, WINDOW) for ids in texts]


@torch.inference_mode()
def round_products(
    folder: Path, ids: Int32s, num_inputs: int, grid: Grid, length: int = SEQUENCE
) -> dict[str, Rounded]:
    """The rounded products of all layers, by name without ".weight". They are calibrated on the
    first `num_inputs` of `ids`, in sequences of `length`. If `num_inputs` is 0, they are rounded to
    the nearest."""
    spec = read_spec(folder)
    inputs = torch.from_numpy(ids[:num_inputs].astype(np.int64))
    inputs = inputs[: len(inputs) // length * length].view(-1, length)
    layers = CalibratedLayers(folder, spec, inputs)
    found: dict[str, Rounded] = {}
    for index in range(spec.num_layers):
        if num_inputs:
            found |= layers.round(index, grid)
        else:
            found |= {name: nearest(weight, grid) for name, weight in layers.weights(index).items()}
    return found


def _config(grid: Grid) -> dict[str, object]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": grid.group,
        "symmetric": grid.is_symmetric,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write_checkpoint(folder: Path, out: Path, products: dict[str, Rounded], grid: Grid) -> None:
    """Write a copy of the checkpoint in `folder` with these products quantized."""
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name:
            shutil.copy(file, out / file.name)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as found:
            for name in found.keys():  # noqa: SIM118
                product = products.get(name.removesuffix(".weight"))
                if product is None:
                    tensors[name] = found.get_tensor(name)
                else:
                    tensors |= _packed(name.removesuffix(".weight"), product, grid)
    save_file(tensors, out / SINGLE_FILE, {"format": "pt"})
    config = json.loads((folder / CONFIG_FILE).read_text())
    config["quantization_config"] = _config(grid)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2))


def _packed(name: str, product: Rounded, grid: Grid) -> dict[str, Tensor]:
    levels, zeros = product.levels.t(), product.zeros.t()
    tensors = {
        f"{name}.weight_packed": _words(levels),
        f"{name}.weight_scale": product.scales.t().half().contiguous(),
        f"{name}.weight_shape": torch.tensor(levels.shape),
    }
    if not grid.is_symmetric:
        tensors[f"{name}.weight_zero_point"] = _words(zeros.t()).t().contiguous()
    return tensors


def _words(numbers: Tensor) -> Tensor:
    """[rows, n] of 0 to 15 -> int32 [rows, n / 8], the first in the lowest bits."""
    numbers = numbers.to(torch.uint8)
    pairs = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return pairs.contiguous().view(torch.int32)
