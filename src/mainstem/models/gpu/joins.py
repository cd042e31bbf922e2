"""What stands between the products of a block on a GPU: residual, norms, scales."""

from collections.abc import Callable

from torch import Tensor

from mainstem.kernels.dense.fused import (
    add_rms_norm,
    add_rms_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from mainstem.models.gpu.linears import Rows
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.spec import ModelSpec
from mainstem.models.tensors import NormTensors

Join = Callable[[Tensor, Tensor], Rows]  # (what to add, x) -> what the next product reads


class FirstNorm:
    """What the first layer reads of x."""

    def __init__(
        self, norm: NormTensors | None, spec: ModelSpec, space: Workspace, is_fp8: bool
    ) -> None:
        assert norm is not None
        self._gain, self._eps = norm.gain, spec.norm.eps
        self._room = space.normed
        self._is_fp8 = is_fp8

    def __call__(self, x: Tensor) -> Rows:
        if self._is_fp8:
            return rms_norm_fp8(x, self._gain, self._eps)
        return rms_norm(x, self._gain, self._eps, out=self._room[: len(x)])


class AddNorm:
    """x += delta, then its norm."""

    def __init__(
        self, norm: NormTensors | None, spec: ModelSpec, space: Workspace, is_fp8: bool
    ) -> None:
        assert norm is not None
        self._gain, self._eps = norm.gain, spec.norm.eps
        self._room = space.normed
        self._is_fp8 = is_fp8

    def __call__(self, delta: Tensor, x: Tensor) -> Rows:
        if self._is_fp8:
            return add_rms_norm_fp8(delta, x, self._gain, self._eps)
        return add_rms_norm(delta, x, self._gain, self._eps, out=self._room[: len(x)])
