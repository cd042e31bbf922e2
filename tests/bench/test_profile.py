"""Shares of the device's time, from traces made by hand."""

import json
from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench.profile import (
    ProfileWindow,
    TracedWork,
    busy_us,
    kind_of,
    read_trace,
    self_us,
    shares_of,
)


def work(name: str, begin: float, duration: float, stream: int = 7) -> TracedWork:
    return TracedWork(name, (0, stream), begin, duration)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "gemm"),
        ("_span_kernel", "attention"),
        ("_merge_kernel", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_rope_append_kernel", "norm and elementwise"),
        ("_norm_residual_kernel", "norm and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "norm and elementwise"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::CatArrayBatchedCopy<...>", "copies"),
        ("_survey_kernel", "sampling"),
        ("_rerotate_kernel", "norm and elementwise"),
        ("aten::addmm", "gemm"),
        ("aten::add", "norm and elementwise"),
        ("mystery", "other"),
    ],
)
def test_the_name_of_a_kernel_decides_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_time_of_an_operation_excludes_operations_inside_it() -> None:
    works = [work("outer", 0, 10), work("inner", 2, 3), work("innermost", 3, 1), work("next", 8, 2)]
    assert self_us(works) == [("outer", 5), ("inner", 2), ("innermost", 1), ("next", 2)]


def test_a_kernel_counts_only_from_the_end_of_the_kernel_before_it() -> None:
    works = [work("span", 0, 10), work("merge", 7, 5), work("next", 12, 1)]
    assert self_us(works) == [("span", 10), ("merge", 2), ("next", 1)]


def test_busy_time_on_two_streams_counts_once() -> None:
    works = [work("a", 0, 4), work("b", 2, 4, stream=8), work("c", 10, 1)]
    assert busy_us(works) == 7


def test_shares_and_idle_time_are_reported() -> None:
    works = [work("nvjet", 0, 6), work("_span_kernel", 6, 2), work("nvjet", 9, 1)]
    assert shares_of(works) == {"gemm": 0.7, "attention": 0.2, "idle": 0.1}
    assert shares_of([]) == {"idle": 1.0}


def test_host_events_are_left_out_of_a_trace_with_kernels(tmp_path: Path) -> None:
    event = {"ph": "X", "pid": 0, "tid": 7}
    events = [
        event | {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50},
        event | {"cat": "kernel", "name": "nvjet", "ts": 20, "dur": 5},
        event | {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10, "dur": 1},
        {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 3, "pid": 0, "tid": 7},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert [(w.name, w.begin_us) for w in read_trace(path)] == [("Memcpy HtoD", 10), ("nvjet", 20)]


def test_a_job_too_short_to_be_profiled_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too short"):
        ProfileWindow(tmp_path / "trace.json", 3).close()
