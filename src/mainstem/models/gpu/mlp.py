"""The dense MLP on a GPU."""

from torch import Tensor

from mainstem.kernels.dense.fused import silu_mul, silu_mul_fp8
from mainstem.models.gpu.linears import Linear, Rows
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.spec import MlpSpec


class Mlp:
    """down(act(first(x)))."""

    def __init__(self, first: Linear, spec: MlpSpec, down: Linear, space: Workspace) -> None:
        self._first, self._down = first, down
        width = 2 * spec.size if spec.is_gated else spec.size
        self._first_room, self._act_room = space.first[:, :width], space.act[:, : spec.size]
        self._out_room = space.delta

    @property
    def is_fp8(self) -> bool:
        return self._first.is_fp8

    def __call__(self, x: Rows) -> Tensor:
        tokens = len(x if isinstance(x, Tensor) else x[0])
        first = self._first(x, self._first_room[:tokens])
        act: Rows
        if self._down.is_fp8:
            act = silu_mul_fp8(first)
        else:
            act = silu_mul(first, out=self._act_room[:tokens])
        return self._down(act, self._out_room[:tokens])
