"""Quantizes a model to 4 bits, and measures the perplexity of a text before and after.

Weights of the layers' products are rounded in groups, with zero points or without, and written as a
compressed-tensors checkpoint (W4A16), which is then loaded and scored like any other. Embedding,
head and norms are not changed. The first tokens of each text are scored. Calibration and training
use the tokens after them in the first text, or the tokens of another text.
"""

import argparse
import json
import shutil
from functools import partial
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
from mainstem.checkpoints.progress import Progress, StageBar, unseen
from mainstem.cli.flag_types import member_of, not_negative_count, positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.config import Device, ModelConfig
from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s
from mainstem.models.config_file import CONFIG_FILE
from mainstem.models.cpu.decoder import load_decoder, pack
from mainstem.models.families import read_spec
from mainstem.models.weight_files import SINGLE_FILE, weight_files
from mainstem.runner.load import choose_device, device_name
from mainstem_bench.calibration import CalibratedLayers
from mainstem_bench.llama import ByKind, Llama
from mainstem_bench.perplexity import perplexity
from mainstem_bench.report import load_average, show
from mainstem_bench.rounding import Grid, Rounded, nearest
from mainstem_bench.scales import BATCH, train_scales

WINDOW = 1024  # tokens that are scored together
SEQUENCE = 512  # tokens of one sequence of calibration or training
STEP = BATCH * SEQUENCE  # tokens of one step of training


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench quantized", description=__doc__)
    made.add_argument("--model", default="smollm2", help="folder, hub id or name (smollm2)")
    made.add_argument(
        "--text", required=True, type=Path, nargs="+", metavar="FILE", help="plain texts to score"
    )
    flag = partial(add_flag, made)
    flag("--score-tokens", positive_count, "in each text", 4096)
    made.add_argument(
        "--inputs", type=not_negative_count, default=4096, metavar="N",
        help="calibration tokens, after the scored ones (4096); 0: round to the nearest",
    )  # fmt: skip
    flag("--inputs-text", Path, "take tokens for calibration and training from this file")
    made.add_argument(
        "--train", type=not_negative_count, default=0, metavar="N",
        help="train scales after the rounding on N tokens (0), from the first calibration token "
        "on; if the text has fewer, in several passes, each in a new random order",
    )  # fmt: skip
    made.add_argument(
        "--device", type=member_of(Device), default=Device.CPU, metavar="cpu|cuda|auto",
        help="where to round and train (cpu); scoring is done on the CPU",
    )  # fmt: skip
    flag("--group", positive_count, "columns that share a scale", 32)
    made.add_argument("--symmetric", action="store_true", help="without zero points")
    flag("--out", Path, "keep the checkpoint in this folder", metavar="FOLDER")
    made.add_argument("--threads", type=positive_count, metavar="N")
    made.add_argument("--json", action="store_true", help="a JSON line for each text")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("highest")  # no TF32 on GPUs
    load, begin = load_average(), perf_counter()
    config = ModelConfig(device=args.device)
    device = choose_device(config)
    folder = resolve_model(args.model)
    scored, inputs, trained = _read_ids(args, folder)
    grid, steps = Grid(args.group, args.symmetric), args.train // STEP
    divergences: list[float] = []
    with TemporaryDirectory() as temporary, StageBar() as progress:
        out = args.out or Path(temporary)
        model = Llama(folder, SEQUENCE, device)
        layers = round_products(model, inputs, grid, progress)
        if steps:
            layers, divergences = train_scales(model, layers, trained.to(device), steps, progress)
        write_checkpoint(folder, out, by_name(model, layers), grid)
        quantize_s = perf_counter() - begin
        progress("score", 0.0)
        before = _score(folder, scored)
        progress("score", 0.5)
        after = _score(out, scored)
        sizes = [sum(file.stat().st_size for file in weight_files(each)) for each in (folder, out)]
    made: dict[str, object] = {
        "model": args.model,
        "group": args.group,
        "zero_points": not args.symmetric,
        "inputs": args.inputs,
        "train": steps * STEP,
        "train_divergences": _ends(divergences),
        "device": device_name(config),
        "quantize_s": round(quantize_s, 1),
        "bytes": sizes[1],
        "bytes_before": sizes[0],
        "load_before": load,
    }
    for text, plain, quantized in zip(args.text, before, after, strict=True):
        result = {
            "text": text.name,
            "scored_tokens": args.score_tokens,
            "perplexity": round(plain, 4),
            "perplexity_quantized": round(quantized, 4),
            "change": round(quantized / plain - 1, 4),
        }
        show("quantized", made | result, args.json)
    return 0


def _read_ids(args: argparse.Namespace, folder: Path) -> tuple[list[Int32s], Tensor, Tensor]:
    """Tokens to score, and sequences for calibration and training."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def read(file: Path, first: int, count: int) -> Int32s:
        """All tokens from `first` on, at least `count`."""
        ids = np.array(tokenizer.encode(file.read_text()).ids, np.int32)
        if len(ids) < first + count:
            raise ConfigError(f"{file} has {len(ids):,} tokens; {first + count:,} are asked for")
        return ids[first:]

    for flag, count, least in (("inputs", args.inputs, SEQUENCE), ("train", args.train, STEP)):
        if 0 < count < least:
            raise ConfigError(f"--{flag} {count}: must be 0, or at least {least:,} tokens")
    scored = [read(text, 0, args.score_tokens)[: args.score_tokens] for text in args.text]
    needed = max(args.inputs, SEQUENCE if args.train else 0)
    if args.inputs_text is not None:
        rest = read(args.inputs_text, 0, needed)
    else:
        rest = read(args.text[0], args.score_tokens, needed)
    return scored, sequences_of(rest[: args.inputs]), sequences_of(rest[: args.train])


def sequences_of(ids: Int32s, length: int = SEQUENCE) -> Tensor:
    """Whole sequences, [sequences, length]."""
    count = len(ids) // length
    return torch.from_numpy(ids[: count * length].astype(np.int64)).view(count, length)


def _score(folder: Path, texts: list[Int32s]) -> list[float]:
    decoder = load_decoder(folder, read_spec(folder), torch.float32)
    pack(decoder, 1 << 40)
    return [perplexity(decoder, ids, WINDOW, WINDOW) for ids in texts]


def _ends(values: list[float]) -> list[float]:
    """Means of the first and the last tenth; none if there are no values."""
    count = max(1, len(values) // 10)
    return [round(sum(part) / count, 5) for part in (values[:count], values[-count:]) if part]


@torch.no_grad()
def round_products(
    model: Llama, inputs: Tensor, grid: Grid, progress: Progress = unseen
) -> list[ByKind[Rounded]]:
    """Round the products of all layers for `inputs` [sequences, length]; to the nearest if there
    are none."""
    calibrated = CalibratedLayers(model, inputs.to(model.device))
    found = []
    progress("round", 0.0)
    for index in range(model.spec.num_layers):
        if len(inputs):
            found.append(calibrated.round(index, grid))
        else:
            weights = model.layer(index).weights
            found.append({kind: nearest(weight, grid) for kind, weight in weights.items()})
        progress("round", (index + 1) / model.spec.num_layers)
    return found


def by_name(model: Llama, layers: list[ByKind[Rounded]]) -> dict[str, Rounded]:
    """The products as the checkpoint has them (q, k and v apart), on the CPU, by name without
    ".weight"."""
    found: dict[str, Rounded] = {}
    for index, layer in enumerate(layers):
        for kind, rows in model.names(index).items():
            each = layer[kind]
            tensors = (each.levels.cpu(), each.scales.cpu(), each.zeros.cpu())
            parts = (torch.split(tensor, list(rows.values()), dim=1) for tensor in tensors)
            found |= dict(zip(rows, map(Rounded, *parts), strict=True))
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
