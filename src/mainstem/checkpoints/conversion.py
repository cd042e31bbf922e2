"""A GGUF file -> the files of the Hugging Face layout."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem.checkpoints.gguf_fields import Field, Fields
from mainstem.checkpoints.gguf_models import Architecture, Floats, architecture_of, model_config
from mainstem.checkpoints.gguf_tokenizers import tokenizer_files
from mainstem.checkpoints.progress import Progress
from mainstem.core.errors import ModelNotFound

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Files(Protocol):
    """A folder that files are written to."""

    def write(self, name: str, parts: Iterable[bytes]) -> None: ...

    def write_json(self, name: str, value: object) -> None: ...


class _Tensor(Protocol):
    """The attributes of the GGUF reader's tensors that are used here."""

    name: str
    shape: Sequence[int]  # the fastest axis first
    data: NDArray[np.uint8]
    tensor_type: int


class _GgufReader(Protocol):
    """The attributes of the GGUF reader that are used here."""

    fields: Mapping[str, Field]
    tensors: Sequence[_Tensor]


_Dequantize = Callable[[NDArray[np.uint8], int], NDArray[np.float32]]


def convert(reader: _GgufReader, dequantize: _Dequantize, out: Files, progress: Progress) -> None:
    """Write the files of the Hugging Face layout from a GGUF file of a supported architecture."""
    progress("convert", 0.0)
    fields = Fields(reader.fields)
    architecture = architecture_of(fields)
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = model_config(fields, is_tied)
    out.write_json("config.json", config)
    tokenizer, tokenizer_config = tokenizer_files(fields)
    out.write("tokenizer.json", [tokenizer.encode()])
    out.write_json("tokenizer_config.json", tokenizer_config)
    if fields.has("tokenizer.chat_template"):
        out.write("chat_template.jinja", [fields.text("tokenizer.chat_template").encode()])
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if fields.text("tokenizer.ggml.pre") == "smollm":  # recommended by SmolLM2's authors
        generation |= {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    out.write_json("generation_config.json", generation)
    names = {tensor.name: _tensor_name(tensor.name, architecture) for tensor in reader.tensors}

    def load(tensor: _Tensor) -> Floats:
        values = dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False)
        return architecture.restore(fields, names[tensor.name], values)

    out.write("model.safetensors", _safetensors_parts(reader.tensors, names, load, progress))


def _tensor_name(name: str, architecture: Architecture) -> str:
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in architecture.layer_names:
        raise ModelNotFound(f"the GGUF file has an unknown tensor {name}")
    return f"model.layers.{match[1]}.{architecture.layer_names[match[2]]}.{match[3]}"


def _safetensors_parts(
    tensors: Sequence[_Tensor],
    names: Mapping[str, str],
    load: Callable[[_Tensor], Floats],
    progress: Progress,
) -> Iterator[bytes]:
    """The bytes of a safetensors file; one tensor at a time is in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end = start + 4 * math.prod(shape)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        header[names[tensor.name]] = entry
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for index, tensor in enumerate(tensors):
        yield load(tensor).tobytes()
        progress("convert", (index + 1) / len(tensors))
