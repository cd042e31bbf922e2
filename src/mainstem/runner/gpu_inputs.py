"""Sends a Step's arrays to a GPU: one copy through pinned memory into fixed buffers."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Step
from mainstem.kernels.memory.upload import move_words
from mainstem.runner.inputs import Places
from mainstem.runner.page_parts import in_windowed_parts
from mainstem.runner.uploads import Uploads

# token ids, positions, slots, hidden rows, carry to, carry from, slots in windowed parts
_ROWS = 7
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
    # write slots are [padded]; -1 in the padding, which is not written
    places: Places
    windowed: Places  # in the windowed parts of pages
    hidden_rows: Tensor | None  # as Inputs.hidden_rows, padded

    def without_copies(self) -> "GpuInputs":
        """The same, after the slots were copied."""
        places, windowed = (each._replace(copies=None) for each in (self.places, self.windowed))
        return replace(self, places=places, windowed=windowed)


class InputBuffers:
    """Sends Steps of up to `max_tokens` tokens, in launch order on one stream."""

    def __init__(
        self, max_tokens: int, device: torch.device, page_size: int = 1, *, has_parts: bool = False
    ) -> None:
        """`has_parts`: windowed parts of pages have places of their own."""
        self._max_tokens = max_tokens
        self._page_size = page_size
        self._rows = _ROWS if has_parts else _ROWS - 1
        self._windowed_row = 6 if has_parts else 2
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
        windowed = in_windowed_parts(step, self._page_size)
        rows = self._fill(self._arrays[index], step, windowed, num_padded)
        columns = max(num_padded, rows or 0)
        move_words(self._ints[: self._rows, :columns], self._staging[index][: self._rows, :columns])
        if self._copied:
            self._copied[index].record()
        token_ids = self._ints[0, :num_padded]
        if count := len(step.carry_to):
            ids = previous.index_select(0, self._ints[5, :count])
            token_ids.index_copy_(0, self._ints[4, :count], ids)
        places = Places(self._ints[2, :num_padded], self._copies(step), self._moves(step))
        in_windows = places
        if windowed is not step:
            slots = self._ints[self._windowed_row, :num_padded]
            in_windows = Places(slots, self._copies(windowed), self._moves(windowed))
        return GpuInputs(
            token_ids=token_ids,
            positions=self._ints[1, :num_padded],
            places=places,
            windowed=in_windows,
            hidden_rows=None if rows is None else self._ints[3, :rows],
        )

    def views(self, num_padded: int) -> GpuInputs:
        """Return the buffers without sending anything; a CUDA graph of this size reads them."""
        ints = self._ints[:, :num_padded]
        places, windowed = Places(ints[2]), Places(ints[self._windowed_row])
        return GpuInputs(ints[0], ints[1], places, windowed, None)

    def clear(self) -> None:
        """Prepare a pass without a Step: no tokens, no slots to write."""
        self._ints[:2].zero_()
        self._ints[[2, 6]] = -1

    def _fill(
        self, ints: NDArray[np.int64], step: Step, windowed: Step, num_padded: int
    ) -> int | None:
        """Fill the staging arrays. Returns the number of hidden rows; None if they are all rows, in
        order."""
        tokens = step.num_tokens
        if self._rows == _ROWS:
            assert step.window_parts is not None, "a step says nothing of windowed parts"
            ints[6, tokens:num_padded] = -1
            ints[6, :tokens] = windowed.write_slots
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
