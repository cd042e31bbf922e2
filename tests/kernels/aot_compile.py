"""Compiles every kernel for a target, without its card.

    python -m tests.kernels.aot_compile TARGET           those that are not in the record
    python -m tests.kernels.aot_compile TARGET --all
    python -m tests.kernels.aot_compile TARGET --record  all, and writes the record

TARGET may also be `layouts`: Hopper's kernels with more layouts of heads.

The record (aot_record.txt) has a hash of each kernel that was compiled: of its source, of the
functions that it calls, its constants and the version of Triton. If one of them changes, the kernel
is compiled again. Of the kernels in the record, another 48th is compiled each day.

Prints one line per kernel. It runs in a separate process, since the other kernel tests need the
interpreter.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from inspect import getattr_static
from pathlib import Path
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from mainstem.kernels.attention.hopper import large as hopper_large
from mainstem.kernels.attention.hopper import small as hopper_small
from mainstem.kernels.attention.hopper.codes import SCALE_LANES, SCALES, codes_of
from mainstem.kernels.attention.hopper.rows import tail_of
from mainstem.kernels.attention.hopper.small_reads import rows_of_box
from mainstem.kernels.attention.shape import Shape
from mainstem.kernels.attention.triton.merge_partials import _merge_partials_kernel
from mainstem.kernels.attention.triton.open_pages import _open_pages_kernel
from mainstem.kernels.attention.triton.sinks import _sinks_kernel
from mainstem.kernels.attention.triton.span import _span_kernel
from mainstem.kernels.attention.tuning import (
    FALLBACK,
    FALLBACK_VERY_WIDE_HEADS,
    FALLBACK_WIDE_HEADS,
    HOPPER,
    HOPPER_VERY_WIDE_HEADS,
    HOPPER_WIDE_HEADS,
    SPLIT_TILES,
    Tiles,
    for_rounded_pages,
)
from mainstem.kernels.dense.activations import Act, _activation_kernel
from mainstem.kernels.dense.fp8_few import TILES as FEW_TILES
from mainstem.kernels.dense.fp8_few import _few_rows_kernel
from mainstem.kernels.dense.head_norms import (
    _joint_norm_kernel,
    _joint_squares_kernel,
    _norm_heads_kernel,
)
from mainstem.kernels.dense.int4 import TILES as INT4_TILES
from mainstem.kernels.dense.int4 import _dequantize_kernel, _product_kernel
from mainstem.kernels.dense.invariant import _matmul_kernel
from mainstem.kernels.dense.logits import _scale_logits_kernel
from mainstem.kernels.dense.norms import _norm_kernel
from mainstem.kernels.dense.rows import _quantize_kernel
from mainstem.kernels.experts import few as few_experts
from mainstem.kernels.experts import hopper as hopper_experts
from mainstem.kernels.experts.activate import _gated_rows_kernel
from mainstem.kernels.experts.combine import _combine_kernel
from mainstem.kernels.experts.packed import FEW as PACKED_FEW
from mainstem.kernels.experts.packed import MANY as PACKED_MANY
from mainstem.kernels.experts.packed import _packed_down_kernel, _packed_gate_up_kernel
from mainstem.kernels.experts.products import FEW, MANY, ExpertTiles, _down_kernel, _gate_up_kernel
from mainstem.kernels.experts.route import _place_kernel, _route_kernel, _router_kernel
from mainstem.kernels.hopper import tiles_of
from mainstem.kernels.memory.append import _rope_append_kernel
from mainstem.kernels.memory.copy import _copy_slots_kernel
from mainstem.kernels.memory.expand import _expand_pages_kernel
from mainstem.kernels.memory.rotate import _rerotate_kernel
from mainstem.kernels.memory.round import _round_pages_kernel
from mainstem.kernels.memory.transfer import _spread_kernel
from mainstem.kernels.memory.upload import _move_kernel
from mainstem.kernels.recurrent.blocks import lanes_of, tile_options
from mainstem.kernels.recurrent.conv import _convolve_decode_kernel, _convolve_kernel
from mainstem.kernels.recurrent.delta import (
    _delta_decode_kernel,
    _delta_pass_kernel,
    _delta_serial_kernel,
    _delta_solve_kernel,
    pass_columns,
    pass_options_of,
    solve_options_of,
)
from mainstem.kernels.recurrent.gated_norm import _gated_norm_kernel
from mainstem.kernels.recurrent.rows import SIBLINGS
from mainstem.kernels.recurrent.scan import (
    _scan_decode_kernel,
    _scan_kernel,
    _scan_serial_kernel,
    scan_columns,
)
from mainstem.kernels.recurrent.segments import TILE
from mainstem.kernels.recurrent.siblings import (
    BASE_OPTIONS,
    ROW_OPTIONS,
    ROWS,
    _sibling_bases_kernel,
    _sibling_rows_kernel,
    base_columns,
)
from mainstem.kernels.sampling.sample import (
    _argmax_kernel,
    _collect_kernel,
    _draw_kernel,
    _finish_kernel,
    _survey_kernel,
    _tops_kernel,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LAYOUTS = "layouts"
RECORD = Path(__file__).with_name("aot_record.txt")
DRAWN_OF = 48
TARGETS[LAYOUTS] = TARGETS["sm_90"]
INT_POINTERS = (
    "plan_ptr", "positions_ptr", "source_ptr", "target_ptr", "shift_ptr", "tickets_ptr",
    "arrived_ptr", "top_k_ptr", "few_ids_ptr", "top_ids_ptr", "ids_ptr", "counts_ptr",
    "sorted_ptr", "sorted_experts_ptr", "ends_ptr", "tile_experts_ptr", "tile_starts_ptr",
    "tile_ends_ptr", "tile_count_ptr", "experts_ptr", "factors_ptr", "starts_ptr", "writes_ptr",
    "seq_segments_ptr", "reads_ptr", "tile_writes_ptr", "seq_tiles_ptr", "row_slots_ptr",
    "first_rows_ptr", "members_ptr", "group_starts_ptr", "writers_ptr", "sizes_ptr",
)  # fmt: skip
LONG_POINTERS = ("slots_ptr", "best_ptr", "survey_ptr", "keys_ptr")
FLOAT_POINTERS = (
    "lse_ptr", "partial_ptr", "partial_lse_ptr", "inv_freq_ptr", "lse_a_ptr", "lse_b_ptr",
    "scales_ptr", "tops_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr",
    "weights_ptr", "shared_weights_ptr", "sinks_ptr", "a_log_ptr", "dt_bias_ptr", "d_ptr",
    "matrix_ptr", "choice_bias_ptr", "sums_ptr", "of_base_ptr", "found_ptr",
    "gates_ptr", "norms_ptr", "k_shift_ptr",
)  # fmt: skip
HEAD = {"HEAD_DIM": 128, "DIM": 128}
OF_ROWS = (  # arguments that are None in steps without rows
    "row_conv_ptr", "row_slots_ptr", "counts_ptr", "first_rows_ptr", "writers_ptr",
    "sizes_ptr", "keys_ptr", "values_ptr", "sums_ptr",
)  # fmt: skip
SHARED_BYTES = {True: 227 << 10, False: 99 << 10}  # on Hopper, and on consumer cards


@dataclass(frozen=True)
class Job:
    """A kernel with its constants. `types` are those that do not follow from arguments' names."""

    kernel: triton.JITFunction
    constants: Mapping[str, object]
    types: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    source: type[ASTSource] = ASTSource
    most_shared: int | None = None  # limit of shared memory in bytes


def _type_of(name: str) -> str:
    if name in ("k_rows", "v_rows"):
        return "tensordesc<bf16[64, 128]>"
    if name in ("scale", "floor", "eps", "least", "most"):
        return "fp32"
    if not name.endswith("_ptr"):
        return "i32"
    if name in INT_POINTERS:
        return "*i32"
    if name in LONG_POINTERS:
        return "*i64"
    return "*fp32" if name in FLOAT_POINTERS else "*bf16"


def _span_constants(tiles: Tiles, head_dim: int = 128) -> dict[str, object]:
    return {
        "HEAD_DIM": head_dim, "DIM": head_dim, "KV_HEADS": 8, "GROUP": 4, "PAGE_SIZE": 16,
        "FOLD": 4, "SMALL_Q": 16,
        "SMALL_STAGES": tiles.small_stages, "LARGE_Q": tiles.large_q, "LARGE_K": tiles.large_k,
        "LARGE_STAGES": tiles.large_stages, "PER_SM": tiles.programs_per_sm,
        "HAS_LSE": True, "HAS_WINDOW": False, "SOFTCAP": 0.0, "WIDE": True, "UPCAST": False,
        "ROUNDED": False, "BEFORE_OWN_PAGE": False, **_nothing("k_scales_ptr", "v_scales_ptr"),
        "OVERLAPS": tiles is not FALLBACK,
    }  # fmt: skip


@dataclass(frozen=True)
class HopperShape:
    """The constants that Hopper's kernels are compiled with."""

    head_dim: int = 128
    page_size: int = 16
    group: int = 4
    kv_heads: int = 8
    has_window: bool = False
    softcap: float = 0.0
    before_own_page: bool = False
    is_rounded: bool = False  # pages in fp8


HOPPER_SHAPES = (
    HopperShape(),
    HopperShape(64, 32, 32),
    HopperShape(80, 32, 13, 1, has_window=True),
    HopperShape(96, 64),
    HopperShape(256, 16, 2, has_window=True, softcap=50.0),
    HopperShape(before_own_page=True),
    HopperShape(256, 16, 2, has_window=True, softcap=50.0, before_own_page=True),
    HopperShape(before_own_page=True, is_rounded=True),
    HopperShape(64, 32, 8, 2, has_window=True, before_own_page=True, is_rounded=True),
)
MORE_SHAPES = (
    HopperShape(128, 64, has_window=True),
    HopperShape(128, 16, 8, 2),
    HopperShape(128, 16, 8, 1, has_window=True, softcap=50.0),
    HopperShape(64, 16, 71, 1),
    HopperShape(80, 16, 1, 32),
    HopperShape(256, 64, 12, 1),
    HopperShape(256, 16, 8, 2, has_window=True, softcap=50.0),
    HopperShape(64, 16, 8, has_window=True, before_own_page=True),
    HopperShape(80, 32, 13, 1, has_window=True, before_own_page=True),
    HopperShape(96, 64, before_own_page=True),
    HopperShape(128, 64, 8, 1, softcap=50.0, before_own_page=True, is_rounded=True),
    HopperShape(64, 16, 16, 1, before_own_page=True, is_rounded=True),
)


def _hopper_jobs(shapes: Sequence[HopperShape]) -> Iterator[Job]:
    for shape in shapes:
        tiles = SPLIT_TILES[shape.head_dim]
        if shape.is_rounded:
            tiles = for_rounded_pages(tiles)
        cut = Shape(shape.group, shape.kv_heads, shape.page_size, 264, tiles)
        constants: dict[str, object] = {
            "KV_HEADS": shape.kv_heads, "GROUP": shape.group, "HEAD_DIM": shape.head_dim,
            "PAGE_SIZE": shape.page_size, "HAS_LSE": True, "HAS_WINDOW": shape.has_window,
            "SOFTCAP": shape.softcap, "BEFORE_OWN_PAGE": shape.before_own_page,
            "ROUNDED": shape.is_rounded,
        }  # fmt: skip
        own: dict[str, object] = {"TILE_K": tiles.large_k, "STAGES": tiles.large_stages}
        options = {
            "num_warps": hopper_large.NUM_WARPS,
            "maxnreg": hopper_large.max_registers(is_rounded=shape.is_rounded),
        }
        yield _gluon_job(
            hopper_large._large_units_kernel, constants | own, shape.page_size, options, 227 << 10
        )
        options = {
            "num_warps": hopper_small.NUM_WARPS,
            "maxnreg": hopper_small.max_registers(tiles.programs_per_sm),
        }
        for is_first in (False, True) if shape == HopperShape() else (False,):
            own = {"FOLD": cut.fold, "SPLITS": cut.splits, "STAGES": tiles.small_stages,
                   "IS_FIRST": is_first}  # fmt: skip
            yield _gluon_job(
                hopper_small._small_units_kernel,
                constants | own,
                rows_of_box(cut.fold, shape.page_size),
                options,
                (228 << 10) // tiles.programs_per_sm - 1024,
            )
    for head_dim in {shape.head_dim for shape in shapes}:
        merge = {"HEADS": 32, "HEAD_DIM": head_dim, "DIM": 1 << (head_dim - 1).bit_length(),
                 "IS_ORDERED": False, "HAS_LSE": True, "IS_PACKED": True,
                 "LETS_IN": False, "OVERLAPS": True}  # fmt: skip
        yield Job(_merge_partials_kernel, merge, {"partial_ptr": "*fp16"})


def _gluon_job(
    kernel: triton.JITFunction,
    constants: Mapping[str, object],
    rows: int,
    options: dict[str, int],
    most_shared: int,
) -> Job:
    tail = tail_of(int(str(constants["HEAD_DIM"])))
    box = f"tensordesc<bf16[{rows}, 64],{tiles_of(64)!r}>"
    types = {"k_desc": box, "v_desc": box, "partial_ptr": "*fp16"}
    scales = ("k_scales_desc", "v_scales_desc")
    if constants["ROUNDED"]:
        panel = min(128, int(str(constants["HEAD_DIM"])))
        box = f"tensordesc<fp8e4nv[1, {rows}, {panel}],{codes_of(panel)!r}>"
        types |= {"k_desc": box, "v_desc": box}
        box = f"tensordesc<fp32[1, {SCALE_LANES.value}],{SCALES.value!r}>"
        types |= dict.fromkeys(scales, box)
    else:
        constants = {**constants, **_nothing(*scales)}
    if tail:
        box = f"tensordesc<bf16[{rows}, {tail}],{tiles_of(tail)!r}>"
        types |= {"k_tail_desc": box, "v_tail_desc": box}
    else:
        constants = {**constants, "k_tail_desc": None, "v_tail_desc": None}
    return Job(kernel, constants, types, options, GluonASTSource, most_shared)


def _attention_jobs(tiles: Tiles) -> Iterator[Job]:
    overlaps = {"OVERLAPS": tiles is HOPPER}
    half = {"HALF": 64, "HALF_LANES": 64, "PAGE_SIZE": 16}
    heads = {"HEADS": 32, "HEAD_LANES": 32, "KV_HEADS": 8, "KV_LANES": 8}
    yield Job(_span_kernel, _span_constants(tiles), options={"num_warps": tiles.num_warps})
    wide = HOPPER_WIDE_HEADS if tiles is HOPPER else FALLBACK_WIDE_HEADS
    box = "tensordesc<bf16[64, 256]>"
    yield Job(
        _span_kernel,
        {**_span_constants(wide, 256), "HAS_WINDOW": True, "SOFTCAP": 50.0, **overlaps},
        {"k_rows": box, "v_rows": box},
        {"num_warps": wide.num_warps},
        most_shared=SHARED_BYTES[tiles is HOPPER],
    )
    widest = HOPPER_VERY_WIDE_HEADS if tiles is HOPPER else FALLBACK_VERY_WIDE_HEADS
    box = f"tensordesc<bf16[{widest.small_k}, 512]>"
    fold = {"FOLD": widest.small_k // 16}
    yield Job(
        _span_kernel,
        {**_span_constants(widest, 512), **overlaps, **fold},
        {"k_rows": box, "v_rows": box},
        {"num_warps": widest.num_warps},
        most_shared=SHARED_BYTES[tiles is HOPPER],
    )
    yield Job(
        _norm_heads_kernel,
        {"HEADS": 16, "HEAD_LANES": 16, "HEAD_DIM": 256, "DIM": 256, **overlaps},
        {"gain_ptr": "*fp32"},
    )
    very_wide = {"HEAD_DIM": 512, "DIM": 512, "HALF": 256, "HALF_LANES": 256}
    yield Job(
        _rope_append_kernel,
        {**half, **heads, **overlaps, **very_wide, **_nothing("k_shift_ptr")},
        {"q_gain_ptr": "*fp32", "k_gain_ptr": "*fp32"},
        {"num_warps": 8},
    )
    merge = {"HEADS": 32, "HEAD_DIM": 512, "DIM": 512, "IS_ORDERED": False, "HAS_LSE": True}
    yield Job(
        _merge_partials_kernel,
        {**merge, **overlaps, "IS_PACKED": False, "LETS_IN": True},
        {},
        {"num_warps": 8},
    )
    if tiles is HOPPER:  # other cards with fp8 numbers take the same code
        yield from _rounded_jobs(tiles, overlaps)
    yield Job(_sinks_kernel, {**HEAD, **overlaps, "HEADS": 64, "TILE_ROWS": 16})
    for is_ordered in (False, True):
        merge = {"HEADS": 32, "IS_ORDERED": is_ordered, "HAS_LSE": True, "IS_PACKED": False,
                 "LETS_IN": False}  # fmt: skip
        yield Job(_merge_partials_kernel, {**HEAD, **merge, **overlaps})
    no_norms, no_shift = _nothing("q_gain_ptr", "k_gain_ptr"), _nothing("k_shift_ptr")
    plain = {**no_norms, **no_shift}
    yield Job(_rope_append_kernel, {**HEAD, **half, **heads, **overlaps, **no_shift})
    yield Job(_rope_append_kernel, {**HEAD, **half, **heads, **overlaps, **plain})
    yield Job(_rerotate_kernel, {**HEAD, **half})
    slots = {"KV_HEADS": 8, "HEAD_LANES": 8, "PAGE_SIZE": 16}
    yield Job(_copy_slots_kernel, {**HEAD, **slots}, {"from_ptr": "*i64", "to_ptr": "*i64"})
    still = {"HALF": 0, "HALF_LANES": 1, "PAGE_SIZE": 16, "inv_freq_ptr": None}
    yield Job(_rope_append_kernel, {**HEAD, **still, **heads, **overlaps, **plain})
    yield Job(_rerotate_kernel, {**HEAD, **still})


def _rounded_jobs(tiles: Tiles, overlaps: Mapping[str, object]) -> Iterator[Job]:
    """Attention and the other kernels of pages in fp8, and their scales."""
    scales = ("k_scales_ptr", "v_scales_ptr")
    constants = {**_span_constants(tiles), "ROUNDED": True, "BEFORE_OWN_PAGE": True}
    for name in scales:
        del constants[name]
    codes = {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv", **dict.fromkeys(scales, "*fp32")}
    box = "tensordesc<fp8e4nv[1, 64, 128]>"
    yield Job(
        _span_kernel,
        constants,
        {**codes, "k_rows": box, "v_rows": box},
        {"num_warps": tiles.num_warps},
        most_shared=SHARED_BYTES[tiles is HOPPER],
    )
    heads = {"KV_HEADS": 8, "PAGE_SIZE": 16, **HEAD, **overlaps}
    opened = {"GROUP": 4, "LANES": 4, "WINDOW": 0, "SOFTCAP": 0.0, "UPCAST": False}
    for count in (1, 4):
        opened |= {"TOKENS": count, "ROWS": 16}
        yield Job(
            _open_pages_kernel, {**heads, **opened}, {"positions_ptr": "*i64"}, {"num_warps": 1}
        )
    yield Job(_round_pages_kernel, heads, {"targets_ptr": "*i64", **codes})
    new = {"HEADS": 12, "HEAD_LANES": 16, "KV_HEADS": 2, "KV_LANES": 2, "PAGE_SIZE": 16}
    shifted = {"HALF": 64, "HALF_LANES": 64, **_nothing("q_gain_ptr", "k_gain_ptr")}
    for part in ({}, {"HALF": 16, "HALF_LANES": 16}):  # all dims are rotated, or some
        yield Job(_rope_append_kernel, {**HEAD, **overlaps, **new, **shifted, **part})
    sizes = {"KV_HEADS": 8, "COUNT": 16 * 128, "LARGEST": 3e38, "BLOCK": 2048}
    yield Job(_expand_pages_kernel, sizes, {"pages_ptr": "*i32", **codes})


def _norm_jobs(overlaps: Mapping[str, object], has_fp8: bool) -> Iterator[Job]:
    row = {"SIZE": 4096, "BLOCK": 4096, "GROUP": 4096, **overlaps}
    extras = _nothing("more_ptr", "after_gain_ptr", "after_bias_ptr")
    llama = {**row, **extras, "bias_ptr": None, "IS_LAYER": False, "HAS_SCALE": False}
    yield Job(_norm_kernel, {**llama, "scales_ptr": None})
    gemma = {"more_ptr": None, "after_bias_ptr": None, "bias_ptr": None, "scales_ptr": None}
    wide = {"gain_ptr": "*fp32", "after_gain_ptr": "*fp32"}
    yield Job(_norm_kernel, {**row, **gemma, "IS_LAYER": False, "HAS_SCALE": True}, wide)
    falcon = _nothing("after_gain_ptr", "after_bias_ptr", "scales_ptr")
    yield Job(_norm_kernel, {**row, **falcon, "IS_LAYER": True, "HAS_SCALE": False})
    joint = {"Q_SIZE": 4096, "Q_BLOCK": 4096, "K_SIZE": 1024, "K_BLOCK": 1024, **overlaps}
    yield Job(_joint_norm_kernel, {**joint, "IS_LAYER": False, "squares_ptr": None})
    of_ranks = {"squares_ptr": "*fp32"}
    yield Job(_joint_norm_kernel, {**joint, "IS_LAYER": False}, of_ranks)
    yield Job(_joint_squares_kernel, joint, of_ranks)
    for group in (4096, 128) if has_fp8 else ():
        yield Job(_norm_kernel, {**llama, "GROUP": group}, {"out_ptr": "*fp8e4nv"})
        yield Job(_quantize_kernel, {**row, "GROUP": group}, {"out_ptr": "*fp8e4nv"})


def _activation_jobs(overlaps: Mapping[str, object], has_fp8: bool) -> Iterator[Job]:
    row = {"SIZE": 4096, "BLOCK": 4096, "GROUP": 4096, **overlaps}
    for act in Act:
        is_gated = act in {Act.SILU, Act.GELU_TANH, Act.CLAMPED_SILU}
        kind = {"ACT": act.value, "IS_GATED": is_gated}
        yield Job(_activation_kernel, {**row, **kind, "scales_ptr": None})
    silu = {"ACT": Act.SILU.value, "IS_GATED": True}
    for group in (4096, 128) if has_fp8 else ():
        yield Job(_activation_kernel, {**row, **silu, "GROUP": group}, {"out_ptr": "*fp8e4nv"})
    floats = {"scale": "fp32", "cap": "fp32"}
    yield Job(_scale_logits_kernel, {"HAS_CAP": True, "BLOCK": 4096, **overlaps}, floats)


def _nothing(*names: str) -> dict[str, object]:
    """Optional arguments, which are not given."""
    return dict.fromkeys(names)


def _other_jobs(target: str) -> Iterator[Job]:
    overlaps = {"OVERLAPS": target == "sm_90"}
    has_fp8 = target == "sm_90"  # no float8_e4m3fn before sm_89, nor on gfx942
    yield from _norm_jobs(overlaps, has_fp8)
    yield from _activation_jobs(overlaps, has_fp8)
    ids = {"out_ptr": "*i64"}
    yield Job(_argmax_kernel, {"BLOCK": 4096}, ids)
    wide = {"logits_ptr": "*fp32", "few_ptr": "*fp32"}
    block, few = {"BLOCK": 2048}, {"FEW": 4096, "BLOCK": 2048}
    yield Job(_tops_kernel, block, {"logits_ptr": "*fp32"})
    yield Job(_draw_kernel, block, {**ids, "logits_ptr": "*fp32"})
    yield Job(_survey_kernel, block, {**ids, "logits_ptr": "*fp32"})
    yield Job(_collect_kernel, few, wide)
    finish = {"FEW": 4096, "BLOCK": 4096}
    yield Job(_finish_kernel, finish, {**ids, **wide}, {"num_warps": 16})
    tile = {"TILE_ROWS": 128, "TILE_COLUMNS": 128, "TILE_K": 64, "GROUP": 8, "IS_EVEN": True}
    yield Job(
        _matmul_kernel,
        {**tile, "HAS_BIAS": True, "UPCAST": False},
        options={"num_warps": 8, "num_stages": 2 if target == "gfx942" else 4},
    )


def _expert_jobs(target: str) -> Iterator[Job]:
    overlaps = {"OVERLAPS": target == "sm_90"}
    sizes = {"EXPERTS": 128, "LANES": 128, "TOP_K": 8, "BLOCK": 16, **overlaps}
    wide, positions = {"logits_ptr": "*fp32"}, {"positions_ptr": "*i32"}
    router = {"SPLITS_HERE": 8, "TILE": 64, "UPCAST": False, **overlaps}
    yield Job(_router_kernel, router, wide, {"num_warps": 4, "num_stages": 3})
    for is_whole in (False, True) if target == "sm_90" else (False,):
        parts = {"NUM_PARTS": 8 if is_whole else 1, "SLOTS": 8, "WIDTH": 129, "HAS_BIAS": True,
                 "HAS_GATE": True, "IS_NORMALIZED": is_whole, "IS_WHOLE": is_whole,
                 "IS_PLAIN": is_whole, "IS_SIGMOID": not is_whole,
                 "HAS_CHOICE_BIAS": not is_whole}  # fmt: skip
        yield Job(_route_kernel, {**sizes, **parts}, wide | positions)
    yield Job(_place_kernel, {**sizes, "CELLS": 128, "CHUNK": 64}, positions, {"num_warps": 8})
    block = {"BLOCK": 1024, "HAS_BIAS": True, **overlaps}
    shared = {"TOP_K": 8, "HAS_SHARED": True, "HAS_GATE": True}
    yield Job(_combine_kernel, {**block, **shared}, positions)
    yield Job(_gated_rows_kernel, {**block, "ACTIVATION": "gelu"})
    for tiles in (FEW, MANY) if target == "sm_90" else (FEW,):
        yield from _grouped_jobs(tiles, target, overlaps)
    if target == "sm_90":
        yield from _hopper_expert_jobs()


def _hopper_expert_jobs() -> Iterator[Job]:
    """Both products; gate_up with and without a bias."""
    boxes = [f"tensordesc<bf16[{rows}, 64],{tiles_of(64)!r}>" for rows in (64, 128)]
    constants = {"STAGES": hopper_experts.STAGES, "GROUP_ROWS": hopper_experts.GROUP_ROWS}
    for is_gated, has_bias in ((False, False), (True, False), (True, True)):
        kind = {"IS_GATED": is_gated, "HAS_BIAS": has_bias}
        types = {"x": "*bf16" if is_gated else boxes[0], "w_desc": boxes[1]}
        yield Job(
            hopper_experts._hopper_kernel,
            {**kind, **constants, "ACTIVATION": "clamped" if has_bias else "silu"},
            types,
            hopper_experts.OPTIONS,
            GluonASTSource,
            227 << 10,
        )


def _grouped_jobs(tiles: ExpertTiles, target: str, overlaps: dict[str, bool]) -> Iterator[Job]:
    has_boxes = target == "sm_90"
    for tile, kernel in ((tiles.gate_up, _gate_up_kernel), (tiles.down, _down_kernel)):
        constants: dict[str, object] = {
            "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_K": tile.k, "GROUP": 8,
            "IS_EVEN": True, "HAS_BOXES": has_boxes, "UPCAST": False, **overlaps,
        }  # fmt: skip
        types = {"weights_ptr": "*bf16"}
        if has_boxes:
            types["weights_ptr"] = f"tensordesc<bf16[{tile.columns}, {tile.k}]>"
        if kernel is _gate_up_kernel:
            constants |= {"ACTIVATION": "clamped", "HAS_BIAS": True}
        elif has_boxes:
            types["act_ptr"] = f"tensordesc<bf16[{tile.rows}, {tile.k}]>"
        stages = tile.stages if has_boxes else 2
        yield Job(kernel, constants, types, {"num_warps": tile.warps, "num_stages": stages})


def _packed_jobs(target: str) -> Iterator[Job]:
    """Kernels for 4-bit weights."""
    common = {"OVERLAPS": target == "sm_90", "IS_PTX": target != "gfx942"}
    int4 = {"GROUP": 128, "IS_MXFP4": False, "IS_EVEN": True, **common}
    mxfp4 = {"GROUP": 32, "IS_MXFP4": True, "IS_EVEN": False, **common}
    words = {"words_ptr": "*i16"}
    yield Job(_dequantize_kernel, {**int4, "GROUP": 32, "TILE_OUT": 64}, words)
    is_hopper = target == "sm_90"
    for tile in (INT4_TILES[0], INT4_TILES[-1]) if is_hopper else (INT4_TILES[0],):
        sizes = {"TILE_OUT": tile.outs, "TILE_TOKENS": tile.tokens, "STEP": tile.blocks}
        options = {"num_warps": tile.warps, "num_stages": tile.stages if is_hopper else 2}
        yield Job(
            _product_kernel,
            {**int4, **sizes, "IS_SPLIT": tile is INT4_TILES[0], "HAS_BIAS": True, "UPCAST": False},
            words,
            options,
            most_shared=SHARED_BYTES[is_hopper],
        )
    fp8 = {"x_ptr": "*fp8e4nv", "values_ptr": "*fp8e4nv"}
    fp32 = dict.fromkeys(("x_scales_ptr", "scales_ptr", "partial_ptr"), "*fp32")
    for tile in (FEW_TILES[0], FEW_TILES[-1]) if is_hopper else ():
        sizes = {"TILE_OUT": tile.outs, "TILE_TOKENS": tile.tokens, "STEP": tile.blocks}
        for is_blocks in (False, True):
            yield Job(
                _few_rows_kernel,
                {**sizes, "IS_BLOCKS": is_blocks, "IS_SPLIT": True, "HAS_BIAS": True,
                 "UPCAST": False, "OVERLAPS": True},
                {**fp8, **fp32, "arrived_ptr": "*i32"},
                {"num_warps": tile.warps, "num_stages": tile.stages},
                most_shared=SHARED_BYTES[is_hopper],
            )  # fmt: skip
    for is_gated in (True, False) if is_hopper else ():
        kind = {"IS_GATED": is_gated, "HAS_BIAS": is_gated, "ACTIVATION": "clamped"}
        yield Job(
            few_experts._few_kernel,
            {
                **kind,
                "BLOCKS": 22,
                "TAIL": 2,
                "GROUP_ROWS": few_experts.GROUP_ROWS,
                "PROGRAMS": few_experts.PROGRAMS,
            },
            {"words_ptr": "*i16"},
            few_experts.OPTIONS,
            GluonASTSource,
            most_shared=16,  # no tensor moves between threads, only a counter's value
        )
    for tiles in (PACKED_FEW, PACKED_MANY) if is_hopper else (PACKED_FEW,):
        gated = {"ACTIVATION": "clamped", "HAS_BIAS": True}
        for kernel, part, own in (
            (_packed_gate_up_kernel, tiles.gate_up, gated),
            (_packed_down_kernel, tiles.down, {}),
        ):
            sizes = {"TILE_ROWS": part.rows, "TILE_COLUMNS": part.columns, "GROUP_ROWS": 8}
            yield Job(
                kernel,
                {**mxfp4, **sizes, **own, "UPCAST": False},
                words,
                {"num_warps": part.warps, "num_stages": part.stages if is_hopper else 2},
                most_shared=SHARED_BYTES[is_hopper],
            )


def _recurrent_jobs(target: str) -> Iterator[Job]:
    overlaps = {"OVERLAPS": target == "sm_90"}
    for kernel in (2, 4):
        taps = {"KERNEL": kernel, "ACTIVATION": True, **overlaps}
        no_bias = _nothing("bias_ptr", *OF_ROWS) if kernel == 4 else {}
        for taken, sizes in (
            (_convolve_decode_kernel, {"BLOCK": 512}),
            (_convolve_kernel, {"TOKENS": 32, "STEP": 8, "BLOCK": 512}),
        ):
            yield Job(taken, _known(taken, {**taps, **no_bias, **sizes}))
    for gate_first, group, groups in ((False, 128, 16), (True, 8192, 1)):
        norm = {"WIDTH": 8192, "GROUP": group, "LANES": group, "GROUPS": groups,
                "IS_ONE_GAIN": group == 128, "GATE_FIRST": gate_first, **overlaps}  # fmt: skip
        yield Job(_gated_norm_kernel, norm, options={"num_warps": group * groups // 512})
    dots = {"PRECISION": "tf32", "UPCAST": False, "TILE": TILE, **overlaps}
    wide = {**dots, "PRECISION": "ieee"}
    heads = ("q", "k", "v", "x", "b", "c", "a", "dt", "own", "of_state", "scores", "out")
    floats = {f"{name}_ptr": "*fp32" for name in heads}
    is_hopper = target == "sm_90"
    for dim in (128, 256):
        for job in _state_jobs(dim, 2, dots, is_hopper):
            yield Job(*job, most_shared=SHARED_BYTES[is_hopper])
    for kernel, constants, types, options in _state_jobs(64, 4, wide, is_hopper):
        more = {name: kind for name, kind in floats.items() if name in kernel.arg_names}
        yield Job(kernel, constants, {**types, **more}, options)


def _state_jobs(
    dim: int, size: int, dots: Mapping[str, object], is_hopper: bool
) -> Iterator[tuple[triton.JITFunction, dict[str, object], dict[str, str], dict[str, int]]]:
    """Delta rule and scan, with elements of `size` bytes: kernel, constants, types, options."""
    overlaps, lanes, warps = {"OVERLAPS": dots["OVERLAPS"]}, lanes_of(dim), {"num_warps": 4}
    tiles, factors = tile_options(dim, size, is_hopper), {"factors_ptr": "*fp32"}
    part = "*bf16" if size == 2 else "*fp32"
    no_rows: dict[str, object] = {}
    keys: dict[str, str] = {}
    if dim == 128:
        keys = {"keys_ptr": "*bf16"}
        yield from _row_jobs(dots)
    else:
        no_rows = _nothing(*OF_ROWS)
    delta = {"GROUP": 3, "K": dim, "V": dim}
    for kernel in (_delta_decode_kernel, _delta_serial_kernel):
        sizes = {**delta, **overlaps, "HEADS": 48, "K_LANES": lanes, "BLOCK_V": 32}
        sizes |= {"PRECISION": dots["PRECISION"], "UPCAST": False}
        types = keys if "keys_ptr" in kernel.arg_names else {}
        yield (
            kernel,
            _known(kernel, {**sizes, **no_rows}),
            types,
            {"num_warps": 2} if keys else warps,
        )
    delta |= {"K_LANES": lanes, "V_LANES": lanes}
    for kernel, options in (
        (_delta_solve_kernel, solve_options_of(lanes, lanes, size, is_hopper)),
        (_delta_pass_kernel, pass_options_of(dim, size, is_hopper, is_long=True)),
        (_delta_pass_kernel, pass_options_of(dim, size, is_hopper, is_long=False)),
    ):
        sizes = {**delta, **dots, "BLOCK_V": pass_columns(dim, size), **no_rows, **options}
        launch = {name: options[name] for name in options if name not in kernel.arg_names}
        types = {**factors, **keys} if "keys_ptr" in kernel.arg_names else factors
        yield kernel, _known(kernel, sizes), {**types, "parts_ptr": part}, launch
    scan = {"GROUP": 16, "N": dim, "P": 64, "N_LANES": lanes}
    for kernel in (_scan_decode_kernel, _scan_serial_kernel):
        sizes = {**scan, **overlaps, "HEADS": 64, "BLOCK_P": 32}
        sizes |= {"PRECISION": dots["PRECISION"], "UPCAST": False}
        types = keys if "keys_ptr" in kernel.arg_names else {}
        yield (
            kernel,
            _known(kernel, {**sizes, **no_rows}),
            types,
            {"num_warps": 2} if keys else warps,
        )
    sizes = {**scan, **dots, "BLOCK_P": scan_columns(dim, 64, size), **no_rows}
    yield _scan_kernel, _known(_scan_kernel, sizes), keys, tiles


def _known(kernel: triton.JITFunction, constants: Mapping[str, object]) -> dict[str, object]:
    """The constants that a kernel has."""
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _row_jobs(
    dots: Mapping[str, object],
) -> Iterator[tuple[triton.JITFunction, dict[str, object], dict[str, str], dict[str, int]]]:
    """Decodes with rows: of the delta rule and of Mamba-2."""
    for groups, value_dim, nothing in (
        ({"HEADS": 48, "GROUP": 3}, 128, ("skip_ptr",)),
        ({"HEADS": 64, "GROUP": 8}, 64, ("b_ptr",)),
    ):
        sizes = {
            **groups, **dots, "K": 128, "K_LANES": 128, "V": value_dim, "V_LANES": value_dim,
            "BLOCK_V": base_columns(128, value_dim), "MEMBERS": SIBLINGS, "BLOCK_ROWS": ROWS,
            "GATES": 132, "HEAD_LANES": 64, "KEY_HEAD_LANES": 16,
        }  # fmt: skip
        for kernel, options in (
            (_sibling_bases_kernel, BASE_OPTIONS),
            (_sibling_rows_kernel, ROW_OPTIONS),
        ):
            constants = _known(kernel, {**sizes, **_nothing(*nothing)})
            yield kernel, constants, {"keys_ptr": "*bf16"}, options


def _copy_jobs() -> Iterator[Job]:
    types = {"layers_ptr": "*i32", "pages_ptr": "*i32", "buffer_ptr": "*i32"}
    yield Job(_spread_kernel, {"TILE": 2048}, types)
    yield Job(_move_kernel, {"BLOCK": 1024})


def _jobs(target: str) -> Iterator[Job]:
    if target == LAYOUTS:
        yield from _hopper_jobs(MORE_SHAPES)
        return
    yield from _attention_jobs(HOPPER if target == "sm_90" else FALLBACK)
    if target == "sm_90":
        yield from _hopper_jobs(HOPPER_SHAPES)
    yield from _copy_jobs()
    yield from _other_jobs(target)
    yield from _expert_jobs(target)
    yield from _packed_jobs(target)
    yield from _recurrent_jobs(target)


def _text(kernel: triton.JITFunction, seen: set[str]) -> Iterator[str]:
    """The source of a kernel and of the functions of ours that it calls, and the constants that
    they name. Line numbers are left out."""
    names = kernel.fn.__globals__
    seen.add(f"{kernel.fn.__module__}.{kernel.fn.__qualname__}")
    yield kernel.src
    for node in ast.walk(ast.parse(kernel.src)):
        match node:
            case ast.Name(name):
                found = names.get(name)
            case ast.Attribute(ast.Name(owner), name) if isinstance(names.get(owner), ModuleType):
                found = getattr_static(names[owner], name, None)
            case _:
                continue
        if isinstance(found, triton.JITFunction):
            full_name = f"{found.fn.__module__}.{found.fn.__qualname__}"
            if full_name.startswith("mainstem.") and full_name not in seen:
                yield from _text(found, seen)
        elif isinstance(found, int | float | str | triton.language.constexpr):
            yield f"{name} = {found}"


def key_of(job: Job, target: str) -> str:
    """Name what is compiled."""
    setting = (
        sorted(job.constants.items()),
        sorted(job.types.items()),
        sorted(job.options.items()),
    )
    words = (triton.__version__, target, job.source.__name__, job.most_shared, setting)
    return sha256("\n".join([repr(words), *_text(job.kernel, set())]).encode()).hexdigest()[:32]


def is_drawn(key: str) -> bool:
    """Whether a kernel of the record is compiled today."""
    return int(key, 16) % DRAWN_OF == datetime.now(UTC).toordinal() % DRAWN_OF


def compile_some(target: str, which: str) -> None:
    record = RECORD.read_text().splitlines() if RECORD.is_file() else []
    known = {line.split()[-1] for line in record} if which == "" else set()
    lines = [line for line in record if line.split()[0] != target]
    for job in _jobs(target):
        key = key_of(job, target)
        lines.append(f"{target} {job.kernel.__name__} {key}")
        if key in known and not is_drawn(key):
            print(target, job.kernel.__name__, "as recorded", flush=True)
            continue
        names = job.kernel.arg_names
        signature = {n: "constexpr" if n in job.constants else _type_of(n) for n in names}
        source = job.source(
            fn=job.kernel,
            signature={**signature, **job.types},
            constexprs={(names.index(n),): value for n, value in job.constants.items()},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if not job.kernel.params[i].do_not_specialize
                and (
                    (n.endswith("_ptr") and "tensordesc" not in job.types.get(n, ""))
                    or n.startswith("stride_")
                    or n in ("x", "size", "hidden", "num_in", "num_out", "expert_out", "split_in")
                )
            },
        )
        compiled = triton.compile(source, target=TARGETS[target], options=job.options)
        shared = compiled.metadata.shared
        print(target, job.kernel.__name__, shared, flush=True)
        assert job.most_shared is None or shared <= job.most_shared, "too much shared memory"
    if which == "--record":
        RECORD.write_text("\n".join(sorted(set(lines))) + "\n")
    print("compiled all", flush=True)


if __name__ == "__main__":
    compile_some(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
