"""Reads tensors by name from safetensors files in the Hugging Face layout, and computes the digest
of a checkpoint."""

import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import CONFIG_FILE
from mainstem.models.cpu.layers import has_products
from mainstem.models.file_hashes import Stamp, file_sha256
from mainstem.models.names import Names
from mainstem.models.packed import OrderedColumns, PackedWeight, Weight
from mainstem.models.quantized.packing import QuantizedSpec
from mainstem.models.quantized.random import random_packed
from mainstem.models.quantized.read import read_packed
from mainstem.models.weight_files import weight_files

log = logging.getLogger(__name__)

MOST_HASHERS = 4  # threads; each uses one core, and together at most half of the cores
_COMPARED_ROWS = 4096  # at a time, so that comparing two tensors takes little memory

_CPU = torch.device("cpu")
_USUAL_NAMES = Names()
_TORCH_DTYPES = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


def compute_dtype(wanted: DType, checkpoint: DType) -> torch.dtype:
    """The dtype to compute in on this CPU.

    AUTO takes the checkpoint's dtype. But if the CPU has no 16-bit matrix instructions, it takes
    fp32: torch's scalar loops for 16 bits are 100 to 300 times slower than fp32.
    """
    dtype = _TORCH_DTYPES[checkpoint if wanted is DType.AUTO else wanted]
    if wanted is DType.AUTO and dtype != torch.float32 and not has_fast_matmul(dtype):
        return torch.float32
    return dtype


def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for a 16-bit dtype, and oneDNN uses them."""
    if not has_products(dtype):
        return False
    # with AVX-512 alone, oneDNN converts bf16 to fp32 all the time: 256 rows take 3.6 times as long
    is_emulated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return dtype != torch.bfloat16 or not is_emulated


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        ...

    @property
    def device(self) -> torch.device: ...

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        """Return the tensor in the compute dtype, on the device.

        `shape` is the shape of the whole tensor. `at` is the wanted part: a slice for each of its
        first axes. A tensor may be taken part by part.
        """
        ...

    def take_wide(self, name: str, shape: Iterable[int]) -> Tensor:
        """Like `take`, but in fp32: a few numbers that must not be rounded to 16 bits."""
        ...

    def take_packed(
        self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()
    ) -> PackedWeight | None:
        """Return a quantized weight [.., out, in] by the product's name (without ".weight"); None
        if the source has a plain tensor, or no tensor."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def has_other(self, product: str, than: str) -> bool:
        """Whether there are two weights of the same shape, of `product` and of `than`, and they
        differ. A packed weight differs from a plain one."""
        ...

    def drop(self, name: str) -> None:
        """Accept a tensor that is not needed, if it is there."""
        ...

    def finish(self) -> None:
        """Raise UnsupportedModel if tensors are missing or unexpected; the error names them."""
        ...


def take_weight(source: WeightSource, name: str, *shape: int, at: tuple[slice, ...] = ()) -> Weight:
    """Return the weight [out, in] of a product, or a part of it, packed or plain. If only some
    columns of a weight in act-order are wanted, they are dequantized."""
    try:
        packed = source.take_packed(name, shape, at)
    except OrderedColumns:
        *rows, columns = at
        whole = source.take_packed(name, shape, tuple(rows))
        assert whole is not None
        return whole.dense(source.dtype)[..., columns].contiguous()
    return source.take(f"{name}.weight", shape, at) if packed is None else packed


_STORED_FLOATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_STORED_DTYPES = _STORED_FLOATS | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class HeldTensors:
    """Tensors in memory, read like an open file of the safetensors library."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def get_slice(self, name: str) -> "_HeldSlice":
        return _HeldSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class _HeldSlice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _STORED_DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, at: object) -> Tensor:
        return self._tensor[at]  # type: ignore[index]


class Checkpoint:
    """The tensors of a folder, taken whole or in parts; `finish` reports tensors that were not
    taken or are missing."""

    def __init__(
        self,
        folder: Path | None,
        dtype: torch.dtype,
        device: torch.device = _CPU,
        names: Names = _USUAL_NAMES,
        quantized: QuantizedSpec | None = None,
    ) -> None:
        """`names` says which tensors are ignored, and which are renamed. Without a folder, all
        tensors are those of `hold`."""
        self.dtype = dtype
        self.device = device
        self._quantized = quantized
        self._names = names
        self._ignored = () if quantized is None else quantized.ignored_endings
        self._lost: frozenset[str] = frozenset()
        self._copies = False
        self._has_files = folder is not None
        self._unknown: set[str] = set()  # held tensors that no file has
        self._missing: set[str] = set()
        self._taken: set[str] = set()
        # biases stored next to packed products; those not taken must be 0, as some tools write them
        self._maybe_biases: set[str] = set()
        # canonical name -> file, and the tensor's name in the file
        self._open: dict[str, tuple[Any, str]] = {}
        for file in () if folder is None else weight_files(folder):
            try:
                handle = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise UnsupportedModel(f"{file} is damaged: {error}") from error
            for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                if not names.is_ignored(name) and not name.endswith(self._ignored):
                    self._open[names.canonical(name)] = (handle, name)

    def canonical(self, name: str) -> str | None:
        """The name by which a tensor of a file is taken; None: it is ignored."""
        if self._names.is_ignored(name) or name.endswith(self._ignored):
            return None
        return self._names.canonical(name)

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these tensors, by canonical names, instead of those of the files. Raises
        UnsupportedModel if one has another dtype than the quantized tensor that it replaces."""
        held = HeldTensors(tensors)
        for name in tensors:
            if name in self._open:
                handle, its_name = self._open[name]
                stored, given = handle.get_slice(its_name), held.get_slice(name)
                was, now = stored.get_dtype(), given.get_dtype()
                floats = _STORED_FLOATS.values()
                if was != now and not (was in floats and now in floats):
                    raise UnsupportedModel(f"tensor {name} has dtype {now}, expected {was}")
                if list(stored.get_shape()) != given.get_shape():
                    raise UnsupportedModel(
                        f"tensor {name} has shape {given.get_shape()}, "
                        f"expected {list(stored.get_shape())}"
                    )
            else:
                self._unknown.add(name)
            self._open[name] = (held, name)

    def copy_files(self) -> None:
        """Take copies of what is in files, not views of the files, which may change later."""
        self._copies = True

    def lose(self, names: Collection[str]) -> None:
        """Refuse to take these tensors from the files: they have other values now."""
        self._lost = frozenset(names)

    def forget(self, prefixes: tuple[str, ...]) -> None:
        """Do without the tensors whose names begin so: they will not be taken."""
        kept = {name: at for name, at in self._open.items() if not name.startswith(prefixes)}
        self._open = kept

    def check_given(self, names: Names) -> None:
        """Raise UnsupportedModel if a tensor was given that the files do not have. The head of a
        tied embedding may be given, too."""
        unknown = self._unknown - {f"{names.head}.weight", f"{names.embedding}.weight"}
        if self._has_files and unknown:
            raise UnsupportedModel(f"the checkpoint holds unexpected tensors {_shorten(unknown)}")

    def check_lost(self, prefixes: tuple[str, ...] | None) -> None:
        """Raise UnsupportedModel if one of the tensors whose names begin so (None: any) is lost."""
        for name in sorted(self._lost & self._open.keys()):
            if prefixes is None or name.startswith(prefixes):
                self._refuse_lost(name)

    def _refuse_lost(self, name: str) -> None:
        if name in self._lost:
            raise UnsupportedModel(
                f"{name} is needed too: it is in the same part of the model as a given tensor, and "
                "the values that an earlier update gave it are not kept; give both"
            )

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        """Return the tensor in the compute dtype. If it is missing, this is recorded for `finish`,
        and an uninitialised tensor is returned."""
        return self._taken_as(self.dtype, name, tuple(shape), at)

    def take_wide(self, name: str, shape: Iterable[int]) -> Tensor:
        return self._taken_as(torch.float32, name, tuple(shape))

    def _taken_as(
        self, dtype: torch.dtype, name: str, wanted: tuple[int, ...], at: tuple[slice, ...] = ()
    ) -> Tensor:
        if name not in self._open:
            self._missing.add(name)
            return torch.empty(part_shape(wanted, at), dtype=dtype, device=self.device)
        tensor = self.stored(name, wanted, at)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            raise UnsupportedModel(
                f"tensor {name} has dtype {tensor.dtype}, but config.json has no "
                "quantization_config that describes it"
            )
        return tensor.to(dtype)

    def take_packed(
        self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()
    ) -> PackedWeight | None:
        if self._quantized is None:
            return None
        packed = read_packed(self, self._quantized, name, tuple(shape), at)
        if packed is not None and f"{name}.bias" in self._open:
            self._maybe_biases.add(f"{name}.bias")
        return packed

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor of the files; None if there is none."""
        if name not in self._open:
            return None
        handle, its_name = self._open[name]
        return tuple(handle.get_slice(its_name).get_shape())

    def stored(self, name: str, shape: tuple[int, ...], at: tuple[slice, ...] = ()) -> Tensor:
        """A tensor of the files as it is stored, on the device."""
        if name not in self._open:
            raise UnsupportedModel(f"the checkpoint lacks {name}")
        self._refuse_lost(name)
        handle, its_name = self._open[name]
        found = handle.get_slice(its_name)
        if tuple(found.get_shape()) != shape:
            raise UnsupportedModel(
                f"tensor {its_name} has shape {list(found.get_shape())}, expected {list(shape)}"
            )
        self._taken.add(name)
        if part_shape(shape, at) != shape:
            tensor: Tensor = found[at]
        else:
            tensor = handle.get_tensor(its_name)
        return tensor.to(self.device, copy=self._copies)

    def has(self, name: str) -> bool:
        return name in self._open

    def has_other(self, product: str, than: str) -> bool:
        name, other = f"{product}.weight", f"{than}.weight"
        its_names = {found for found in self._open if found.startswith(f"{product}.")}
        if not its_names - {f"{product}.bias"} or other not in self._open:
            return False
        shape = self.shape_of(name)
        if its_names - {f"{product}.bias", name} or shape is None:
            return True
        if shape != self.shape_of(other):  # left over from before the vocabulary was resized
            log.warning("%s has another shape than %s, and is not used", name, other)
            return False
        for first in range(0, shape[0], _COMPARED_ROWS):
            at = slice(first, first + _COMPARED_ROWS)
            ours, theirs = self._rows(name, at), self._rows(other, at)
            if ours.dtype != theirs.dtype:  # compare what would be used
                ours, theirs = ours.to(self.dtype), theirs.to(self.dtype)
            if not torch.equal(ours, theirs):
                return True
        return False

    def _rows(self, name: str, at: slice) -> Tensor:
        """Rows of a stored tensor, on the CPU; this does not count as taking it."""
        handle, its_name = self._open[name]
        rows: Tensor = handle.get_slice(its_name)[at]
        return rows

    def drop(self, name: str) -> None:
        """Accept a tensor that is not needed, if it is there."""
        self._open.pop(name, None)

    def finish(self) -> None:
        """Raise UnsupportedModel if tensors are missing or unexpected; the error names them."""
        for name in (self._maybe_biases & self._open.keys()) - self._taken:
            if not self.take(name, self.shape_of(name) or ()).any():
                continue
            raise UnsupportedModel(f"the checkpoint holds a bias that is not expected, {name}")
        endings = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks")
        if self._quantized is None and any(
            name.endswith(endings) for name in self._open.keys() - self._taken
        ):
            raise UnsupportedModel(
                "the weights are quantized, but config.json has no quantization_config; old GPTQ "
                "folders have it in quantize_config.json: copy it to config.json"
            )
        if self._missing:
            raise UnsupportedModel(f"the checkpoint lacks {_shorten(self._missing)}")
        if rest := self._open.keys() - self._taken:
            raise UnsupportedModel(f"the checkpoint holds unexpected tensors {_shorten(rest)}")


def part_shape(shape: tuple[int, ...], at: tuple[slice, ...]) -> tuple[int, ...]:
    """The shape of tensor[at]."""
    cut = tuple(len(range(*part.indices(size))) for part, size in zip(at, shape, strict=False))
    return cut + shape[len(at) :]


def _shorten(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


class WeightDigest:
    """Hashes config and weights of a folder on separate threads, while the weights are loaded.

    Every byte counts: if a tensor were left out, a changed model could read pages of the old model.
    Hashes of files are remembered (file_hashes.py).
    """

    def __init__(self, folder: Path) -> None:
        self._config = (folder / CONFIG_FILE).read_bytes()
        self._stamps = {file: Stamp.of(file) for file in weight_files(folder)}
        self._hashes: dict[Path, Future[bytes]] = {file: Future() for file in self._stamps}
        self._todo: SimpleQueue[Path] = SimpleQueue()
        for file in self._stamps:
            self._todo.put(file)
        for _ in range(min(len(self._stamps), max(1, (os.cpu_count() or 1) // 2), MOST_HASHERS)):
            Thread(target=self._hash_files, name="weight-hash", daemon=True).start()

    def wait(self) -> bytes:
        """The digest; raises UnsupportedModel if a file changed since this object was made."""
        digest = hashlib.sha256(self._config)
        for file, stamp in self._stamps.items():
            found, now = self._hashes[file].result(), Stamp.of(file)
            digest.update(f"{file.name}:{stamp.size}:".encode() + found)
            is_same = now == stamp
            if not is_same and now.of_contents == stamp.of_contents:
                # only ctime changed: a link was made, or a tool restored mtime
                is_same = file_sha256(file) == found
            if not is_same:
                raise UnsupportedModel(
                    f"{file} changed while it was loaded; load the model again once nothing "
                    "writes to it"
                )
        return digest.digest()

    def _hash_files(self) -> None:
        with suppress(Empty):
            while True:
                file = self._todo.get_nowait()
                try:
                    self._hashes[file].set_result(file_sha256(file))
                except Exception as error:  # raised in the caller of `wait`
                    self._hashes[file].set_exception(error)


_GAINS = (
    "norm.weight",
    "norm_1.weight",
    "norm_2.weight",
    "ln_attn.weight",
    "ln_mlp.weight",
    "ln_f.weight",
    "layer_scalar",
    "router.scale",
    "per_expert_scale",
)


class RandomWeights:
    """A source of random weights, for measuring speed. It has tensors of any name and shape.

    Gains of norms are one, so that activations stay in range through many layers.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        quantized: QuantizedSpec | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._quantized = quantized
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        size = part_shape(tuple(shape), at)
        if name.endswith(_GAINS):
            return torch.ones(size, dtype=self.dtype, device=self.device)
        tensor = torch.empty(size, dtype=self.dtype, device=self.device)
        return tensor.normal_(0.0, 0.02, generator=self._generator)

    def take_wide(self, name: str, shape: Iterable[int]) -> Tensor:
        return self.take(name, shape).float()

    def take_packed(
        self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()
    ) -> PackedWeight | None:
        packing = None if self._quantized is None else self._quantized.packing_of(name)
        if packing is None:
            return None
        return random_packed(packing, part_shape(tuple(shape), at), self.dtype, self._generator)

    def has(self, name: str) -> bool:
        return True

    def has_other(self, product: str, than: str) -> bool:
        """Return False: a model with tied embeddings has no head of its own."""
        return False

    def drop(self, name: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing: nothing can be missing."""
