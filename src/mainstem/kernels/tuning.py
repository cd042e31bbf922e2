"""Tile shapes of the span attention kernel per card, as measured; see docs/log/kernels.md for the
runs.

Small and large units live in one kernel and share its warps and registers, so a choice is one
record.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one compiled kernel cuts its work. Rows are query tokens x the heads of one KV head."""

    small_stages: int  # steps of the small tile's loop in flight
    large_q: int  # rows of the large tile: shared prefixes and prompt chunks
    large_k: int  # keys per step of its loop
    large_stages: int
    num_warps: int
    programs_per_sm: int  # all programs must be resident at once, so this must fit
    max_registers: int | None = None
    rehearses: bool = False  # whoever waits at the barrier runs the merge once without effect
    large_weight: float = 0.8  # time of a large tile's key over that of a small one


HOPPER = Tiles(
    small_stages=3, large_q=64, large_k=64, large_stages=3,
    num_warps=4, programs_per_sm=2, max_registers=255,
)  # fmt: skip
# One query head per KV head: prefixes fill few rows, so many short units, whose beginnings and
# ends take most of the time. The narrower tile spills less there; prompts want the wider one.
HOPPER_MHA = replace(HOPPER, large_k=32, large_stages=5, rehearses=True)
PROMPT_TOKENS = 1024  # steps of more tokens are prompts for the most part
# Only has to fit: 99 KB of shared memory on consumer cards, one program per SM.
FALLBACK = Tiles(
    small_stages=2, large_q=64, large_k=32, large_stages=2, num_warps=4, programs_per_sm=1
)
# fp32 is for checking: plain arithmetic units, so small tiles.
WIDE_ELEMENTS = Tiles(
    small_stages=1, large_q=16, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)
INTERPRETER = Tiles(
    small_stages=1, large_q=32, large_k=32, large_stages=1, num_warps=4, programs_per_sm=1
)


def choose_tiles(device: torch.device, dtype: torch.dtype, group: int) -> tuple[Tiles, Tiles]:
    """The tuned records of a card, or ones that fit any: for few tokens and for prompts.

    Both cut alike: a plan is made before it is known which of them runs it.
    """
    if device.type == "cpu":
        return INTERPRETER, INTERPRETER
    if dtype == torch.float32:
        return WIDE_ELEMENTS, WIDE_ELEMENTS
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9:
        return (HOPPER_MHA if group == 1 else HOPPER), HOPPER
    return FALLBACK, FALLBACK
