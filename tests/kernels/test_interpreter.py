"""Runs the tests of kernels and of the GPU runner under Triton's interpreter, in another
process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    "test_span.py", "test_span_kinds.py", "test_merge.py", "test_merge_partials.py",
    "test_append.py", "test_rotate.py", "test_norms.py", "test_activations.py", "test_sample.py",
    "test_invariant.py",
    "test_transfer.py", "test_upload.py", "test_experts.py", "test_int4.py",
    "test_packed_experts.py",
]  # fmt: skip


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="the interpreter is on: these tests run in this process",
)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_pass_their_tests_under_the_interpreter(which: str) -> None:
    paths = [
        *(f"tests/kernels/{name}" for name in MODULES),
        "tests/runner/test_gpu.py",
        "tests/runner/test_gpu_recipes.py",
        "tests/runner/test_gpu_packed.py",
        "tests/runner/test_gpu_linears.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, *paths],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
