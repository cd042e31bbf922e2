"""Measures the perplexity of texts with K and V unrounded, and with every full page in fp8.

Weights and sums are fp32. Windows do not overlap. Each begins with the tokens that the tokenizer
puts before a text (Gemma: <bos>), and its first token is not scored.
"""

import argparse
import gzip
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from mainstem.checkpoints.hub import resolve_model
from mainstem.checkpoints.progress import StageBar
from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError
from mainstem.core.step import Int32s
from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.families import read_spec
from mainstem.models.key_shifts import KeyShifts
from mainstem.models.weights import Checkpoint
from mainstem.runner.rounded_pages import RoundedPages
from mainstem_bench.perplexity import losses
from mainstem_bench.report import load_average, show


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench kv-dtype", description=__doc__)
    made.add_argument("--model", default="smollm2", help="folder, hub id or name (smollm2)")
    made.add_argument(
        "--text", required=True, type=Path, nargs="+", metavar="FILE",
        help="plain texts, may be gzipped; a quarter of each is skipped",
    )  # fmt: skip
    flag = partial(add_flag, made)
    flag("--window", positive_count, "tokens of a window", 2048)
    flag("--windows", positive_count, "of each text", 3)
    made.add_argument("--threads", type=positive_count, metavar="N")
    made.add_argument("--json", action="store_true", help="a JSON line for each text")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [read_windows(tokenizer, text, args.window, args.windows) for text in args.text]
    spec = read_spec(folder)
    decoder = load_decoder(folder, spec, torch.float32)
    weights = Checkpoint(folder, torch.float32, names=spec.names, quantized=spec.quantized)
    pages = partial(RoundedPages, num_open=1, shifts=KeyShifts.read(weights, spec))
    for text, ids in zip(args.text, texts, strict=True):
        load = load_average()
        with StageBar() as progress:
            progress("unrounded", 0.0)
            plain = losses(decoder, ids, args.window, args.window)
            progress("fp8", 0.5)
            rounded = losses(decoder, ids, args.window, args.window, pages)
        differences = rounded - plain
        result = {
            "model": args.model,
            "text": text.name,
            "window": args.window,
            "scored_tokens": len(plain),
            "perplexity": round(math.exp(plain.mean()), 4),
            "perplexity_fp8": round(math.exp(rounded.mean()), 4),
            "change": round(math.expm1(differences.mean()), 5),
            # of the mean over tokens of the change's logarithm
            "standard_error": round(differences.std(ddof=1) / math.sqrt(len(plain)), 5),
            "load_before": load,
        }
        show("kv-dtype", result, args.json)
    return 0


def read_windows(tokenizer: Tokenizer, file: Path, window: int, count: int) -> Int32s:
    """The tokens of `count` windows, one after the other."""
    stored = file.read_bytes()
    text = (gzip.decompress(stored) if file.suffix == ".gz" else stored).decode()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    before = tokenizer.encode("").ids
    own = window - len(before)
    first = len(ids) // 4
    if own < 1 or len(ids) < first + count * own:
        raise ConfigError(f"{file} has {len(ids):,} tokens, not enough for {count} windows")
    parts = [before + ids[first + n * own : first + (n + 1) * own] for n in range(count)]
    return np.array(parts, np.int32).reshape(-1)
