"""Sends a Step's arrays to a GPU: one copy through pinned memory into fixed buffers."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.core.step import Step
from mainstem.kernels.memory.upload import move_words
from mainstem.runner.gpu_rounded import Writes
from mainstem.runner.inputs import Places
from mainstem.runner.page_parts import in_windowed_parts
from mainstem.runner.uploads import Uploads

# token ids, positions, slots, hidden rows, carry to, carry from, slots in windowed parts; with
# rounded pages, the pages to round, and their windowed parts
_ROWS, _ROUNDED_ROWS = 7, 9
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
        self,
        max_tokens: int,
        device: torch.device,
        page_size: int = 1,
        *,
        has_parts: bool = False,
        is_rounded: bool = False,
    ) -> None:
        """`has_parts`: windowed parts of pages have places of their own; `is_rounded`: full pages
        are rounded."""
        self._max_tokens = max_tokens
        self._page_size = page_size
        self._is_rounded = is_rounded
        self._rows = _ROUNDED_ROWS if is_rounded else _ROWS if has_parts else _ROWS - 1
        self._has_windowed_slots = has_parts and not is_rounded
        self._windowed_row = 6 if self._has_windowed_slots else 2
        self._uploads = Uploads(device)
        self._ints = torch.zeros((_ROUNDED_ROWS, max_tokens), dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._staging = [
            torch.zeros((_ROUNDED_ROWS, max_tokens), dtype=torch.int64, pin_memory=is_cuda)
            for _ in range(_NUM_STAGING)
        ]
        self._arrays = [staging.numpy() for staging in self._staging]
        self._copied = [torch.cuda.Event() for _ in self._staging] if is_cuda else []  # type: ignore[no-untyped-call]
        self._next = 0

    def send(
        self, step: Step, previous: Tensor, num_padded: int, writes: Writes | None = None
    ) -> GpuInputs:
        """Send a step. `previous` are the samples of the step before; carried tokens are taken from
        them. `writes`: with rounded pages, where the tokens are written."""
        index = self._next
        self._next = (index + 1) % _NUM_STAGING
        if self._copied:
            self._copied[index].synchronize()  # the copy of three steps ago
        windowed = in_windowed_parts(step, self._page_size)
        rows = self._fill(self._arrays[index], step, windowed, num_padded)
        if writes is not None:
            _fill_writes(self._arrays[index], writes, num_padded)
        columns = max(num_padded, rows or 0)
        move_words(self._ints[: self._rows, :columns], self._staging[index][: self._rows, :columns])
        if self._copied:
            self._copied[index].record()
        token_ids = self._ints[0, :num_padded]
        if count := len(step.carry_to):
            ids = previous.index_select(0, self._ints[5, :count])
            token_ids.index_copy_(0, self._ints[4, :count], ids)
        places, in_windows = self._places(num_padded)
        places = places._replace(copies=self._copies(step), moves=self._moves(step))
        if windowed is step:
            in_windows = places
        else:
            in_windows = in_windows._replace(
                copies=self._copies(windowed), moves=self._moves(windowed)
            )
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
        return GpuInputs(ints[0], ints[1], *self._places(num_padded), None)

    def _places(self, num_padded: int) -> tuple[Places, Places]:
        """Where tokens are written in pages, and in their windowed parts."""
        ints = self._ints[:, :num_padded]
        if self._is_rounded:
            return Places(ints[2], round_to=ints[7]), Places(ints[2], round_to=ints[8])
        return Places(ints[2]), Places(ints[self._windowed_row])

    def clear(self) -> None:
        """Prepare a pass without a Step: no tokens, no slots to write."""
        self._ints[:2].zero_()
        self._ints[[2, 6, 7, 8]] = -1

    def _fill(
        self, ints: NDArray[np.int64], step: Step, windowed: Step, num_padded: int
    ) -> int | None:
        """Fill the staging arrays. Returns the number of hidden rows; None if they are all rows, in
        order."""
        tokens = step.num_tokens
        if self._has_windowed_slots:
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


def _fill_writes(ints: NDArray[np.int64], writes: Writes, num_padded: int) -> None:
    tokens = len(writes.slots)
    ints[2, :tokens] = writes.slots
    ints[7:9, tokens:num_padded] = -1
    ints[7, :tokens] = writes.targets
    ints[8, :tokens] = writes.windowed_targets
