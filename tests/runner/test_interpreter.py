"""Runs the tests of the GPU runner under Triton's interpreter, in another process."""

from pathlib import Path

from tests.kernels.interpreted import in_another_process, run_interpreted, short_and_slow

pytestmark = in_another_process

MODULES = [
    "test_gpu.py",
    "test_gpu_deterministic.py",
    "test_gpu_recipes.py",
    "test_gpu_packed.py",
    "test_gpu_linears.py",
    "test_gpu_weights.py",
    "test_rounded_gpu.py",
]


@short_and_slow
def test_the_gpu_runner_passes_its_tests_under_the_interpreter(which: str) -> None:
    run_interpreted(Path(__file__).parent, MODULES, which)
