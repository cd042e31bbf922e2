"""The weights of a runner, which an update changes (docs/design/weights.md).

    update   tensors are collected; the first error leaves everything as it was
             whole parts of the model are made from them as at the start (models/tensors.py): fused,
             folded, quantized, cut for a rank
             they replace the parts in use

A tensor that is not given has the value that it had: that of the folder, or of an earlier update.
"""

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Protocol
from weakref import proxy

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mainstem.core.errors import InvalidRequest, UnsupportedModel, WeightsLost
from mainstem.core.weights import FolderUpdate, Tag, TensorUpdate, Update
from mainstem.models.config_file import CONFIG_FILE
from mainstem.models.cpu.decoder import Decoder
from mainstem.models.file_hashes import file_sha256
from mainstem.models.key_shifts import KeyShifts
from mainstem.models.spec import ModelSpec
from mainstem.models.weight_files import weight_files
from mainstem.models.weights import Checkpoint
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.origin import FolderOrigin, Origin, RandomOrigin, folder_origin
from mainstem.runner.rounded_pages import RoundedPages

MARK = b"mainstem weights 1"


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """How a runner was loaded, as far as an update needs it."""

    origin: Origin
    dtype: torch.dtype
    device: torch.device
    identify: Callable[[Origin], bytes]  # the model's identity with other weights
    shifts: KeyShifts | None  # if full pages are rounded; they stay when weights change


class Parts(Protocol):
    """Puts new weights into a runner."""

    keeps_values: bool  # whether copies of given tensors are kept, for later updates of others

    def change(self, source: Checkpoint, names: frozenset[str] | None) -> None:
        """Take the tensors with these canonical names (None: all) into force. If this raises, the
        old ones are in force; or none are, if it raises WeightsLost."""
        ...

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: frozenset[Tag], source: Checkpoint | None) -> None:
        """`source`: where weights are that were dropped; None: they were not."""
        ...


@dataclass(frozen=True, slots=True)
class _Values:
    """Where the values of all tensors are."""

    origin: Origin
    identity: bytes
    held: dict[str, Tensor]  # those that updates gave
    lost: frozenset[str]  # likewise, but only the device has them


class RunnerWeights:
    """See ModelWeights in core.weights."""

    def __init__(self, loaded: LoadFacts, parts: Parts) -> None:
        self._loaded = loaded
        self._parts = parts
        self._first_identity = loaded.identify(loaded.origin)
        self._values: _Values | None = _Values(loaded.origin, self._first_identity, {}, frozenset())
        self._last_origin = loaded.origin
        self._before_loss: _Values | None = None
        self._is_dropped = False  # `sleep` has dropped them

    def update(self, update: Update) -> bytes:
        try:
            if isinstance(update, FolderUpdate) and (update.folder / CONFIG_FILE).is_file():
                values = self._take_folder(update.folder)
            else:
                values = self._take_tensors(update)
        except UnsupportedModel as error:
            raise InvalidRequest("weights", f"{error}") from None
        self._values, self._before_loss, self._is_dropped = values, None, False
        self._last_origin = values.origin
        return values.identity

    def lose(self) -> None:
        self._before_loss, self._values = self._values, None

    def resume(self) -> None:
        if self._before_loss is None:
            raise InvalidRequest("weights", "there are none to go on with; update all of them")
        source = self._source(self._before_loss) if self._is_dropped else None
        self._parts.wake(frozenset({Tag.WEIGHTS}), source)
        self._values, self._before_loss, self._is_dropped = self._before_loss, None, False

    def sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise InvalidRequest("level", f"must be 1 or 2, got {level}")
        self._parts.sleep(level)
        if level == 2:
            self._is_dropped = True
            if self._values is not None and self._is_held(self._values):
                self._values = None

    def wake(self, tags: frozenset[Tag]) -> None:
        source = None
        if self._is_dropped and Tag.WEIGHTS in tags and self._values is not None:
            source = self._source(self._values)
        self._parts.wake(tags, source)
        if Tag.WEIGHTS in tags:
            self._is_dropped = self._is_dropped and source is None
            if self._values is None:
                raise WeightsLost(
                    "sleep(level=2) dropped weights that came from an iterator: update all of them"
                )

    def _is_held(self, values: _Values) -> bool:
        """Whether some values are only in this process."""
        return bool(values.held or values.lost) or isinstance(values.origin, RandomOrigin)

    # --- a whole model --------------------------------------------------------------------------

    def _take_folder(self, folder: Path) -> _Values:
        spec = self._loaded.origin.spec
        origin = folder_origin(folder, spec.ignored_fields)
        _check_same_model(spec, origin.spec)
        values = _Values(origin, b"", {}, frozenset())
        self._change(self._source(values), None)
        return _Values(origin, self._identify(origin), {}, frozenset())

    def _identify(self, origin: FolderOrigin) -> bytes:
        """Raises WeightsLost if the folder changed while it was read."""
        try:
            return self._loaded.identify(origin)
        except UnsupportedModel as error:
            self._values = self._before_loss = None
            raise WeightsLost(f"{error}") from None

    # --- some tensors ---------------------------------------------------------------------------

    def _take_tensors(self, update: Update) -> _Values:
        if isinstance(update, FolderUpdate):
            given, mark = _read_folder(update.folder)
        else:
            given, mark = collect(update), token_bytes(32)
        if not given:
            raise InvalidRequest("weights", "there are no tensors")
        before = self._staying()
        names = _canonical(given, self._source(before))
        held, lost = before.held | names, before.lost - names.keys()
        source = self._source(_Values(before.origin, b"", held, lost))
        is_whole = self._values is None or self._is_dropped
        kept = _own(names) if self._parts.keeps_values else {}
        self._change(source, None if is_whole else frozenset(names))
        identity = sha256(MARK + self._first_identity + before.identity + mark)
        if self._parts.keeps_values:
            return _Values(before.origin, identity.digest(), before.held | kept, frozenset())
        return _Values(before.origin, identity.digest(), {}, lost | names.keys())

    def _staying(self) -> _Values:
        """The values of tensors that are not given. Nothing is read from a folder that has changed:
        what it held must be given."""
        spec, values = self._last_origin.spec, self._values
        if values is None:
            return _Values(RandomOrigin(spec, 0), b"", {}, frozenset())
        try:
            self._source(values)
        except UnsupportedModel:
            return replace(values, origin=RandomOrigin(spec, 0))
        return values

    def _source(self, values: _Values) -> Checkpoint:
        """All tensors as they are to be."""
        spec, loaded = self._loaded.origin.spec, self._loaded
        folder = None
        if isinstance(values.origin, FolderOrigin):
            folder = values.origin.folder
            values.origin.weights.wait()  # raises UnsupportedModel if the files have changed
        source = Checkpoint(folder, loaded.dtype, loaded.device, spec.names, spec.quantized)
        source.hold(values.held)
        source.lose(values.lost)
        return source

    def _change(self, source: Checkpoint, names: frozenset[str] | None) -> None:
        if self._loaded.shifts is not None:
            self._loaded.shifts.check(source, names)
        try:
            self._parts.change(source, names)
        except WeightsLost:
            self._values = self._before_loss = None
            raise


def collect(update: TensorUpdate) -> dict[str, Tensor]:
    """All tensors of an iterator. Tensors on a device are copied to host memory. Raises
    InvalidRequest if the iterator has changed a tensor that it had given before."""
    given: dict[str, Tensor] = {}
    versions: dict[str, int] = {}
    for name, tensor in update.tensors:
        if not isinstance(tensor, Tensor):
            raise InvalidRequest("weights", f"{name} is a {type(tensor).__name__}, not a tensor")
        if name in given:
            raise InvalidRequest("weights", f"{name} was given twice")
        kept = tensor.detach()
        given[name] = kept if kept.device.type == "cpu" else kept.to("cpu")
        versions[name] = _version(given[name])
    for name, version in versions.items():
        if _version(given[name]) != version:
            raise InvalidRequest(
                "weights", f"{name} was changed after it was given: the iterator reuses its memory"
            )
    return given


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 if torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies; tensors that share memory (tied ones) share their copy."""
    copies: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if key not in copies:
            copies[key] = tensor.clone()
        own[name] = copies[key]
    return own


def _canonical(given: dict[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """The tensors by the names that the model uses."""
    named: dict[str, Tensor] = {}
    for its_name, tensor in given.items():
        name = source.canonical(its_name)
        if name is not None:
            if name in named:
                raise InvalidRequest("weights", f"{its_name} was given under two names")
            named[name] = tensor
    return named


def _read_folder(folder: Path) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a folder that is not a whole model, and the digest of its files."""
    given: dict[str, Tensor] = {}
    digest = sha256()
    try:
        for file in weight_files(folder) if folder.is_dir() else [folder]:
            digest.update(file_sha256(file) if folder.is_dir() else token_bytes(32))
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    given[name] = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{folder}: {error}") from None
    return given, digest.digest()


def _check_same_model(ours: ModelSpec, theirs: ModelSpec) -> None:
    """Raise InvalidRequest unless two recipes are the same."""
    differ = [f.name for f in fields(ModelSpec) if getattr(ours, f.name) != getattr(theirs, f.name)]
    if differ:
        raise InvalidRequest(
            "weights", f"the folder holds another model; these differ: {', '.join(differ)}"
        )


class CpuParts:
    """Makes the whole decoder anew, beside the old one, and exchanges the two. Parts of it depend
    on several tensors: a norm's gain is folded into the products that read it."""

    keeps_values = True

    def __init__(self, runner: CpuRunner, make: Callable[[Checkpoint], Decoder]) -> None:
        self._runner: CpuRunner = proxy(runner)  # which holds this
        self._make = make

    def change(self, source: Checkpoint, names: frozenset[str] | None) -> None:
        source.copy_files()  # somebody may write to them later
        self._runner.exchange(self._make(source))

    def sleep(self, level: int) -> None:
        """Free the memory of pages; at level 1, weights stay where they are."""
        pages = self._runner.pages
        tensors = list(pages.tensors)
        if isinstance(pages, RoundedPages):
            tensors += map(pages.opened, range(pages.num_layers))
        for tensor in tensors:
            _give_back(tensor)
        if level == 2:
            self._runner.exchange(None)

    def wake(self, tags: frozenset[Tag], source: Checkpoint | None) -> None:
        if source is not None:
            source.copy_files()
            self._runner.exchange(self._make(source))


def _give_back(tensor: Tensor) -> None:
    """Give the whole memory pages of a tensor back to the system. They read as zeros, and keep
    their addresses."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    size = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.nbytes) // size * size
    if end > begin:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
