"""Act-order (desc_act): columns that share a scale are not neighbours.

The files give the group of each column (g_idx). A PackedWeight has the columns of a group next to
each other; `order` holds their original places.
"""

import torch
from torch import Tensor

from mainstem.core.errors import UnsupportedModel


def column_order(name: str, groups: Tensor, group: int) -> Tensor | None:
    """Return int32 [in], the columns sorted by their group; None if they are sorted already.

    `groups` [in] is the group of each column; if all are negative, the columns count as sorted."""
    usual = torch.arange(len(groups), device=groups.device) // group
    if torch.equal(groups.long(), usual) or bool((groups < 0).all()):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], usual):
        raise UnsupportedModel(f"{name}: g_idx does not give each group {group} columns")
    return order.to(torch.int32)
