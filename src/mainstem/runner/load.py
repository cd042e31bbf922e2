"""Makes a runner on its device from weights."""

import logging

import torch

from mainstem.core.config import Device, EngineConfig, ModelConfig, Quantize
from mainstem.core.errors import ConfigError
from mainstem.core.step import Runner
from mainstem.models.collectives import ALONE, Collectives
from mainstem.models.spec import ModelSpec, RopeScaling
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.facts import RunnerFacts
from mainstem.runner.origin import Origin, context_of

log = logging.getLogger(__name__)

CPU = "cpu"


def load_runner(
    origin: Origin, config: EngineConfig, ranks: Collectives = ALONE
) -> tuple[Runner, RunnerFacts]:
    """Load the part of the model that `ranks.shard` names and allocate pages, on the config's
    device. All ranks load at the same time and have the same number of pages."""
    if ranks.shard.rank == 0:
        _warn_of_long_factors(origin.spec, config)
    device = choose_device(config.model)
    if device.type == "cuda":
        from mainstem.runner.gpu_load import load_gpu_runner  # noqa: PLC0415  # brings Triton

        return load_gpu_runner(origin, config, device, ranks)
    return load_cpu_runner(origin, config, ranks)


def _warn_of_long_factors(spec: ModelSpec, config: EngineConfig) -> None:
    """Say that LongRoPE's long factors are used for short requests, too. transformers uses the
    short factors for them."""
    context = context_of(spec, config)
    for rope in spec.ropes:
        if rope.scaling is RopeScaling.LONGROPE and context > rope.original_positions:
            log.warning(
                "LongRoPE: requests of every length use the factors for contexts of more than %d "
                "tokens. If all your requests are shorter, start with --max-model-len %d: then the "
                "factors for short contexts are used",
                rope.original_positions,
                rope.original_positions,
            )


def choose_device(model: ModelConfig) -> torch.device:
    """Return the device to use; raises ConfigError if it is missing or cannot run this config."""
    has_cuda = torch.cuda.is_available()
    if model.device is Device.CUDA and not has_cuda:
        raise ConfigError("device=cuda: torch finds no GPU; `mainstem doctor` shows what it finds")
    is_cpu = model.device is Device.CPU or not has_cuda
    if is_cpu and model.quantize is Quantize.FP8:
        raise ConfigError("quantize=fp8 needs a GPU; on a CPU use quantize=int8")
    if is_cpu and model.deterministic:
        raise ConfigError("deterministic works only on a GPU")
    if not is_cpu and model.quantize is Quantize.INT8:
        raise ConfigError("quantize=int8 works only on CPUs; on a GPU use quantize=fp8")
    if model.deterministic and model.quantize is Quantize.FP8:
        raise ConfigError(
            "deterministic cannot be combined with quantize=fp8, whose products depend on other "
            "rows"
        )
    return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())


def device_name(model: ModelConfig) -> str:
    """Return the name of the device that `choose_device` chooses: the GPU's name, or CPU."""
    device = choose_device(model)
    return CPU if device.type == "cpu" else torch.cuda.get_device_name(device)
