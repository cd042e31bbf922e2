"""Makes device tensors from a Step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Int32s, Step
from mainstem.runner.page_parts import in_windowed_parts


class Places(NamedTuple):
    """Where a step writes, copies and moves K and V: in pages, or in their windowed parts."""

    write_slots: Tensor  # [tokens]
    copies: tuple[Tensor, Tensor] | None = None  # slots to copy from and to
    # pages to move from and to, positions to move by
    moves: tuple[Tensor, Tensor, Tensor] | None = None
    round_to: Tensor | None = None  # [tokens] with rounded pages on a GPU: Writes.targets


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of a Step as tensors for the decoder."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    seq_slots: Int32s  # [seqs] Step.seq_slots
    seq_starts: Int32s  # [seqs + 1] Step.seq_starts
    places: Places
    windowed: Places  # in the windowed parts of pages
    window_parts: Int32s | None  # Step.window_parts
    # packed tokens whose last hidden state is needed: samples, then prompt logprobs. None: all
    # tokens in order, as in a step of decodes
    hidden_rows: Tensor | None


def make_token_ids(step: Step, previous: Tensor) -> Tensor:
    """Return the token ids of a step. `previous` are the samples of the step before; carried tokens
    are taken from them."""
    token_ids = torch.from_numpy(step.token_ids).long()
    if len(step.carry_to):
        source = torch.from_numpy(step.carry_from).long()
        token_ids[torch.from_numpy(step.carry_to).long()] = previous[source]
    return token_ids


def make_inputs(step: Step, previous: Tensor, page_size: int) -> Inputs:
    """Return the inputs of a step; `previous` is as in make_token_ids."""
    rows, _ = step.hidden_rows()
    is_all = np.array_equal(rows, np.arange(step.num_tokens))
    places = windowed = _places(step)
    if step.window_parts is not None:
        windowed = _places(in_windowed_parts(step, page_size))
    return Inputs(
        token_ids=make_token_ids(step, previous),
        positions=torch.from_numpy(step.positions).long(),
        seq_slots=step.seq_slots,
        seq_starts=step.seq_starts,
        places=places,
        windowed=windowed,
        window_parts=step.window_parts,
        hidden_rows=None if is_all else torch.from_numpy(rows).long(),
    )


def _places(step: Step) -> Places:
    copies = None
    if len(step.copy_to):
        copies = (torch.from_numpy(step.copy_from), torch.from_numpy(step.copy_to))
    moves = None
    if len(step.move_to):
        arrays = (step.move_from, step.move_to, step.move_by)
        source, target, distance = (torch.from_numpy(array).long() for array in arrays)
        moves = (source, target, distance)
    return Places(torch.from_numpy(step.write_slots).long(), copies, moves)
