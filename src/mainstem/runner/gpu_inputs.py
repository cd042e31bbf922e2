"""Sends a Step's arrays to a GPU: one copy through pinned memory into fixed buffers."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Step
from mainstem.kernels.memory.upload import move_words
from mainstem.runner.uploads import Uploads

_ROWS = 6  # token ids, positions, slots, hidden rows, carry to, carry from
_NUM_STAGING = 3  # steps whose arrays may be on their way to the device
FEW_ROWS = 1024
FINE_ROWS, COARSE_ROWS = 16, 64


def padded_size(rows: int) -> int:
    """The number of rows to compute. There are only a few sizes, and all are run before the first
    step."""
    grain = FINE_ROWS if rows <= FEW_ROWS else COARSE_ROWS
    return -(-rows // grain) * grain


def all_sizes(max_rows: int) -> list[int]:
    """The sizes that `padded_size` can return, up to `max_rows`."""
    few = range(FINE_ROWS, min(FEW_ROWS, max_rows) + 1, FINE_ROWS)
    return [*few, *range(FEW_ROWS + COARSE_ROWS, max_rows + 1, COARSE_ROWS)]


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """A Step's arrays on the device; valid until the next `send`."""

    token_ids: Tensor  # [padded]
    positions: Tensor  # [padded]
    write_slots: Tensor  # [padded]; -1 in the padding, which is not written
    hidden_rows: Tensor | None  # as Inputs.hidden_rows, padded
    copies: tuple[Tensor, Tensor] | None
    moves: tuple[Tensor, Tensor, Tensor] | None


class InputBuffers:
    """Sends Steps of up to `max_tokens` tokens, in launch order on one stream."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._max_tokens = max_tokens
        self._uploads = Uploads(device)
        self._ints = torch.zeros((_ROWS, max_tokens), dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._staging = [
            torch.zeros((_ROWS, max_tokens), dtype=torch.int64, pin_memory=is_cuda)
            for _ in range(_NUM_STAGING)
        ]
        self._arrays = [staging.numpy() for staging in self._staging]
        self._copied = [torch.cuda.Event() for _ in self._staging] if is_cuda else []  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, step: Step, previous: Tensor, num_padded: int) -> GpuInputs:
        """Send a step. `previous` are the samples of the step before; carried tokens are taken from
        them."""
        index = self._next
        self._next = (index + 1) % _NUM_STAGING
        if self._copied:
            self._copied[index].synchronize()  # the copy of three steps ago
        rows = self._fill(self._arrays[index], step, num_padded)
        columns = max(num_padded, rows or 0)
        move_words(self._ints[:, :columns], self._staging[index][:, :columns])
        if self._copied:
            self._copied[index].record()
        token_ids = self._ints[0, :num_padded]
        if count := len(step.carry_to):
            ids = previous.index_select(0, self._ints[5, :count])
            token_ids.index_copy_(0, self._ints[4, :count], ids)
        return GpuInputs(
            token_ids=token_ids,
            positions=self._ints[1, :num_padded],
            write_slots=self._ints[2, :num_padded],
            hidden_rows=None if rows is None else self._ints[3, :rows],
            copies=self._copies(step),
            moves=self._moves(step),
        )

    def views(self, num_padded: int) -> GpuInputs:
        """Return the buffers without sending anything; a CUDA graph of this size reads them."""
        token_ids, positions, slots = self._ints[:3, :num_padded]
        return GpuInputs(token_ids, positions, slots, None, None, None)

    def clear(self) -> None:
        """Prepare a pass without a Step: no tokens, no slots to write."""
        self._ints[:2].zero_()
        self._ints[2].fill_(-1)

    def _fill(self, ints: NDArray[np.int64], step: Step, num_padded: int) -> int | None:
        """Fill the staging arrays. Returns the number of hidden rows; None if they are all rows, in
        order."""
        tokens = step.num_tokens
        ints[:2, tokens:num_padded] = 0
        ints[2, tokens:num_padded] = -1
        ints[0, :tokens] = step.token_ids
        ints[1, :tokens] = step.positions
        ints[2, :tokens] = step.write_slots
        ints[4, : len(step.carry_to)] = step.carry_to
        ints[5, : len(step.carry_to)] = step.carry_from
        rows, _ = step.hidden_rows()
        if np.array_equal(rows, np.arange(tokens)):
            return None
        padded = min(padded_size(len(rows)), self._max_tokens)
        ints[3, : len(rows)] = rows
        ints[3, len(rows) : padded] = 0  # any row is fine: its result is not used
        return padded

    def _copies(self, step: Step) -> tuple[Tensor, Tensor] | None:
        if len(step.copy_to) == 0:
            return None
        source, target = self._uploads.send(np.stack((step.copy_from, step.copy_to)))
        return source, target

    def _moves(self, step: Step) -> tuple[Tensor, Tensor, Tensor] | None:
        if len(step.move_to) == 0:
            return None
        arrays = np.stack((step.move_from, step.move_to, step.move_by))
        source, target, distance = self._uploads.send(arrays)
        return source, target, distance
