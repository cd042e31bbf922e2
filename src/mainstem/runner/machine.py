"""Describes what this machine computes with: devices, torch and triton."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from mainstem.models.weights import has_fast_matmul

# Linux's names of the CPU features that our kernels' speed depends on
ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
X86_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
FEATURES = ARM_FEATURES + X86_FEATURES
ARM_PARTS = {
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device. For a CPU, memory is the machine's and units are the cores we may use."""

    kind: str  # "cpu" or "cuda"
    name: str
    num_units: int  # cores, or streaming multiprocessors
    memory_bytes: int
    free_bytes: int
    features: tuple[str, ...]  # CPU: those of FEATURES that it has; CUDA: the compute capability
    has_fast_bf16: bool  # 16-bit GEMMs at least as fast as fp32


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The libraries that the data plane uses."""

    version: str
    num_threads: int
    cuda_version: str | None  # None: a build for CPUs only
    triton_version: str | None
    can_compile_triton: bool  # False: kernels run only in triton's interpreter, for tests


def describe_devices() -> list[DeviceFacts]:
    """Every CUDA device, then the CPU."""
    return [*map(_describe_cuda, range(torch.cuda.device_count())), describe_cpu()]


def describe_cpu() -> DeviceFacts:
    """The CPU and the memory that is free to this process."""
    fields = _read_cpuinfo()
    flags = set((fields.get("features") or fields.get("flags") or "").split())
    part = (fields.get("cpu implementer", ""), fields.get("cpu part", ""))
    name = fields.get("model name") or ARM_PARTS.get(part) or platform.processor()
    memory = psutil.virtual_memory()
    return DeviceFacts(
        kind="cpu",
        name=name or platform.machine(),
        num_units=_num_cores(),
        memory_bytes=memory.total,
        free_bytes=memory.available,
        features=tuple(feature for feature in FEATURES if feature in flags),
        has_fast_bf16=has_fast_matmul(torch.bfloat16),
    )


def describe_torch() -> TorchFacts:
    """Versions and threads of this process."""
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = None
    return TorchFacts(
        version=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        cuda_version=torch.version.cuda,
        triton_version=triton_version,
        can_compile_triton=triton_version is not None and torch.cuda.is_available(),
    )


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    return psutil.virtual_memory().available


def _describe_cuda(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return DeviceFacts(
        kind="cuda",
        name=properties.name,
        num_units=properties.multi_processor_count,
        memory_bytes=total_bytes,
        free_bytes=free_bytes,
        features=(f"sm_{properties.major}{properties.minor}",),
        has_fast_bf16=properties.major >= 8,
    )


def _num_cores() -> int:
    """Cores that this process may run on; a container or taskset can lower their number."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_cpuinfo() -> dict[str, str]:
    """The lines `name : value` of the first core, with names in lower case (psutil does not report
    features)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    fields: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    return fields
