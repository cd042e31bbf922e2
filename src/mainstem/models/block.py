"""A decoder's block, as every backend runs it, and the interfaces that it needs.

    normed    what attention reads: a norm of x, or x itself
    qkv       one product; some families then norm queries and keys
    mixed     Attention.run: rotate, append K and V to pages, attend
    x         += what attention adds: a product, perhaps with a norm after it
    x         += what the MLP adds; it reads a norm of this x or, if parallel, of x before attention

models/cpu and models/gpu compile blocks from a recipe (spec.py) and tensors (tensors.py).
"""

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """A step's planned attention. It owns the K and V pages, and the states of layers that have a
    recurrence instead."""

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """Rotate, append K and V, attend. May overwrite qkv [tokens, heads + 2 kv_heads, dim]
        (flattened, then gates if there are some); returns [tokens, heads * dim]. Or run a
        recurrence on the output of its first product."""


class Gate(Protocol):
    """Makes each layer wait until its pages have arrived."""

    def before(self, layer: int) -> None:
        """Return once the pages that this step reads in `layer` have arrived."""


class OpenGate:
    """Never waits."""

    def before(self, layer: int) -> None:
        pass
