"""The decodes of `bench kernel-fp8`."""

from mainstem_bench.kernel_fp8 import MOST_KEYS, NUM_RANDOM, decode_cases
from mainstem_bench.workloads import kernel_cases


def test_random_steps_are_decodes_alone_and_follow_from_the_seed() -> None:
    cases, fixed = decode_cases(8), len(kernel_cases())
    assert cases[:fixed] == kernel_cases()
    assert len(cases) == fixed + NUM_RANDOM
    assert cases == decode_cases(8)
    assert cases[fixed:] != decode_cases(9)[fixed:]
    for case in cases[fixed:]:
        assert not any(run.is_causal and len(run.rows) > 1 for run in case.runs)
        assert sum(run.key_tokens for run in case.runs) * case.kv_heads <= MOST_KEYS
