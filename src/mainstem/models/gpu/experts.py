"""A mixture of experts on a GPU: a fixed list of kernels over fixed buffers.

    router product | top-k, sort by expert | gate/up product of all experts, activated |
    down product of all experts | weighted sum of each token's rows
    and, if there is a shared expert: its gate/up, activation and down

The host never waits for the device, and the kernels depend only on the number of tokens, so this is
safe in a CUDA graph. With Method.LIBRARY torch allocates the outputs of the two products; their
sizes, too, depend only on the number of tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.kernels.dense.nibbles import Nibbles
from mainstem.kernels.errors import LayoutError
from mainstem.kernels.experts.activate import gated_rows
from mainstem.kernels.experts.choose import choose, hopper_kernels
from mainstem.kernels.experts.combine import combine
from mainstem.kernels.experts.packed import choose_packed, packed_down, packed_gate_up
from mainstem.kernels.experts.products import (
    ExpertTiles,
    Method,
    down,
    gate_up,
    grouped_product,
)
from mainstem.kernels.experts.route import ExpertRouter, Routing, route
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.gpu.packed import Unpacked, pack_nibbles
from mainstem.models.packed import PackedWeight, Weight
from mainstem.models.spec import ExpertsSpec

if TYPE_CHECKING:
    from mainstem.kernels.experts.hopper import HopperProducts

Linear = Callable[[Tensor, Tensor], Tensor]  # (x [tokens, in], room for the output) -> output
MakeLinear = Callable[[Weight, Tensor | None], Linear]  # (weight [out, in], bias) -> Linear


@dataclass(frozen=True, slots=True)
class SharedSpace:
    """Buffers of the expert that all tokens go through."""

    both: Tensor  # [tokens, 2 * shared_size]
    act: Tensor  # [tokens, shared_size]
    out: Tensor  # [tokens, hidden]


@dataclass(frozen=True, slots=True)
class ExpertSpace:
    """Buffers for the experts of a step, made once for all layers of a model."""

    routing: Routing
    rows: Tensor  # [tokens * top_k, hidden]: outputs of experts; with Method.LIBRARY, inputs
    act: Tensor  # [tokens * top_k, size]
    shared: SharedSpace | None

    @classmethod
    def make(
        cls,
        spec: ExpertsSpec,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "ExpertSpace":
        def rows(count: int, width: int) -> Tensor:
            return torch.zeros((count, width), dtype=dtype, device=device)

        max_rows, shared = max_tokens * spec.top_k, None
        if spec.shared_size is not None:
            shared = SharedSpace(
                both=rows(max_tokens, 2 * spec.shared_size),
                act=rows(max_tokens, spec.shared_size),
                out=rows(max_tokens, hidden_size),
            )
        return cls(
            routing=Routing.make(spec.num_experts, spec.top_k, max_tokens, device),
            rows=rows(max_rows, hidden_size),
            act=rows(max_rows, spec.size),
            shared=shared,
        )


class SharedExpert:
    """The gated MLP that all tokens go through."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, space: SharedSpace) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._space = space

    def __call__(self, x: Tensor) -> Tensor:
        """Return [tokens, hidden], in a buffer of the space."""
        space, tokens = self._space, len(x)
        both = self._gate_up(x, space.both[:tokens])
        act = gated_rows(both, self._activation, space.act[:tokens])
        return self._down(act, space.out[:tokens])


class GpuExperts:
    """One layer's experts; the layers of a model share a space. `make_linear` is for the shared
    expert's products. `tiles` is for benchmarks; None: chosen by the number of rows. With
    is_deterministic, a token's output has the same bits as if it were alone, if the linears have
    this property.
    """

    def __init__(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        space: ExpertSpace,
        make_linear: MakeLinear,
        *,
        is_deterministic: bool = False,
        tiles: ExpertTiles | None = None,
    ) -> None:
        if is_deterministic and tiles is not None:
            raise LayoutError("tiles cannot be chosen for a deterministic layer")
        self._gate_up: Nibbles | Tensor
        self._down: Nibbles | Tensor
        self._gate_up, self._down = _packed_or_dense(tensors, space.rows.dtype)
        self.unpacked = _unpacked(tensors, self._gate_up, self._down)
        self._hopper = _hopper_of(self._gate_up, self._down, space.act)
        self._gate_up_bias, self._down_bias = tensors.gate_up_bias, tensors.down_bias
        self._spec = spec
        self._space = space
        self._is_deterministic = is_deterministic
        self._tiles = tiles
        self._activation = spec.activation.value
        self._scales = tensors.scales
        self.router = _router_of(tensors, spec)
        self._shared = _shared_of(tensors, spec, space, make_linear)

    def __call__(self, x: Tensor, out: Tensor, routed: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] -> out [tokens, hidden]; the two must not overlap. `routed` is what
        the router reads; None: x."""
        spec, space = self._spec, self._space
        num_rows = len(x) * spec.top_k
        tiles = self._tiles or self._choose(num_rows, x)
        route(x if routed is None else routed, self.router, space.routing, tiles.rows)
        if self._scales is not None:
            weights, ids = space.routing.weights[: len(x)], space.routing.ids[: len(x)]
            weights.mul_(self._scales.index_select(0, ids.view(-1)).view_as(weights))
        if tiles.method is Method.LIBRARY:
            rows = self._run_library(x, num_rows)
        elif tiles.method is Method.HOPPER:
            rows = self._run_hopper(x, num_rows)
        else:
            rows = self._run_ours(x, num_rows, tiles)
        shared = None if self._shared is None else self._shared(x)
        return combine(rows, space.routing, self._down_bias, shared, spec.has_shared_gate, out)

    def _choose(self, num_rows: int, x: Tensor) -> ExpertTiles:
        experts, is_deterministic = self._spec.num_experts, self._is_deterministic
        if isinstance(self._gate_up, Nibbles):
            return choose_packed(num_rows, experts, is_deterministic)
        return choose(num_rows, experts, x, is_deterministic)

    def _run_ours(self, x: Tensor, num_rows: int, tiles: ExpertTiles) -> Tensor:
        space, routing, bias = self._space, self._space.routing, self._gate_up_bias
        act, rows = space.act[:num_rows], space.rows[:num_rows]
        if isinstance(self._gate_up, Nibbles) and isinstance(self._down, Nibbles):
            packed_gate_up(x, routing, self._gate_up, bias, self._activation, tiles.gate_up, act)
            return packed_down(act, routing, self._down, tiles.down, rows)
        assert isinstance(self._gate_up, Tensor)
        assert isinstance(self._down, Tensor)
        gate_up(x, routing, self._gate_up, bias, self._activation, tiles.gate_up, act)
        return down(act, routing, self._down, tiles.down, rows)

    def _run_hopper(self, x: Tensor, num_rows: int) -> Tensor:
        assert self._hopper is not None
        routing, bias = self._space.routing, self._gate_up_bias
        self._hopper.gate_up(x, routing, bias, self._activation)
        return self._hopper.down(routing, self._space.rows[:num_rows])

    def _run_library(self, x: Tensor, num_rows: int) -> Tensor:
        assert isinstance(self._gate_up, Tensor)
        assert isinstance(self._down, Tensor)
        space, routing = self._space, self._space.routing
        rows, act = space.rows[:num_rows], space.act[:num_rows]
        torch.index_select(x, 0, routing.sorted_tokens[:num_rows], out=rows)
        both = grouped_product(rows, routing, self._gate_up)
        gated_rows(both, self._activation, act, self._gate_up_bias, routing.sorted_experts)
        return grouped_product(act, routing, self._down)


def _packed_or_dense(
    tensors: ExpertTensors, dtype: torch.dtype
) -> tuple[Nibbles, Nibbles] | tuple[Tensor, Tensor]:
    """Return both products in the form that the kernels read: packed if the kernels support both
    as 4-bit weights, dequantized otherwise."""
    gate_up, down = tensors.gate_up, tensors.down
    if isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
        packed = pack_nibbles(gate_up, dtype), pack_nibbles(down, dtype)
        if packed[0] is not None and packed[1] is not None:
            return packed[0], packed[1]
    return (
        gate_up if isinstance(gate_up, Tensor) else gate_up.dense(dtype),
        down if isinstance(down, Tensor) else down.dense(dtype),
    )


def _unpacked(
    tensors: ExpertTensors, gate_up: Nibbles | Tensor, down: Nibbles | Tensor
) -> Unpacked | None:
    """What was dequantized; None if the experts were plain, or are still packed."""
    before = (tensors.gate_up, tensors.down)
    if isinstance(gate_up, Nibbles) or isinstance(down, Nibbles):
        return None
    packed = [weight for weight in before if isinstance(weight, PackedWeight)]
    if not packed:
        return None
    stored_bytes = sum(weight.nbytes for weight in before)
    return Unpacked(packed[0].kind.value, stored_bytes, gate_up.nbytes + down.nbytes)


def _hopper_of(
    gate_up: Nibbles | Tensor, down: Nibbles | Tensor, act: Tensor
) -> "HopperProducts | None":
    """Return the products of hopper.py; None if it cannot run here."""
    kernels = hopper_kernels(act.device)
    if isinstance(gate_up, Nibbles) or isinstance(down, Nibbles) or kernels is None:
        return None
    return None if act.dtype == torch.float32 else kernels.HopperProducts(gate_up, down, act)


def _router_of(tensors: ExpertTensors, spec: ExpertsSpec) -> ExpertRouter:
    weight = tensors.router
    if tensors.shared_gate is not None:
        weight = torch.cat((weight, tensors.shared_gate))
    return ExpertRouter(
        weight, tensors.router_bias, spec.num_experts, spec.top_k, spec.is_normalized
    )


def _shared_of(
    tensors: ExpertTensors, spec: ExpertsSpec, space: ExpertSpace, make_linear: MakeLinear
) -> SharedExpert | None:
    if tensors.shared_gate_up is None or tensors.shared_down is None or space.shared is None:
        return None
    return SharedExpert(
        make_linear(tensors.shared_gate_up, None),
        make_linear(tensors.shared_down, None),
        spec.activation.value,
        space.shared,
    )
