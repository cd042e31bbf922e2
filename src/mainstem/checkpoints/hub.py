"""Model argument -> local folder in the Hugging Face layout.

A model argument is a local folder, `smollm2` (the embedded default), or a hub id.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

import huggingface_hub

from mainstem.checkpoints.embedded import (
    SMOLLM2,
    EmbeddedModel,
    FolderCheck,
    embedded_folder,
    find_damage,
)
from mainstem.checkpoints.progress import Progress, unseen
from mainstem.core.environment import cache_dir
from mainstem.core.errors import ModelNotFound
from mainstem.text.tokenizer_files import OTHER_FILES, has_tokenizer

CONFIG_FILE = "config.json"
HUB_ID = re.compile(r"(?![.~])[\w.-]+/[\w.-]+")
# patterns of files to fetch, and of those among them to skip (`*` matches `/` too)
SMALL_FILES = [
    "*.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    *OTHER_FILES,
]
SMALL_SKIPPED = ["*/*.json", "consolidated*"]
WEIGHTS = ["*.safetensors"]
WEIGHTS_SKIPPED = ["*/*", "consolidated*"]  # other formats in subfolders; a second copy
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # a file cloned without Git LFS
Preflight = Callable[[Path], object]
"""Called with a folder that has all files but the weights; raises if the model cannot be loaded."""


class ModelState(Enum):
    READY = "ready"
    DAMAGED = "damaged"  # embedded: rebuilt at the next use
    PARTIAL = "partly fetched"  # hub: a fetch was interrupted, or only the tokenizer was needed
    ABSENT = "not fetched"


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One line of `mainstem models`."""

    name: str
    path: Path | None
    num_bytes: int
    state: ModelState
    origin: str  # "embedded" or "hub"

    def to_json(self) -> dict[str, str | int | None]:
        return {
            "name": self.name,
            "path": str(self.path) if self.path else None,
            "bytes": self.num_bytes,
            "state": self.state.value,
            "origin": self.origin,
        }


def resolve_model(
    name: str,
    progress: Progress = unseen,
    check: FolderCheck = FolderCheck.SIZES,
    preflight: Preflight | None = None,
) -> Path:
    """The folder of a model, fetched and converted first if necessary.

    Works without network once the model is cached. Raises ModelNotFound, whose message says what
    to do, if there is no such model. `check` applies to the embedded model only, `preflight` to a
    hub id whose weights are not cached: it runs before they are fetched.
    """
    if name == SMOLLM2.name:
        return embedded_folder(SMOLLM2, cache_dir() / "models", progress=progress, check=check)
    folder = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if folder.is_dir():
        if pointer := lfs_pointer(folder):
            raise ModelNotFound(
                f"{name}: {pointer} is a Git LFS pointer, not the file itself. Fetch the files "
                "with `git lfs install && git lfs pull` in that folder, or the whole model with "
                "`hf download OWNER/NAME --local-dir DIR`"
            )
        if lacking := missing_part(folder):
            raise ModelNotFound(
                f"{name}: {lacking} is missing. A model folder holds config.json, a tokenizer "
                "and its weights as safetensors; pickled weights (.bin, .pt) are not read"
            )
        return folder.resolve()
    if folder.exists():
        raise ModelNotFound(f"{name} is a file; name the folder that holds config.json")
    if not HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"{name}: no such folder, and not a hub id (owner/name). "
            f"Use a local folder, a hub id, or {SMOLLM2.name}"
        )
    return _hub_folder(name, progress, preflight)


def tokenizer_folder(name: str) -> Path:
    """The folder of a model; of a hub id, only small files are fetched, no weights. A cached
    snapshot is used as it is: a newer one without weights would take its place offline."""
    if not HUB_ID.fullmatch(name) or Path(name).exists():
        return resolve_model(name)
    with suppress(huggingface_hub.errors.LocalEntryNotFoundError):
        folder = _small_files(name, is_offline=True)
        if (folder / CONFIG_FILE).is_file() and has_tokenizer(folder):
            return folder
    return _small_files(name)


@contextmanager
def config_folder(name: str) -> Iterator[Path]:
    """A folder with the config.json of a model; its weights may be missing.

    If a hub id is not cached, only this file is fetched, and deleted afterwards.
    """
    folder = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if folder.is_dir() and (folder / CONFIG_FILE).is_file():
        yield folder
    elif folder.exists() or name == SMOLLM2.name or not HUB_ID.fullmatch(name):
        yield resolve_model(name)
    elif isinstance(cached := huggingface_hub.try_to_load_from_cache(name, CONFIG_FILE), str):
        yield Path(cached).parent
    else:
        with TemporaryDirectory() as scratch:
            with _hub_errors(name):
                huggingface_hub.hf_hub_download(name, CONFIG_FILE, local_dir=scratch)
            yield Path(scratch)


def list_models() -> list[ModelRecord]:
    """List the embedded default, fetched or not, and then the models in the hub's cache, by
    name."""
    return [_embedded_record(SMOLLM2, cache_dir() / "models"), *_hub_records()]


def missing_part(folder: Path) -> str | None:
    """The first file a model folder lacks (config, weights, any shard), or None."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return None if any(folder.glob("*.safetensors")) else "model.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return f"a readable {index.name}"
    return next((shard for shard in shards if not (folder / shard).is_file()), None)


def lfs_pointer(folder: Path) -> str | None:
    """The first file of a model folder that was cloned without Git LFS, or None."""
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))]
    for path in filter(Path.is_file, files):
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                return path.name
    return None


def _embedded_record(model: EmbeddedModel, models_dir: Path) -> ModelRecord:
    folder = models_dir / model.name
    if not folder.is_dir():
        return ModelRecord(model.name, None, 0, ModelState.ABSENT, "embedded")
    state = ModelState.DAMAGED if find_damage(folder, model) else ModelState.READY
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return ModelRecord(model.name, folder, num_bytes, state, "embedded")


def _hub_folder(name: str, progress: Progress, preflight: Preflight | None) -> Path:
    progress("download", 0.0)
    folder = _small_files(name)
    if (folder / CONFIG_FILE).is_file():
        if preflight is not None and missing_part(folder):
            preflight(folder)
        with _hub_errors(name):
            huggingface_hub.snapshot_download(
                name,
                revision=folder.name,  # the commit of the small files
                allow_patterns=WEIGHTS,
                ignore_patterns=WEIGHTS_SKIPPED,
            )
    if lacking := missing_part(folder):
        raise ModelNotFound(
            f"{name}: {lacking} is missing. Only safetensors weights are read, never .bin or .pt; "
            "if the repository has them, the hub could not be reached"
        )
    progress("download", 1.0)
    return folder


def _small_files(name: str, is_offline: bool = False) -> Path:
    """The snapshot of a hub id, with all files that are read but the weights. Offline, it has what
    is cached; raises LocalEntryNotFoundError if nothing is."""
    with nullcontext() if is_offline else _hub_errors(name):
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=SMALL_FILES,
                ignore_patterns=SMALL_SKIPPED,
                local_files_only=is_offline,
            )
        )


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turns errors of the hub client into ModelNotFound, whose message says what to do."""
    try:
        yield
    except huggingface_hub.errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{name}: the hub has no such model, or it is private (`hf auth login`)"
        ) from error
    except Exception as error:  # including errors of the hub client's transport
        raise ModelNotFound(
            f"{name} is not in the local cache and the hub could not be reached "
            f"({type(error).__name__}). Without network: use a local folder or {SMOLLM2.name}, or "
            "fill the hub's cache elsewhere and set HF_HUB_OFFLINE=1. Behind a proxy: set "
            "HTTPS_PROXY; with a mirror: set HF_ENDPOINT"
        ) from error


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
        state = ModelState.PARTIAL if missing_part(path) else ModelState.READY
        records.append(ModelRecord(repo.repo_id, path, repo.size_on_disk, state, "hub"))
    return records
