"""Rope and append in plain PyTorch, computed in fp32: the kernels are tested against them.

Nothing here changes its arguments or shares code with a fast kernel.
"""

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate the first 2 * len(inv_freq) dims of x [tokens, heads, dim]; dim i pairs with i + half.

    Dims beyond those (partial rotary) pass through.
    """
    half = len(inv_freq)
    angles = positions.float()[:, None, None] * inv_freq.float()
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), x[..., 2 * half :]), dim=-1)


def append(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return copies of the pages, with k, v [tokens, kv_heads, dim] at slots page * page_size +
    offset."""
    page_size = k_pages.shape[2]
    new_k, new_v = k_pages.clone(), v_pages.clone()
    for token, slot in enumerate(slots.tolist()):
        new_k[slot // page_size, :, slot % page_size] = k[token]
        new_v[slot // page_size, :, slot % page_size] = v[token]
    return new_k, new_v
