"""The MLP of a block on a GPU: dense, or experts."""

from typing import NamedTuple, Protocol

from torch import Tensor

from mainstem.kernels.dense.activations import (
    Act,
    activate,
    activate_fp8,
    activate_gated,
    activate_gated_fp8,
)
from mainstem.kernels.dense.fp8_rows import Fp8Per
from mainstem.kernels.dense.norms import Delta, Norm, add_, norm_rows
from mainstem.models.gpu.experts import GpuExperts
from mainstem.models.gpu.joins import InputReader
from mainstem.models.gpu.linears import Linear, Rows
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.spec import MlpSpec


class GpuMlp(Protocol):
    """The part of a block that computes each token separately."""

    @property
    def fp8_per(self) -> Fp8Per | None:
        """The form of quantized rows that the first product takes; None if it takes plain rows
        only."""

    def __call__(self, x: Rows) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], in the workspace or in new memory."""


class DenseMlp:
    """down(act(first(x)))."""

    def __init__(self, first: Linear, spec: MlpSpec, down: Linear, space: Workspace) -> None:
        self._first, self._down = first, down
        self._act = Act(spec.activation.value)
        self._activate = activate_gated if spec.is_gated else activate
        self._activate_fp8 = activate_gated_fp8 if spec.is_gated else activate_fp8
        width = 2 * spec.size if spec.is_gated else spec.size
        self._first_room, self._act_room = space.first[:, :width], space.act[:, : spec.size]
        self._out_room = space.mlp_answer

    @property
    def fp8_per(self) -> Fp8Per | None:
        return self._first.fp8_per

    def __call__(self, x: Rows) -> Tensor:
        tokens = len(x if isinstance(x, Tensor) else x[0])
        first = self._first(x, self._first_room[:tokens])
        act: Rows
        if self._down.fp8_per is not None:
            act = self._activate_fp8(first, self._act, per=self._down.fp8_per)
        else:
            act = self._activate(first, self._act, self._act_room[:tokens])
        return self._down(act, self._out_room[:tokens])


class BranchNorms(NamedTuple):
    """Norms of a shared MLP and experts that read x, not normed."""

    shared: InputReader
    experts: Norm
    router: Norm
    after_shared: Norm
    after_experts: Norm


class NormedExpertsMlp:
    """A shared MLP and experts, with norms of their own. Reads x, not normed."""

    fp8_per = None

    def __init__(
        self, shared: DenseMlp, experts: GpuExperts, norms: BranchNorms, space: Workspace
    ) -> None:
        self._shared, self._experts, self._norms = shared, experts, norms
        # attention's output was added to x, and the shared MLP has read its input
        self._room, self._input_room = space.answer, space.normed

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        norms, tokens = self._norms, len(x)
        shared = self._shared(norms.shared.read(x))
        norm_rows(shared, norms.after_shared, out=shared)
        room = self._room[:tokens]
        routed = norm_rows(x, norms.router, out=room)
        normed = norm_rows(x, norms.experts, out=self._input_room[:tokens])
        found = self._experts(normed, room, routed)  # the router has read `routed` by then
        add_(shared, Delta(found, after=norms.after_experts))
        return shared


class ExpertsMlp:
    """A layer's experts, with their output in the workspace."""

    fp8_per = None

    def __init__(self, experts: GpuExperts, space: Workspace) -> None:
        self._experts = experts
        self._out_room = space.mlp_answer

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return self._experts(x, self._out_room[: len(x)])
