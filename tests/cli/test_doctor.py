"""The report of `mainstem doctor` about this machine and about simulated ones."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mainstem.checkpoints.hub import ModelRecord, ModelState
from mainstem.cli import doctor, models
from mainstem.core.config import DType, StoreConfig
from mainstem.core.tables import gigabytes
from mainstem.models.weights import compute_dtype
from mainstem.runner.kv_size import KvSize
from mainstem.runner.machine import DeviceFacts, TorchFacts, describe_cpu
from mainstem.runner.rank_sizes import RankSize

CPU = DeviceFacts("cpu", "Neoverse-N1", 2, 24 << 30, 20 << 30, ("asimddp",), has_fast_bf16=False)
GPU = DeviceFacts("cuda", "H200", 132, 140 << 30, 139 << 30, ("sm_90",), has_fast_bf16=True)
TORCH = TorchFacts("2.13.0", 2, None, "3.9.0", can_compile_triton=False)
ABSENT = ModelRecord("smollm2", None, 0, ModelState.ABSENT, "embedded")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "not" / "there"))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "places"),
    [
        (StoreConfig(host_gb=1.0), "1.00 GB of host memory: "),
        (StoreConfig(host_gb=1.0, disk_dir="d"), "1.00 GB of host memory, disk d: "),
        (StoreConfig(host_gb=1.0, remote="redis://h"), "1.00 GB of host memory, redis://h: "),
    ],
)
def test_only_configured_tiers_are_listed(config: StoreConfig, places: str) -> None:
    assert doctor._store_words(config, 0).startswith(places)


def test_the_report_is_json_and_complete(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(
        "mainstem python system devices torch cache use warnings".split()  # noqa: SIM905
    )
    assert found["devices"][-1]["kind"] == "cpu"
    assert found["devices"][-1]["num_units"] == len(os.sched_getaffinity(0))
    assert 0 < found["devices"][-1]["free_bytes"] <= found["devices"][-1]["memory_bytes"]
    assert found["torch"]["num_threads"] >= 1
    assert found["cache"]["free_bytes"] > 0
    assert found["cache"]["models"][0]["state"] == "not fetched"
    assert {"device", "dtype", "why_dtype", "attention", "threads"} <= set(found["use"])


def test_the_text_has_facts_and_what_will_be_used(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "triton", "memory", "smollm2: not fetched", "will use", "attention"):
        assert word in text
    assert str(empty_cache) in text


def test_doctor_creates_no_file(empty_cache: Path) -> None:
    doctor.report()
    assert list(empty_cache.iterdir()) == []


def test_a_cpu_without_bf16_upcasts_and_says_why() -> None:
    use = doctor.plan_use([CPU], TORCH)
    assert (use["device"], use["dtype"]) == ("cpu", "float32")
    assert "no bf16" in str(use["why_dtype"])
    assert "270" in str(use["why_dtype"])


def test_a_cpu_with_bf16_keeps_the_checkpoint() -> None:
    use = doctor.plan_use([replace(CPU, has_fast_bf16=True)], TORCH)
    assert use["dtype"] == "the checkpoint's own"


@pytest.mark.parametrize(
    ("capability", "has_triton", "words"),
    [
        ("sm_90", True, "Gluon kernels for Hopper"),
        ("sm_80", True, "one Triton kernel"),
        ("sm_100", True, "one Triton kernel"),
        ("sm_90", False, "not installed"),
    ],
)
def test_a_gpu_is_used_with_the_kernels_that_are_made_for_it(
    capability: str, has_triton: bool, words: str
) -> None:
    gpu = replace(GPU, features=(capability,))
    use = doctor.plan_use([gpu, CPU], replace(TORCH, can_compile_triton=has_triton))
    assert use["device"] == "cuda"
    assert words in str(use["attention"])


def test_a_gpu_without_fast_bf16_keeps_the_checkpoint_and_says_what_is_faster() -> None:
    gpu = replace(GPU, name="T4", features=("sm_75",), has_fast_bf16=False)
    use = doctor.plan_use([gpu, CPU], replace(TORCH, can_compile_triton=True))
    assert use["dtype"] == "the checkpoint's own"
    assert "--dtype float16" in str(use["why_dtype"])


def test_this_cpu_loads_the_dtype_that_doctor_names() -> None:
    use = doctor.plan_use([describe_cpu()], TORCH)
    loaded = compute_dtype(DType.AUTO, DType.BF16)
    assert use["dtype"] == ("float32" if loaded == torch.float32 else "the checkpoint's own")


@pytest.mark.parametrize(
    ("cpu", "default", "free_bytes", "words"),
    [
        (CPU, ABSENT, 1 << 20, "MAINSTEM_CACHE"),
        (CPU, replace(ABSENT, state=ModelState.DAMAGED), 1 << 40, "rebuilt"),
        (replace(CPU, free_bytes=1 << 29), ABSENT, 1 << 40, "memory"),
    ],
)
def test_expected_problems_are_warnings(
    cpu: DeviceFacts, default: ModelRecord, free_bytes: int, words: str
) -> None:
    (warning,) = doctor.find_warnings(cpu, default, free_bytes)
    assert words in warning


def test_a_healthy_machine_has_no_warnings() -> None:
    assert doctor.find_warnings(CPU, ABSENT, 1 << 40) == []


def test_a_models_size_of_keys_and_values_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = replace(CPU, has_fast_bf16=True)
    monkeypatch.setattr(doctor, "describe_devices", lambda: [device])
    config = {
        "architectures": ["MistralForCausalLM"], "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 64,
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert doctor.main(["--model", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "256 bytes a token in bfloat16" in told
    assert "75% of that is outside the sliding windows" in told
    assert "  ranks     2: " in told
    assert "128 bytes of KV a token, each" in told
    assert "weights   bfloat16" in told
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert doctor.main(["--model", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "weights   AWQ, 4 bits, groups of 32, zero points" in told
    assert "unpacked  products in 4 bits, groups of 32, zero points become bfloat16 when" in told
    device = CPU
    assert doctor.main(["--model", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "512 bytes a token in float32" in told
    assert "become float32 when loaded: this device has no kernel for them" in told
    held, stored = 4 * (2 * 36864 + 2 * 6400), round(2 * 36864 * (1 / 2 + 3 / 32)) + 4 * 6400
    sizes = f"{gigabytes(held)} of weights ({gigabytes(stored)} in the checkpoint)"
    assert f"  ranks     1: {sizes}" in told
    device = GPU
    assert doctor.main(["--model", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "unpacked" not in told
    assert "in the checkpoint" not in told


def test_ranks_that_fit_and_ranks_that_do_not_are_shown() -> None:
    """A card of 140 GiB: pages get 0.9 of it, minus 2 GiB of buffers, minus the weights."""
    gib = 1 << 30
    size = KvSize(1 << 20, 0, DType.BF16, 32_768, 0, None, 0, "bfloat16")
    large, half = RankSize(1, 130 * gib, 1 << 20, 0), RankSize(2, 65 * gib, 1 << 19, 0)
    nothing = {"kv_tokens": 0, "window_tokens": 0, "states": 0}
    assert doctor.fitting(large, size, GPU) == nothing
    whole = (126 - 2 - 65) * gib // (1 << 19)
    assert doctor.fitting(half, size, GPU) == nothing | {"kv_tokens": whole}
    assert doctor.fitting(half, size, CPU) == dict.fromkeys(nothing)
    windowed = replace(size, windowed_bytes_per_token=3 << 18, window=1024)
    found = doctor.fitting(replace(half, windowed_kv_bytes=3 << 17), windowed, GPU)
    kv_tokens, window_tokens = found["kv_tokens"], found["window_tokens"]
    assert kv_tokens is not None
    assert window_tokens is not None
    used = kv_tokens * (1 << 17) + window_tokens * (3 << 17)
    assert kv_tokens > 2.5 * whole
    assert 0.99 * whole * (1 << 19) < used <= whole * (1 << 19)


def test_states_and_pages_divide_one_budget() -> None:
    """Beside 100 GB of weights, pages and states of 63 MB fill what is left, but one or two
    states."""
    rank = RankSize(1, 100 * 10**9, 20480, 0, bytes_per_state=63 * 10**6)
    size = KvSize(20480, 63 * 10**6, DType.BF16, 32_768, 0, None, 0, "bfloat16")
    found = doctor.fitting(rank, size, GPU)
    tokens, states = found["kv_tokens"], found["states"]
    assert tokens is not None
    assert states is not None
    room = int(GPU.memory_bytes * 0.9) - doctor.GPU_RESERVE - rank.weight_bytes
    taken = tokens * 20480 + states * 63 * 10**6
    assert room - 16 * 20480 < taken <= room
    # half of the states are for sequences of 2,048 tokens
    assert tokens / 2048 == pytest.approx(states / 2, abs=5)


def test_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--families"]) == 0
    told = capsys.readouterr().out
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        assert name in told
    assert "Supported: GPTQ" in told
    assert models.main(["--families", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name", "architectures", "notes"} == set(entries[0])
