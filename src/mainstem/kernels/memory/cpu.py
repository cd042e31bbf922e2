"""Moves pages on a CPU; `rotate.py` does it on a GPU."""

import torch
from torch import Tensor


def take_pages(joint: Tensor, pages: Tensor) -> Tensor:
    """Return copies of some pages: [2, count, kv_heads, page_size, dim].

    joint: as for `move_pages`. In memory a page is in as many pieces as there are heads, and
    `joint.index_select(1, pages)` would first copy the whole cache of the layer to make it
    contiguous. In the order of memory, heads first, only the wanted pages are read.
    """
    return joint.transpose(1, 2).index_select(2, pages).transpose(1, 2)


def move_pages(joint: Tensor, source: Tensor, target: Tensor, turns: Tensor | None) -> None:
    """Write the pages `source`, with rotated keys and unchanged V, to the pages `target`.

    joint: [2, pages, kv_heads, page_size, dim], K first, the two dims of a rotary pair adjacent;
    turns: [moves, 1, 1, rotary_dim / 2] complex, None if keys are not rotated. Pages are read
    before any is written.
    """
    moved = take_pages(joint, source)
    if turns is not None:
        turn_keys(moved[0], turns)
    joint.index_copy_(1, target, moved)


def turn_keys(keys: Tensor, turns: Tensor) -> None:
    """Rotate keys [..., dim] in place by `turns` [..., rotary_dim / 2]."""
    part = keys[..., : 2 * turns.shape[-1]]
    pairs = torch.view_as_complex(part.float().reshape(*part.shape[:-1], -1, 2))
    part.copy_(torch.view_as_real(pairs * turns).flatten(-2))
