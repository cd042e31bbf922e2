"""The tensors of a mixture of experts, in one form for every backend and every checkpoint.

A layer of experts is most of a model's memory, so it is made once where it is used and filled
expert by expert: loading holds the layer and one expert, never two copies of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mainstem.models.names import ExpertLayout, Names
from mainstem.models.spec import ExpertsSpec
from mainstem.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Products as [.., out, in]; rows of gate_up: all of the gate, then all of up."""

    router: Tensor  # [experts, hidden]
    router_bias: Tensor | None  # [experts]
    gate_up: Tensor  # [experts, 2 * size, hidden]
    gate_up_bias: Tensor | None  # [experts, 2 * size]
    down: Tensor  # [experts, hidden, size]
    down_bias: Tensor | None  # [experts, hidden]
    shared_gate_up: Tensor | None = None  # [2 * shared_size, hidden]
    shared_down: Tensor | None = None  # [hidden, shared_size]
    shared_gate: Tensor | None = None  # [1, hidden]


def read_experts(
    source: WeightSource, spec: ExpertsSpec, hidden_size: int, prefix: str, names: Names
) -> ExpertTensors:
    """Take a layer's experts from `source`; `prefix` is the layer's, with its dot."""
    return _Reader(source, spec, hidden_size, prefix, names).read()


class _Reader:
    def __init__(
        self, source: WeightSource, spec: ExpertsSpec, hidden_size: int, prefix: str, names: Names
    ) -> None:
        self._source = source
        self._spec = spec
        self._hidden = hidden_size
        self._prefix = prefix
        self._names = names

    def read(self) -> ExpertTensors:
        spec, names = self._spec, self._names
        experts, size, hidden = spec.num_experts, spec.size, self._hidden
        router = self._take(f"{names.router}.weight", experts, hidden)
        gate_up = router.new_empty(experts, 2 * size, hidden)
        down = router.new_empty(experts, hidden, size)
        gate_up_bias = router.new_empty(experts, 2 * size) if spec.has_bias else None
        down_bias = router.new_empty(experts, hidden) if spec.has_bias else None
        if names.expert_layout is ExpertLayout.SEPARATE:
            self._fill_separate(gate_up, gate_up_bias, down, down_bias)
        else:
            self._fill_interleaved(gate_up, gate_up_bias, down, down_bias)
        return ExpertTensors(
            router=router,
            router_bias=self._take(f"{names.router}.bias", experts) if spec.has_bias else None,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            shared_gate_up=self._shared_gate_up(router),
            shared_down=self._shared_down(),
            shared_gate=self._take(f"{names.shared_gate}.weight", 1, hidden)
            if spec.has_shared_gate
            else None,
        )

    def _take(self, name: str, *shape: int, at: tuple[slice, ...] = ()) -> Tensor:
        return self._source.take(self._prefix + name, shape, at)

    def _fill_separate(
        self, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> None:
        names, size, hidden = self._names, self._spec.size, self._hidden
        for expert in range(self._spec.num_experts):
            gate, up, out = (
                name.format(expert)
                for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            gate_up[expert, :size] = self._take(f"{gate}.weight", size, hidden)
            gate_up[expert, size:] = self._take(f"{up}.weight", size, hidden)
            down[expert] = self._take(f"{out}.weight", hidden, size)
            if gate_up_bias is not None and down_bias is not None:
                gate_up_bias[expert, :size] = self._take(f"{gate}.bias", size)
                gate_up_bias[expert, size:] = self._take(f"{up}.bias", size)
                down_bias[expert] = self._take(f"{out}.bias", hidden)

    def _fill_interleaved(
        self, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> None:
        names, size, hidden = self._names, self._spec.size, self._hidden
        experts = self._spec.num_experts
        for expert in range(experts):
            at = (slice(expert, expert + 1),)
            in_turns = self._take(names.expert_gate, experts, hidden, 2 * size, at=at)[0]
            gate_up[expert, :size] = in_turns[:, 0::2].t()
            gate_up[expert, size:] = in_turns[:, 1::2].t()
            del in_turns  # before the next part is read
            down[expert] = self._take(names.expert_down, experts, size, hidden, at=at)[0].t()
        if gate_up_bias is not None and down_bias is not None:
            biases = self._take(f"{names.expert_gate}_bias", experts, 2 * size)
            gate_up_bias[:, :size] = biases[:, 0::2]
            gate_up_bias[:, size:] = biases[:, 1::2]
            down_bias.copy_(self._take(f"{names.expert_down}_bias", experts, hidden))

    def _shared_gate_up(self, like: Tensor) -> Tensor | None:
        size = self._spec.shared_size
        if size is None:
            return None
        names: Sequence[str] = self._names.shared_gate_up
        joined = like.new_empty(2 * size, self._hidden)
        for name, rows in zip(names, joined.chunk(len(names)), strict=True):
            rows.copy_(self._take(f"{name}.weight", *rows.shape))
        return joined

    def _shared_down(self) -> Tensor | None:
        size = self._spec.shared_size
        if size is None:
            return None
        return self._take(f"{self._names.shared_down}.weight", self._hidden, size)
