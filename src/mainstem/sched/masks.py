"""Finds the tokens that the form of an answer allows next."""

import numpy as np

from mainstem.core.request import TokenMask
from mainstem.core.step import Bytes, Int32s


def allowed_tokens(mask: TokenMask, output_ids: Int32s, vocab_size: int) -> Bytes:
    """Return the allowed tokens, packed as in SampleBatch: token t is bit t % 8 of byte t // 8."""
    packed = np.zeros(-(-vocab_size // 8), np.uint8)
    allowed = mask.allowed(output_ids)[: len(packed)]
    packed[: len(allowed)] = allowed
    if vocab_size % 8:
        packed[-1] &= (1 << vocab_size % 8) - 1
    return packed


def form_fault(mask: TokenMask, output_ids: Int32s, vocab_size: int) -> str | None:
    """Return why an answer cannot continue in its form; None if it can."""
    is_stuck = not allowed_tokens(mask, output_ids, vocab_size).any()
    if mask.fault is None and is_stuck:
        return "the model has no token that the form allows next"
    return mask.fault
