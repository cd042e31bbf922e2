"""Joins: what a GPU computes between the products of a block (residual, norms and scales), in one
pass over memory.

    serial      between: x += attention's output, norm     after: x += the MLP's output, norm
    parallel    between: norm of x                         after: x += both outputs, norm

With several ranks, an output is summed over all ranks first; parallel outputs are summed in one
call.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mainstem.kernels.dense.fp8_rows import Fp8Per
from mainstem.kernels.dense.norms import Delta, Norm, add_, norm_rows, norm_rows_fp8
from mainstem.models.collectives import Collectives
from mainstem.models.gpu.linears import Rows
from mainstem.models.spec import ModelSpec, NormKind, Residual
from mainstem.models.tensors import NormTensors

Join = Callable[[Tensor, Tensor], Rows]  # (an output, x) -> what the next product reads


class Joins(NamedTuple):
    between: Join  # after attention
    after: Join  # after the MLP


class InputReader(NamedTuple):
    """The input of a product: the norm of x, or x itself."""

    norm: Norm | None
    fp8_per: Fp8Per | None  # how the product's rows are quantized
    room: Tensor

    def read(self, x: Tensor, delta: Delta | None = None) -> Rows:
        """Add `delta` to x first, in place, and return the input of the product."""
        if self.norm is None:
            if delta is not None:
                add_(x, delta)
            return x
        if self.fp8_per is not None:
            return norm_rows_fp8(x, self.norm, delta, per=self.fp8_per)
        return norm_rows(x, self.norm, delta, out=self.room[: len(x)])


def make_norm(tensors: NormTensors | None, spec: ModelSpec) -> Norm | None:
    if tensors is None:
        return None
    return Norm(tensors.gain, spec.norm.eps, spec.norm.kind is NormKind.LAYER, tensors.bias)


def make_joins(
    spec: ModelSpec,
    mlp: InputReader,
    following: InputReader,
    tails: tuple[Norm | None, Norm | None],
    ranks: Collectives,
) -> Joins:
    """Make the joins of a layer. `mlp` is the input of the MLP, `following` the input of the next
    layer; `tails` are the norms of the outputs of attention and MLP."""
    scale = spec.residual_scale
    if spec.residual is not Residual.SERIAL:
        kind = _Parallel if ranks.shard.is_whole else _ParallelSummed
        return kind(mlp, following, scale, ranks).joins
    attention_tail, mlp_tail = tails

    def between(answer: Tensor, x: Tensor) -> Rows:
        return mlp.read(x, Delta(answer, after=attention_tail, scale=scale))

    def after(answer: Tensor, x: Tensor) -> Rows:
        return following.read(x, Delta(answer, after=mlp_tail, scale=scale))

    if ranks.shard.is_whole:
        return Joins(between, after)
    return Joins(
        lambda answer, x: between(_summed(answer, ranks), x),
        lambda answer, x: after(_summed(answer, ranks), x),
    )


def _summed(answer: Tensor, ranks: Collectives) -> Tensor:
    return ranks.sum_(answer.contiguous())  # fp8 products return slices of padded rows


class _Parallel:
    """Adds the outputs of attention and MLP to x at once."""

    def __init__(
        self, mlp: InputReader, following: InputReader, scale: float, ranks: Collectives
    ) -> None:
        self._mlp, self._following, self._scale = mlp, following, scale
        self._ranks = ranks
        self._answer: Tensor | None = None

    @property
    def joins(self) -> Joins:
        return Joins(self._between, self._after)

    def _between(self, answer: Tensor, x: Tensor) -> Rows:
        self._answer = answer
        return self._mlp.read(x)

    def _after(self, answer: Tensor, x: Tensor) -> Rows:
        first, self._answer = self._answer, None  # freed early: fp8 products return new memory
        return self._following.read(x, Delta(answer, more=first, scale=self._scale))


class _ParallelSummed(_Parallel):
    """Like _Parallel, with several ranks."""

    def _after(self, answer: Tensor, x: Tensor) -> Rows:
        assert self._answer is not None
        both, self._answer = _summed(answer.add_(self._answer), self._ranks), None
        return self._following.read(x, Delta(both, scale=self._scale))
