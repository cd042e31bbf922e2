"""Weights -> a runner on the device they are to run on, its pages sized from what is free."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mainstem.core.config import CacheConfig, Device, DType, EngineConfig, ModelConfig, Quantize
from mainstem.core.errors import ConfigError
from mainstem.core.shapes import ModelShape
from mainstem.core.step import Runner
from mainstem.models.config import ModelSpec, Norm, RopeSpec, read_spec
from mainstem.models.decoder import make_decoder, pack
from mainstem.models.quantize import quantize_decoder
from mainstem.models.weights import (
    Checkpoint,
    RandomWeights,
    WeightSource,
    checkpoint_digest,
    compute_dtype,
)
from mainstem.runner import runner as cpu
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.pages import DevicePages
from mainstem.runner.runner import CpuRunner

CPU = "cpu"
_MAX_AUTO_TOKENS = 262_144  # on a CPU
_KV_SHARE = 0.4  # of the memory a CPU has left, at most
_PACKED_SHARE = 0.15  # likewise, for the second copy of the weights


class Origin(Protocol):
    """Where weights come from."""

    @property
    def spec(self) -> ModelSpec: ...

    def digest(self) -> bytes:
        """Equal for equal weights."""
        ...

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource: ...


@dataclass(frozen=True, slots=True)
class FolderOrigin:
    """A checkpoint in the Hugging Face layout."""

    folder: Path
    spec: ModelSpec

    def digest(self) -> bytes:
        return checkpoint_digest(self.folder)

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        return Checkpoint(self.folder, dtype, device)


@dataclass(frozen=True, slots=True)
class RandomOrigin:
    """Random weights of a known shape."""

    shape: ModelShape
    seed: int

    @property
    def spec(self) -> ModelSpec:
        shape = self.shape
        return ModelSpec(
            architecture="LlamaForCausalLM",
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            num_layers=shape.layers,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate,
            max_positions=shape.max_positions,
            norm=Norm.RMS,
            norm_eps=1e-5,
            rope=RopeSpec(theta=shape.rope_theta, rotary_dim=shape.head_dim),
            has_qkv_bias=False,
            has_out_bias=False,
            has_mlp_bias=False,
            has_qk_norm=False,
            has_parallel_residual=False,
            has_tied_embeddings=False,
            dtype=DType.BF16,
            sliding_window=None,
            bos_id=None,
            eos_ids=(),
        )

    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.shape}:{self.seed}".encode()).digest()

    def open(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        return RandomWeights(dtype, device, self.seed)


def folder_origin(folder: Path) -> FolderOrigin:
    """Raises UnsupportedModel for mathematics we do not have."""
    return FolderOrigin(folder, read_spec(folder))


def load_runner(origin: Origin, config: EngineConfig) -> tuple[Runner, RunnerFacts]:
    """Load weights and allocate pages on the device that the config names."""
    device = choose_device(config.model)
    if device.type == "cuda":
        from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # brings Triton

        return load_gpu_runner(origin, config, device)
    return load_cpu_runner(origin, config)


def choose_device(model: ModelConfig) -> torch.device:
    """ConfigError where the wanted device is not there or cannot do what is asked."""
    has_cuda = torch.cuda.is_available()
    if model.device is Device.CUDA and not has_cuda:
        raise ConfigError("device=cuda: torch sees no GPU; `mainstem doctor` says what it sees")
    is_cpu = model.device is Device.CPU or not has_cuda
    if is_cpu and model.quantize is Quantize.FP8:
        raise ConfigError("quantize=fp8 needs a GPU; on a CPU int8 is the smaller form")
    if is_cpu and model.deterministic:
        raise ConfigError("deterministic is a setting of the GPU")
    if not is_cpu and model.quantize is Quantize.INT8:
        raise ConfigError("quantize=int8 is for CPUs; on a GPU fp8 is the smaller form")
    return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())


def device_name(model: ModelConfig) -> str:
    """The card's name, or CPU; as choose_device chooses."""
    device = choose_device(model)
    return CPU if device.type == "cpu" else torch.cuda.get_device_name(device)


def load_cpu_runner(origin: Origin, config: EngineConfig) -> tuple[CpuRunner, RunnerFacts]:
    """As load_runner, on the CPU.

    Without `cache.kv_tokens` weights and pages take `cache.memory_share` of the memory that is
    available; without that either, pages take 40 % of what the weights leave, and no more than
    262,144 tokens. Sets torch's thread count for the process when `model.threads` does.
    """
    model, cache = config.model, config.cache
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    spec = origin.spec
    available = available_bytes()
    context = context_of(spec, config.sched.max_model_len)
    dtype = compute_dtype(model.dtype, spec.dtype)
    if model.quantize is Quantize.INT8:
        if model.dtype not in (DType.AUTO, DType.FP32):
            raise ConfigError("quantize=int8 computes in float32; set dtype to auto or float32")
        dtype = torch.float32
    decoder = make_decoder(origin.open(dtype, torch.device("cpu")), spec)
    if model.quantize is Quantize.INT8:
        decoder = quantize_decoder(decoder)
    else:
        pack(decoder, int(available_bytes() * _PACKED_SHARE))
    kv_bytes = spec.kv_elements_per_token * dtype.itemsize
    budget = _page_budget(cache, available, kv_bytes)
    num_pages = cache.num_pages(budget, kv_bytes * cache.page_size)
    facts = make_facts(origin, config, dtype, context, num_pages, cpu.LAYOUT)
    return CpuRunner(decoder, DevicePages(spec, num_pages, cache.page_size, dtype), context), facts


def make_facts(
    origin: Origin,
    config: EngineConfig,
    dtype: torch.dtype,
    context: int,
    num_pages: int,
    layout: bytes,
) -> RunnerFacts:
    """What the control plane must know of a model that was loaded so."""
    spec = origin.spec
    return RunnerFacts(
        num_pages=num_pages,
        page_size=config.cache.page_size,
        vocab_size=spec.vocab_size,
        max_model_len=context,
        identity=_identity(origin, dtype, config.model.quantize, layout),
        eos_ids=spec.eos_ids,
        kv_bytes_per_token=spec.kv_elements_per_token * dtype.itemsize,
        num_params=spec.num_layer_params,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=DType(str(dtype).removeprefix("torch.")),
        quantize=config.model.quantize,
        can_move_pages=spec.rope.has_fixed_frequencies,
    )


def _page_budget(cache: CacheConfig, available_before: int, kv_bytes: int) -> int:
    """Bytes for pages where no number of tokens was asked for; the weights are loaded already."""
    left = available_bytes()
    if cache.memory_share is None:
        return min(int(left * _KV_SHARE), _MAX_AUTO_TOKENS * kv_bytes)
    budget = int(available_before * cache.memory_share) - (available_before - left)
    if cache.kv_tokens is None and budget < kv_bytes * cache.page_size:
        raise ConfigError(f"memory_share={cache.memory_share} leaves no room for KV")
    return budget


def context_of(spec: ModelSpec, max_model_len: int | None) -> int:
    """Tokens of prompt and answer together; ConfigError where the model has fewer positions."""
    context = spec.max_positions if max_model_len is None else max_model_len
    if context > spec.max_positions:
        raise ConfigError(
            f"max_model_len={context} is more than the model's {spec.max_positions} positions"
        )
    spec.check_context(context)
    return context


def _identity(origin: Origin, dtype: torch.dtype, quantize: Quantize, layout: bytes) -> bytes:
    """Equal for two loads exactly when one may read the pages of the other."""
    digest = hashlib.sha256(origin.digest())
    digest.update(f"{dtype}:{quantize.value}:".encode() + layout)
    return digest.digest()


def available_bytes() -> int:
    """Memory that can be taken without swapping; a cautious 4 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
