"""The form of an answer: which tokens it allows next."""

from dataclasses import dataclass

import numpy as np

from mainstem.core.request import TokenMask
from mainstem.core.step import Bytes, Int32s


@dataclass(slots=True, eq=False)
class AnswerForm:
    """A part of a Sequence: a grammar restricts its answer."""

    mask: TokenMask
    vocab_size: int
    is_broken: bool = False  # the answer ends because it cannot continue in its form

    def allowed_tokens(self, output_ids: Int32s) -> Bytes:
        """Return the tokens that may come next, packed as in SampleBatch: token t is bit t % 8 of
        byte t // 8."""
        packed = np.zeros(-(-self.vocab_size // 8), np.uint8)
        allowed = self.mask.allowed(output_ids)[: len(packed)]
        packed[: len(allowed)] = allowed
        if self.vocab_size % 8:
            packed[-1] &= (1 << self.vocab_size % 8) - 1
        return packed

    def fault(self, output_ids: Int32s) -> str | None:
        """Return why the answer cannot continue, and mark it as broken; None if it can."""
        is_stuck = not self.allowed_tokens(output_ids).any()
        fault = self.mask.fault
        if fault is None and is_stuck:
            fault = "the model has no token that the form allows next"
        self.is_broken = fault is not None
        return fault
