"""Where weights come from, and the facts about a loaded model that the control plane needs."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mainstem.core.config import DType, EngineConfig, ModelConfig
from mainstem.core.errors import ConfigError
from mainstem.models.families import read_spec
from mainstem.models.quantized.kv_scales import KvScales, read_kv_scales
from mainstem.models.shard import Shard, part_of
from mainstem.models.spec import ModelSpec
from mainstem.models.weights import Checkpoint, RandomWeights, WeightDigest, WeightSource
from mainstem.runner.division import Division
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.page_parts import layout_of


class Origin(Protocol):
    """Where weights come from."""

    @property
    def spec(self) -> ModelSpec: ...

    def digest(self) -> bytes:
        """A digest that is equal for equal weights."""

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource: ...

    def kv_scales(self) -> KvScales | None:
        """The scales of K and V in fp8 of a checkpoint that declares them."""


@dataclass(frozen=True, slots=True)
class FolderOrigin:
    """A checkpoint in the Hugging Face layout."""

    folder: Path
    spec: ModelSpec
    weights: WeightDigest

    def digest(self) -> bytes:
        """The digest. It includes the names of ignored fields: a later version that knows these
        fields computes other pages from the same config.json."""
        digest = hashlib.sha256(self.weights.wait())
        if self.spec.ignored_fields:
            digest.update(f"ignored:{','.join(self.spec.ignored_fields)}".encode())
        return digest.digest()

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        return Checkpoint(self.folder, dtype, device, self.spec.names, self.spec.quantized)

    def kv_scales(self) -> KvScales | None:
        return read_kv_scales(self.folder, self.spec) if self.spec.has_fp8_kv else None


@dataclass(frozen=True, slots=True)
class RandomOrigin:
    """Random weights of a known shape."""

    spec: ModelSpec
    seed: int

    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.spec}:{self.seed}".encode()).digest()

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        return RandomWeights(dtype, device, self.seed, self.spec.quantized)

    def kv_scales(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class FolderPart:
    """A checkpoint whose hash another process computes."""

    folder: Path
    spec: ModelSpec

    def digest(self) -> bytes:
        return b""

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        return Checkpoint(self.folder, dtype, device, self.spec.names, self.spec.quantized)

    def kv_scales(self) -> KvScales | None:
        return read_kv_scales(self.folder, self.spec) if self.spec.has_fp8_kv else None


def for_rank(origin: Origin) -> Origin:
    """Return the origin in the form that is sent to a rank, which is another process."""
    if isinstance(origin, FolderOrigin):
        return FolderPart(origin.folder.absolute(), origin.spec)
    return origin


def folder_origin(folder: Path, ignored: Collection[str] = ()) -> FolderOrigin:
    """Return the origin of a folder, and begin to hash its weights. Raises UnsupportedModel for a
    model that the engine cannot run, and for unknown fields of config.json that are not
    `ignored`."""
    return FolderOrigin(folder, read_spec(folder, ignored), WeightDigest(folder))


def make_facts(
    origin: Origin,
    config: EngineConfig,
    shard: Shard,
    dtype: torch.dtype,
    context: int,
    division: Division,
    layout: bytes,
) -> RunnerFacts:
    """Return the facts about a loaded model. Sizes are those of the rank's part: they decide what a
    step costs and what a page holds."""
    spec = part_of(origin.spec, shard).at_context(context)
    layout += layout_of(spec)
    if not shard.is_whole:
        layout += f":rank {shard.rank} of {shard.of}".encode()
    # long shared prefixes are read by layers without a window
    kinds = spec.attentions
    shape = spec.kv_shape(next((kind for kind in kinds if kind.window is None), kinds[0]))
    return RunnerFacts(
        num_pages=division.num_pages,
        num_parts=division.num_parts,
        part_bytes=division.part_bytes,
        window=spec.part_window,
        page_size=config.cache.page_size,
        page_bytes=division.page_bytes + division.part_bytes,
        vocab_size=spec.vocab_size,
        max_model_len=context,
        identity=_identity(origin, context, dtype, config.model, layout),
        num_params=spec.num_layer_params,
        num_idle_params=spec.num_idle_params,
        pair_flops=4 * spec.num_heads * shape.dim * spec.num_full_layers,
        bytes_per_param=spec.bytes_per_param(dtype.itemsize),
        num_heads=spec.num_heads,
        num_kv_heads=shape.heads,
        head_dim=shape.dim,
        dtype=DType(str(dtype).removeprefix("torch.")),
    )


def context_of(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the maximum tokens of prompt and answer together: max_model_len, or what kv_tokens has
    room for if that is less. Raises ConfigError if the model has fewer positions."""
    given, cache = config.sched.max_model_len, config.cache
    context = spec.max_positions if given is None else given
    if context > spec.max_positions:
        raise ConfigError(
            f"max_model_len={context} is more than the model's {spec.max_positions} positions"
        )
    if cache.kv_tokens is None:
        return context
    return min(context, cache.num_pages(0, 0) * cache.page_size)


def _identity(
    origin: Origin, context: int, dtype: torch.dtype, model: ModelConfig, layout: bytes
) -> bytes:
    """Return the model's identity: two loads have the same identity only if one may read the
    other's pages."""
    digest = hashlib.sha256(origin.digest())
    digest.update(f"{dtype}:{model.quantize.value}:".encode() + layout)
    if model.deterministic:  # pages made without it differ in their last bits
        digest.update(b":deterministic")
    ropes = origin.spec.at_context(context).ropes
    if ropes != origin.spec.ropes:  # LongRoPE rotates keys differently in long contexts
        digest.update(repr(ropes).encode())
    return digest.digest()
