"""Makes device tensors from a Step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import Step


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of a Step as tensors for the decoder."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    write_slots: Tensor  # [tokens]
    copies: tuple[Tensor, Tensor] | None  # slots to copy from and to
    moves: tuple[Tensor, Tensor, Tensor] | None  # pages to move from and to, positions to move by
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


def make_inputs(step: Step, previous: Tensor) -> Inputs:
    """Return the inputs of a step; `previous` is as in make_token_ids."""
    rows, _ = step.hidden_rows()
    is_all = np.array_equal(rows, np.arange(step.num_tokens))
    copies = None
    if len(step.copy_to):
        copies = (torch.from_numpy(step.copy_from), torch.from_numpy(step.copy_to))
    moves = None
    if len(step.move_to):
        arrays = (step.move_from, step.move_to, step.move_by)
        source, target, distance = (torch.from_numpy(array).long() for array in arrays)
        moves = (source, target, distance)
    return Inputs(
        token_ids=make_token_ids(step, previous),
        positions=torch.from_numpy(step.positions).long(),
        write_slots=torch.from_numpy(step.write_slots).long(),
        copies=copies,
        moves=moves,
        hidden_rows=None if is_all else torch.from_numpy(rows).long(),
    )
