"""Compiles every kernel for a target, without its card.

`python -m tests.kernels.aot_compile TARGET`

Prints one line per kernel. A process of its own, since the other kernel tests need the interpreter.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mainstem.kernels.append import _rope_append_kernel
from mainstem.kernels.merge import _merge_kernel
from mainstem.kernels.rotate import _rerotate_kernel
from mainstem.kernels.span import _span_kernel
from mainstem.kernels.tuning import FALLBACK, HOPPER, Tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INT_POINTERS = ("plan_ptr", "barrier_ptr", "positions_ptr", "source_ptr", "target_ptr", "shift_ptr")
FLOAT_POINTERS = (
    "lse_ptr", "partial_ptr", "partial_lse_ptr", "inv_freq_ptr", "lse_a_ptr", "lse_b_ptr",
)  # fmt: skip
HEAD = {"HEAD_DIM": 128, "DIM": 128}


def _type_of(name: str) -> str:
    if name in ("k_rows", "v_rows"):
        return "tensordesc<bf16[64, 128]>"
    if name == "scale":
        return "fp32"
    if not name.endswith("_ptr"):
        return "i32"
    if name in INT_POINTERS:
        return "*i32"
    if name == "slots_ptr":
        return "*i64"
    return "*fp32" if name in FLOAT_POINTERS else "*bf16"


def _span_constants(tiles: Tiles) -> dict[str, object]:
    return {
        **HEAD, "KV_HEADS": 8, "GROUP": 4, "PAGE_SIZE": 16, "FOLD": 4, "SMALL_Q": 16,
        "SMALL_STAGES": tiles.small_stages, "LARGE_Q": tiles.large_q, "LARGE_K": tiles.large_k,
        "LARGE_STAGES": tiles.large_stages, "PER_SM": tiles.programs_per_sm, "IS_ORDERED": False,
        "HAS_LSE": True, "WIDE": True, "UPCAST": False, "PHASE": 0,
    }  # fmt: skip


def compile_all(target: str) -> None:
    tiles = HOPPER if target == "sm_90" else FALLBACK
    half = {"HALF": 64, "HALF_LANES": 64, "PAGE_SIZE": 16}
    heads = {"HEADS": 32, "HEAD_LANES": 32, "KV_HEADS": 8, "KV_LANES": 8}
    for kernel, constants in (
        (_span_kernel, _span_constants(tiles)),
        (_rope_append_kernel, {**HEAD, **half, **heads}),
        (_rerotate_kernel, {**HEAD, **half}),
        (_merge_kernel, {**HEAD, "TILE_ROWS": 16}),
    ):
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={n: "constexpr" if n in constants else _type_of(n) for n in names},
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if n.endswith("_ptr") or n.startswith("stride_")
            },
        )
        options = {"num_warps": tiles.num_warps if kernel is _span_kernel else 4}
        compiled = triton.compile(source, target=TARGETS[target], options=options)
        print(target, kernel.__name__, compiled.metadata.shared, flush=True)


if __name__ == "__main__":
    compile_all(sys.argv[1])
