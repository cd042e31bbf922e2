"""Every kernel compiles for NVIDIA Ampere and Hopper and for AMD, without a card."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.torch
@pytest.mark.timeout(1800)  # of all kernels, on a busy core
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
@pytest.mark.parametrize(
    ("target", "which"),
    [
        ("sm_90", ()),
        *(
            pytest.param(name, ("--all",), marks=pytest.mark.slow)
            for name in ("sm_90", "sm_80", "gfx942", "layouts")
        ),
    ],
)
def test_every_kernel_compiles_for_the_target(target: str, which: tuple[str, ...]) -> None:
    """The short run leaves out most kernels that were compiled before (see aot_compile.py)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot_compile", target, *which],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("compiled all\n")
