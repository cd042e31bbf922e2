"""Finds a checkpoint's safetensors files, and reads their headers. Needs no torch."""

import json
from pathlib import Path

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel
from mainstem.models.names import Names

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": DType.FP32, "BF16": DType.BF16, "F16": DType.FP16}
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, sharded or not; UnsupportedModel names a missing one.

    A single file wins over shards: tools that save into a folder leave the old shards and their
    index there. transformers reads folders in the same order. Without both, the only safetensors
    file counts, whatever its name: old GPTQ tools wrote gptq_model-4bit-128g.safetensors.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        return [_only_file(folder)]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModel(f"{index} has no weight_map: {error}") from error
    files = [folder / name for name in sorted(names)]
    if any(file.parent != folder for file in files):
        raise UnsupportedModel(f"{index} names files outside its folder")
    for file in files:
        if not file.is_file():
            raise UnsupportedModel(f"{file} is missing; only safetensors checkpoints are read")
    return files


def _only_file(folder: Path) -> Path:
    found = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not found:
        raise UnsupportedModel(
            f"{folder / SINGLE_FILE} is missing; only safetensors checkpoints are read"
        )
    if len(found) > 1:
        shown = ", ".join(file.name for file in found[:6]) + (", ..." if len(found) > 6 else "")
        raise UnsupportedModel(
            f"{folder} has {len(found)} safetensors files ({shown}), but neither {SINGLE_FILE} nor "
            f"{INDEX_FILE}, which says which of them belong together"
        )
    return found[0]


def embedding_dtype(folder: Path, names: Names) -> DType | None:
    """The dtype of the embedding, from the headers of the files.

    None if there are no such files, or they cannot be read: config.json may be all that was
    downloaded, and the error for a damaged file comes when its tensors are read.
    """
    wanted = f"{names.embedding}.weight"
    try:
        for file in weight_files(folder):
            for name, entry in _header(file).items():
                if names.canonical(name) == wanted:
                    return _DTYPES.get(entry["dtype"])
    except (UnsupportedModel, OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return None


def _header(file: Path) -> dict[str, dict[str, str]]:
    """The header: JSON, after its length in 8 bytes. Each tensor's name has an entry such as
    {"dtype": "BF16", "shape": [32000, 4096], ..}."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {length} bytes")
        header: dict[str, dict[str, str]] = json.loads(opened.read(length))
    return header
