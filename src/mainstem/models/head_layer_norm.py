"""LayerNorm of single heads, for both backends."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadLayerNorm:
    """LayerNorm of each query and key head of qkv [tokens, width], in place. Only the result is
    rounded.

    gain, bias: [heads, dim] in fp32, query heads, then key heads.
    """

    gain: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, qkv: Tensor) -> None:
        heads, dim = self.gain.shape
        found = qkv[:, : heads * dim].view(len(qkv), heads, dim)
        normed = F.layer_norm(found.float(), (dim,), eps=self.eps).mul_(self.gain)
        found.copy_(normed if self.bias is None else normed.add_(self.bias))
