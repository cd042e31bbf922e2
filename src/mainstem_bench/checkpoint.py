"""Writes a model of random weights as a Hugging Face folder, so that servers can be compared on a
shape whose weights are too large to download, or not public.

    mainstem bench checkpoint --model-shape qwen36-35b-a3b --tokenizer FOLDER_OF_A_MODEL DIR

The folder has config.json, weights in bf16 and, if given, the tokenizer of another model; its ids
must be below the shape's vocabulary. Ids that it lacks get words of their own, so that clients see
every token. Weights have the same spread as in the other benchmarks of random weights. Equal seeds
give equal weights on the same device. The tokens of answers mean nothing: clients should set the
length of answers and `ignore_eos`.
"""

import argparse
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mainstem.cli.flag_types import positive_count
from mainstem.cli.parser import Parser, add_flag
from mainstem.core.errors import ConfigError
from mainstem.models.spec import ModelSpec
from mainstem.models.tensors import TensorReader
from mainstem.models.weights import RandomWeights, part_shape
from mainstem_bench.shapes import CONFIGS, SHAPES

SHARD_BYTES = 4 << 30
ELEMENT_BYTES = 2  # bf16
WRITERS = 8  # threads; one writes 1 to 2 GB/s
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = ("token*", "*template*", "vocab*", "merges*", "special_tokens*")
MODEL_TYPES = {
    "FalconForCausalLM": "falcon",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}

Shape = tuple[int, ...]


class TensorNames(RandomWeights):
    """Notes the name and shape of every tensor that is read; the tensors have no values."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"), seed=0)
        self.shapes: dict[str, Shape] = {}

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        self.shapes[name] = tuple(shape)
        size = part_shape(self.shapes[name], at)
        return torch.empty(size, dtype=torch.bfloat16, device="meta")


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench checkpoint", description=__doc__)
    made.add_argument("folder", type=Path, metavar="DIR", help="must not exist")
    made.add_argument("--model-shape", choices=list(CONFIGS), required=True)
    made.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="of a model; its tokenizer is copied"
    )
    add_flag(made, "--seed", positive_count, "number", 1)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    num_bytes = write_checkpoint(args.folder, args.model_shape, args.seed, args.tokenizer)
    print(f"{args.folder}: {num_bytes:,} bytes of weights")
    return 0


def write_checkpoint(folder: Path, name: str, seed: int = 1, tokenizer: Path | None = None) -> int:
    """Write the shape of this name to a new folder; returns the bytes of its weights."""
    config = hf_config(name)
    if tokenizer is not None and not tokenizer.is_dir():
        raise ConfigError(f"--tokenizer: {tokenizer} is no folder")
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder")
    folder.mkdir(parents=True)
    shapes = tensor_shapes(SHAPES[name])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bytes = write_tensors(folder, shapes, RandomWeights(torch.bfloat16, device, seed))
    if tokenizer is not None:
        for file in (found for each in TOKENIZER_FILES for found in tokenizer.glob(each)):
            shutil.copy(file, folder)
        fill_vocabulary(folder / TOKENIZER_FILE, SHAPES[name].vocab_size)
    # last: a folder without it is no model
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return num_bytes


def hf_config(name: str) -> dict[str, object]:
    """Return the fields of config.json that other engines need beside those that we read."""
    config, architecture = CONFIGS[name], SHAPES[name].architecture
    if architecture not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ConfigError(f"--model-shape {name}: {architecture} is not written, only {known}")
    added = {
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return added | config


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of each tensor of a checkpoint, by its Hugging Face name."""
    names = TensorNames()
    reader = TensorReader(names, spec)
    embedding = reader.embedding()
    reader.inputs()
    for index in range(spec.num_layers):
        reader.layer(index)
    reader.ends(embedding)
    return names.shapes


def fill_vocabulary(file: Path, num_ids: int) -> None:
    """Give a word to each id below `num_ids` that a tokenizer.json lacks. No text is encoded to
    these words. A vocabulary with scores (Unigram) is left as it is."""
    if not file.exists():
        return
    tokenizer = json.loads(file.read_text())
    words = tokenizer.get("model", {}).get("vocab")
    if not isinstance(words, dict):
        return
    # one that is not among the words would get another id when the file is read
    words |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    known = set(words.values())
    words |= {f"word{number}": number for number in range(num_ids) if number not in known}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _shards(shapes: Mapping[str, Shape]) -> Iterable[list[str]]:
    """Cut the names into lists of about SHARD_BYTES of tensors."""
    shard, in_shard = list[str](), 0
    for name, shape in shapes.items():
        shard.append(name)
        in_shard += _num_bytes(shape)
        if in_shard >= SHARD_BYTES:
            yield shard
            shard, in_shard = [], 0
    if shard:
        yield shard


def _num_bytes(shape: Shape) -> int:
    return ELEMENT_BYTES * math.prod(shape)


def _write_header(out: BinaryIO, shapes: Mapping[str, Shape]) -> list[int]:
    """Write the head of a safetensors file of bf16; returns where each tensor begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, begin = list[int](), 0
    for name, shape in shapes.items():
        begins.append(begin)
        begin += _num_bytes(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begins[-1], begin]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    out.write(len(head).to_bytes(8, "little") + head)
    out.flush()
    return [out.tell() + each for each in begins]


def _write_at(file: int, tensor: Tensor, begin: int) -> None:
    """Write a tensor's bytes to an open file."""
    rest = tensor.cpu().flatten().view(torch.uint8).numpy().data
    while rest:
        count = os.pwrite(file, rest, begin)  # at most 2 GB at a time
        rest, begin = rest[count:], begin + count


def write_tensors(folder: Path, shapes: Mapping[str, Shape], source: RandomWeights) -> int:
    """Write all tensors in shards, and an index; returns their bytes."""
    files: dict[str, str] = {}
    writing: deque[Future[None]] = deque()
    total = 0
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, names in enumerate(_shards(shapes)):
            file = f"model-{number:05d}.safetensors"
            with (folder / file).open("wb") as out:
                begins = _write_header(out, {name: shapes[name] for name in names})
                for name, begin in zip(names, begins, strict=True):
                    tensor = source.take(name, shapes[name])
                    writing.append(pool.submit(_write_at, out.fileno(), tensor, begin))
                    if len(writing) > 2 * WRITERS:  # these tensors are in memory
                        writing.popleft().result()
                while writing:
                    writing.popleft().result()
            files |= dict.fromkeys(names, file)
            total += sum(_num_bytes(shapes[name]) for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
