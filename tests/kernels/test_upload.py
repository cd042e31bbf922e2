"""The upload kernel, under the interpreter: every word arrives, and no other memory changes."""

import pytest
import torch

from tests.kernels.interpreted import require_interpreter

require_interpreter()

from mainstem.kernels.memory.upload import BLOCK_WORDS, _move_kernel, move_words  # noqa: E402


@pytest.mark.parametrize("words", [1, BLOCK_WORDS, 5 * BLOCK_WORDS + 3])
def test_rows_of_a_wider_array_are_copied(words: int) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (3, words + 7), dtype=torch.int32)
    target = torch.zeros(3, words + 2, dtype=torch.int32)
    _move_kernel[(3, 2)](
        target, source, target.stride(0), source.stride(0), words, BLOCK=BLOCK_WORDS
    )
    assert torch.equal(target[:, :words], source[:, :words])
    assert not target[:, words:].any()


def test_on_a_cpu_it_is_a_copy() -> None:
    source = torch.arange(12).view(2, 6)
    target = torch.zeros(2, 8, dtype=torch.int64)
    move_words(target[:, :5], source[:, :5])
    assert torch.equal(target[:, :5], source[:, :5])
    assert not target[:, 5:].any()
