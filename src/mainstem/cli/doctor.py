"""`mainstem doctor`: what this machine has, and what will be used and why."""

import json
import platform
import shutil
from dataclasses import asdict
from pathlib import Path

from mainstem.checkpoints.hub import ModelRecord, ModelState, config_folder, list_models
from mainstem.cli.parser import Parser
from mainstem.core.config import CacheConfig, Device, DType, StoreConfig
from mainstem.core.environment import cache_dir
from mainstem.core.tables import gigabytes
from mainstem.core.version import __version__
from mainstem.runner.division import KvCosts, divide
from mainstem.runner.kv_size import KvSize, kv_size
from mainstem.runner.machine import DeviceFacts, TorchFacts, describe_devices, describe_torch
from mainstem.runner.rank_sizes import ON_CPU, ON_GPU, ON_GPU_WITH_FP8, RankSize, rank_sizes

Section = dict[str, object]

HOPPER = "sm_90"
FP8_SM = 89  # cards from sm_89 on multiply in fp8
CONVERSION_BYTES = 1_000_000_000  # free disk space to download and convert the default model
GPU_SHARE = 0.9  # of a card, for weights and pages, if --gpu-memory-utilization is not given
GPU_CHUNK_TOKENS = 2048  # of a step; the engine chooses them for the card
GPU_RESERVE = 2 << 30  # of GPU_SHARE, about this much is for buffers of steps and graphs


def report() -> dict[str, object]:
    """Everything doctor knows, as JSON values: system, devices, torch, cache, use, warnings."""
    devices, libraries, models = describe_devices(), describe_torch(), list_models()
    free_bytes = shutil.disk_usage(_existing(cache_dir())).free
    return {
        "mainstem": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": [asdict(device) for device in devices],
        "torch": asdict(libraries),
        "cache": _cache(models, free_bytes),
        "use": plan_use(devices, libraries),
        "warnings": find_warnings(devices[-1], models[0], free_bytes),
    }


def plan_use(devices: list[DeviceFacts], libraries: TorchFacts) -> Section:
    """What the engine uses by default on these devices: device, dtype, attention, reasons."""
    usable = {device.value for device in Device}
    device = next(device for device in devices if device.kind in usable)
    if device.has_fast_bf16:
        dtype, why_dtype = "the checkpoint's own", f"{device.name} has fast bf16"
    elif device.kind == "cuda":
        dtype = "the checkpoint's own"
        why_dtype = f"{device.name} has no fast bf16; use --dtype float16 for bf16 checkpoints"
    else:
        dtype = "float32"
        why_dtype = (
            f"{device.name} has no bf16 instructions, and torch's 16-bit GEMMs then run 100 to 270 "
            "times slower than fp32 (measured on Neoverse-N1); 16-bit checkpoints are upcast"
        )
    idle = [other.name for other in devices if other.kind not in usable]
    return {
        "device": device.kind,
        "why_device": f"{', '.join(idle)} found, not used by this version" if idle else device.name,
        "dtype": dtype,
        "why_dtype": why_dtype,
        "attention": _attention_words(device, libraries),
        "threads": libraries.num_threads,
        "store": _store_words(StoreConfig(), devices[-1].free_bytes),
    }


def _attention_words(device: DeviceFacts, libraries: TorchFacts) -> str:
    merged = "merged by log-sum-exp in fp32"
    if device.kind == "cpu":
        return f"spans through torch's CPU flash attention, {merged}"
    if not libraries.can_compile_triton:
        return "none: kernels need Triton, which is not installed; install it or use --device cpu"
    if HOPPER in device.features:
        return f"spans in Gluon kernels for Hopper, one for small and one for large units, {merged}"
    return f"spans in one Triton kernel, {merged}"


def _store_words(config: StoreConfig, free_bytes: int) -> str:
    """Where pages go that do not fit on the device, and how to keep more."""
    policy = f"{config.policy} policy, fetch {config.fetch.value}, preload {config.preload}"
    if config.host_bytes == 0:
        return (
            f"pages on the device only. To keep more: --host-gb ({gigabytes(free_bytes)} are free) "
            f"and --disk-dir (at most --disk-gb {config.disk_gb:g}); --remote shares pages with "
            f"other processes. {policy}"
        )
    places = [f"{gigabytes(config.host_bytes)} of host memory"]
    if config.disk_dir:
        places.append(f"disk {config.disk_dir}")
    if config.remote:
        places.append(config.remote)
    return f"{', '.join(places)}: {policy}"


def find_warnings(cpu: DeviceFacts, default: ModelRecord, free_disk_bytes: int) -> list[str]:
    """What a user should know before the first run."""
    warnings = []
    if default.state is not ModelState.READY and free_disk_bytes < CONVERSION_BYTES:
        warnings.append(
            f"{cache_dir()} has {gigabytes(free_disk_bytes)} free; {default.name} needs "
            f"{gigabytes(CONVERSION_BYTES)} while it is converted (MAINSTEM_CACHE moves the cache)"
        )
    if default.state is ModelState.DAMAGED:
        warnings.append(f"the cached {default.name} is damaged and will be rebuilt at the next use")
    if 0 < cpu.free_bytes < 2_000_000_000:
        warnings.append(f"only {gigabytes(cpu.free_bytes)} of memory is available")
    return warnings


def main(argv: list[str]) -> int:
    parser = Parser("mainstem doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model", help="also show the memory that this model needs, for each number of ranks"
    )
    args = parser.parse_args(argv)
    found = report()
    if args.model is not None:
        found["model"] = describe_model(args.model, describe_devices()[0])
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def describe_model(name: str, device: DeviceFacts) -> Section:
    """Sizes from a model's config.json, and what fits on devices like this one; raises
    UnsupportedModel for a model that cannot be run."""
    dtype, keeps = DType.AUTO, ON_CPU
    if device.kind == "cuda":
        has_fp8 = any(int(feature.removeprefix("sm_")) >= FP8_SM for feature in device.features)
        keeps = ON_GPU_WITH_FP8 if has_fp8 else ON_GPU
    elif not device.has_fast_bf16:
        dtype = DType.FP32
    with config_folder(name) as folder:
        size, ranks = kv_size(folder, dtype), rank_sizes(folder, dtype, keeps)
    found = {"name": name} | asdict(size) | {"dtype": size.dtype.value}
    rows = [asdict(each) | fitting(each, size, device) for each in ranks]
    return found | {"ranks": rows}


def fitting(rank: RankSize, size: KvSize, device: DeviceFacts) -> dict[str, int | None]:
    """About how many tokens of KV, tokens in windows, and states of recurrent layers fit on a card
    beside a rank's weights; None on a CPU, where all ranks share the memory."""
    if device.kind == "cpu":
        return {"kv_tokens": None, "window_tokens": None, "states": None}
    cache, per_token, per_state = CacheConfig(), rank.kv_bytes_per_token, rank.bytes_per_state
    room = max(0, int(device.memory_bytes * GPU_SHARE) - GPU_RESERVE - rank.weight_bytes)
    states = cache.num_states(room, per_token, per_state, None)
    left = room - states * per_state
    if left < per_token:
        return {"kv_tokens": 0, "window_tokens": 0, "states": 0}
    costs = KvCosts(per_token, rank.windowed_kv_bytes, size.window)
    found = divide(costs, cache, left, size.max_positions, GPU_CHUNK_TOKENS)
    return {
        "kv_tokens": found.num_pages * cache.page_size,
        "window_tokens": found.num_parts * cache.page_size,
        "states": states,
    }


def _model_lines(model: Section) -> list[tuple[str, str]]:
    kept, unread = model["bytes_per_token"], model["unread_bytes_per_token"]
    windowed = model["windowed_bytes_per_token"]
    assert isinstance(kept, int)
    assert isinstance(unread, int)
    assert isinstance(windowed, int)
    lines = [
        ("model", f"{model['name']}, {model['max_positions']:,} positions"),
        ("  weights", str(model["weights"])),
        ("  KV", f"{kept:,} bytes a token in {model['dtype']}"),
    ]
    if rounded := model["fp8_bytes_per_token"]:
        lines.append(("  KV in fp8", f"{rounded:,} bytes a token, with --kv-dtype fp8"))
    if windowed:
        words = (
            f"{windowed / kept:.0%} of that is in layers with a window, and is kept for the last "
            f"{model['window']:,} tokens of each answer in progress and of kept prompts"
        )
        lines.append(("  windows", words))
    if unread:
        words = (
            f"in the longest context, {unread / kept:.0%} of that is outside the sliding windows, "
            "but is kept, because all layers have a window"
        )
        lines.append(("  windows", words))
    if state := model["bytes_per_state"]:
        words = f"{state:,} bytes each: one for each answer in progress, others for later requests"
        lines.append(("  states", words))
    ranks = model["ranks"]
    assert isinstance(ranks, list)
    for words in ranks[0]["unpacked"]:
        reason = "this device has no kernel for them"
        lines.append(("  unpacked", f"{words} become {model['dtype']} when loaded: {reason}"))
    return lines + [("  ranks", _rank_words(row)) for row in ranks]


def _rank_words(row: Section) -> str:
    """Describe what one number of ranks (--tensor-parallel) needs."""
    weights, kv, tokens = row["weight_bytes"], row["kv_bytes_per_token"], row["kv_tokens"]
    in_windows = f" and {row['window_tokens']:,} in windows" if row["window_tokens"] else ""
    stored = row["stored_bytes"]
    assert isinstance(weights, int)
    assert isinstance(stored, int)
    more = "" if weights == stored else f" ({gigabytes(stored)} in the checkpoint)"
    words = f"{row['num_ranks']}: {gigabytes(weights)} of weights{more}, "
    words += f"{kv:,} bytes of KV a token, each"
    if tokens is None:
        return words
    fit = f"{tokens:,} tokens{in_windows} fit" if tokens else "does not fit"
    if tokens and (states := row["states"]):
        per_state = row["bytes_per_state"]
        fit = f"{tokens:,} tokens and {states:,} states of {per_state:,} bytes fit"
    return f"{words}; {fit} on this GPU"


def as_text(found: dict[str, object]) -> str:
    """The report for people: facts first, then what will be used and why."""
    devices, libraries, cache, use = (found[key] for key in ("devices", "torch", "cache", "use"))
    assert isinstance(devices, list)
    assert isinstance(libraries, dict)
    assert isinstance(cache, dict)
    assert isinstance(use, dict)
    lines = [("mainstem", f"{found['mainstem']}, Python {found['python']}, {found['system']}")]
    for device in devices:
        units = "cores" if device["kind"] == "cpu" else "SMs"
        flags = " ".join(device["features"]) or "no relevant features"
        lines.append((device["kind"], f"{device['name']}, {device['num_units']} {units}, {flags}"))
        memory = f"{gigabytes(device['memory_bytes'])}, {gigabytes(device['free_bytes'])} available"
        lines.append(("  memory", memory))
    cuda = f"CUDA {libraries['cuda_version']}" if libraries["cuda_version"] else "CPU build"
    lines.append(("torch", f"{libraries['version']}, {cuda}, {libraries['num_threads']} threads"))
    lines.append(("triton", _triton_words(libraries)))
    lines.append(("cache", f"{cache['path']}, {gigabytes(cache['free_bytes'])} free on disk"))
    for model in cache["models"]:
        words = f"{model['name']}: {model['state']}, {gigabytes(model['bytes'])}, {model['origin']}"
        lines.append(("  model", words))
    lines.append(("", ""))
    lines.append(("will use", f"{use['device']} ({use['why_device']}), {use['threads']} threads"))
    lines.append(("  dtype", f"{use['dtype']}: {use['why_dtype']}"))
    lines.append(("  attention", str(use["attention"])))
    lines.append(("  store", str(use["store"])))
    model = found.get("model")
    if isinstance(model, dict):
        lines += _model_lines(model)
    warnings = found["warnings"]
    assert isinstance(warnings, list)
    lines += [("warning", str(warning)) for warning in warnings]
    return "\n".join(f"{name:<12}{words}".rstrip() for name, words in lines)


def _triton_words(libraries: Section) -> str:
    if libraries["triton_version"] is None:
        return "not installed"
    if libraries["can_compile_triton"]:
        return f"{libraries['triton_version']}, compiles for the GPU"
    return f"{libraries['triton_version']}, no GPU: interpreter only, for tests"


def _cache(models: list[ModelRecord], free_bytes: int) -> Section:
    """The cache folder, its free space, and all cached models, those of the hub included."""
    entries = [record.to_json() for record in models]
    return {"path": str(cache_dir()), "free_bytes": free_bytes, "models": entries}


def _existing(path: Path) -> Path:
    """The path, or its nearest ancestor that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
