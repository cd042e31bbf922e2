"""Runs the tests of kernels under Triton's interpreter, in another process."""

from pathlib import Path

from tests.kernels.interpreted import in_another_process, run_interpreted, short_and_slow

pytestmark = in_another_process

MODULES = [
    "test_span.py", "test_span_kinds.py", "test_merge_partials.py",
    "test_append.py", "test_rotate.py", "test_norms.py", "test_activations.py", "test_sample.py",
    "test_invariant.py",
    "test_transfer.py", "test_upload.py", "test_experts.py", "test_int4.py",
    "test_packed_experts.py", "test_fp8_few.py", "test_recurrent_triton.py",
    "test_recurrent_rows_triton.py", "test_rounded.py",
]  # fmt: skip


@short_and_slow
def test_kernels_pass_their_tests_under_the_interpreter(which: str) -> None:
    run_interpreted(Path(__file__).parent, MODULES, which)
