"""The tensors of a mixture of experts, in one form for every backend and every checkpoint.

A layer of experts is most of a model's memory, so it is made once where it is used and filled
expert by expert: loading holds the layer and one expert, never two copies of the layer. Quantized
experts stay packed; the shared one is a product like others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.models.names import ExpertLayout, Names
from mainstem.models.packed import PackedStack, PackedWeight, Weight, on_top
from mainstem.models.spec import ExpertsSpec
from mainstem.models.weights import WeightSource, take_weight


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Products as [.., out, in]; rows of gate_up: all of the gate, then all of up."""

    router: Tensor  # [experts, hidden]
    router_bias: Tensor | None  # [experts]
    gate_up: Weight  # [experts, 2 * size, hidden]
    gate_up_bias: Tensor | None  # [experts, 2 * size]
    down: Weight  # [experts, hidden, size]
    down_bias: Tensor | None  # [experts, hidden]
    shared_gate_up: Weight | None = None  # [2 * shared_size, hidden]
    shared_down: Weight | None = None  # [hidden, shared_size]
    shared_gate: Tensor | None = None  # [1, hidden]
    is_unpacked: bool = False  # quantized in the checkpoint, but not in a way that can be stacked


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
        self._is_unpacked = False

    def read(self) -> ExpertTensors:
        spec, names = self._spec, self._names
        experts, size, hidden = spec.num_experts, spec.size, self._hidden
        router = self._dense(names.router, experts, hidden)
        gate_up_bias = router.new_empty(experts, 2 * size) if spec.has_bias else None
        down_bias = router.new_empty(experts, hidden) if spec.has_bias else None
        if names.expert_layout is ExpertLayout.SEPARATE:
            gate_up, down = self._read_separate()
            self._fill_separate_biases(gate_up_bias, down_bias)
        else:
            gate_up, down = self._read_interleaved()
            self._fill_interleaved_biases(gate_up_bias, down_bias)
        return ExpertTensors(
            router=router,
            router_bias=self._take(f"{names.router}.bias", experts) if spec.has_bias else None,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            shared_gate_up=self._shared_gate_up(),
            shared_down=self._shared_down(),
            shared_gate=self._dense(names.shared_gate, 1, hidden) if spec.has_shared_gate else None,
            is_unpacked=self._is_unpacked,
        )

    def _take(self, name: str, *shape: int, at: tuple[slice, ...] = ()) -> Tensor:
        return self._source.take(self._prefix + name, shape, at)

    def _weight(self, name: str, *shape: int) -> Weight:
        return take_weight(self._source, self._prefix + name, *shape)

    def _dense(self, name: str, *shape: int) -> Tensor:
        weight = self._weight(name, *shape)
        return weight if isinstance(weight, Tensor) else weight.dense(self._source.dtype)

    def _joined(self, *weights: Weight) -> Weight:
        """On top of each other."""
        whole = on_top(weights, self._source.dtype)
        self._note(weights, whole)
        return whole

    def _stackable(self, *weights: Weight) -> Weight:
        """Likewise; dequantized in act-order, for experts would need an order each."""
        whole = on_top(weights, self._source.dtype)
        if isinstance(whole, PackedWeight) and whole.order is not None:
            whole = whole.dense(self._source.dtype)
        self._note(weights, whole)
        return whole

    def _note(self, parts: Sequence[Weight], whole: Weight) -> None:
        was_packed = any(isinstance(part, PackedWeight) for part in parts)
        self._is_unpacked |= was_packed and isinstance(whole, Tensor)

    def _read_separate(self) -> tuple[Weight, Weight]:
        names, size, hidden = self._names, self._spec.size, self._hidden
        gate_up, down = self._stack(), self._stack()
        for expert in range(self._spec.num_experts):
            gate, up, out = (
                name.format(expert)
                for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            gate_up.put(
                expert,
                self._stackable(self._weight(gate, size, hidden), self._weight(up, size, hidden)),
            )
            down.put(expert, self._stackable(self._weight(out, hidden, size)))
        return gate_up.whole, down.whole

    def _stack(self) -> PackedStack:
        return PackedStack(self._spec.num_experts, self._source.dtype)

    def _fill_separate_biases(self, gate_up: Tensor | None, down: Tensor | None) -> None:
        names, size, hidden = self._names, self._spec.size, self._hidden
        if gate_up is None or down is None:
            return
        for expert in range(self._spec.num_experts):
            gate_up[expert, :size] = self._take(f"{names.expert_gate.format(expert)}.bias", size)
            gate_up[expert, size:] = self._take(f"{names.expert_up.format(expert)}.bias", size)
            down[expert] = self._take(f"{names.expert_down.format(expert)}.bias", hidden)

    def _read_interleaved(self) -> tuple[Weight, Weight]:
        """Packed ones lie as [experts, out, in], others as [experts, in, out]."""
        names, size, hidden = self._names, self._spec.size, self._hidden
        experts = self._spec.num_experts
        gate_up, down = self._stack(), self._stack()
        gates_first = torch.cat((torch.arange(0, 2 * size, 2), torch.arange(1, 2 * size, 2)))
        for expert in range(experts):
            at = (slice(expert, expert + 1),)
            in_turns = self._one_packed(names.expert_gate, experts, 2 * size, hidden, at)
            if in_turns is not None:
                gate_up.put(expert, in_turns.rows_at(gates_first.to(in_turns.device)))
            else:
                found = self._take(names.expert_gate, experts, hidden, 2 * size, at=at)[0]
                gate_up.put(expert, torch.cat((found[:, 0::2].t(), found[:, 1::2].t())))
                del found  # before the next part is read
            out = self._one_packed(names.expert_down, experts, hidden, size, at)
            if out is not None:
                down.put(expert, out)
            else:
                plain = self._take(names.expert_down, experts, size, hidden, at=at)
                down.put(expert, plain[0].t())
        return gate_up.whole, down.whole

    def _one_packed(
        self, name: str, experts: int, out: int, width: int, at: tuple[slice, ...]
    ) -> PackedWeight | None:
        found = self._source.take_packed(self._prefix + name, (experts, out, width), at)
        return None if found is None else found.expert(0)

    def _fill_interleaved_biases(self, gate_up: Tensor | None, down: Tensor | None) -> None:
        if gate_up is None or down is None:
            return
        names, (experts, both) = self._names, gate_up.shape
        biases = self._take(f"{names.expert_gate}_bias", experts, both)
        gate_up[:, : both // 2] = biases[:, 0::2]
        gate_up[:, both // 2 :] = biases[:, 1::2]
        down.copy_(self._take(f"{names.expert_down}_bias", experts, self._hidden))

    def _shared_gate_up(self) -> Weight | None:
        size = self._spec.shared_size
        if size is None:
            return None
        names = self._names.shared_gate_up
        rows = 2 * size // len(names)
        return self._joined(*(self._weight(name, rows, self._hidden) for name in names))

    def _shared_down(self) -> Weight | None:
        size = self._spec.shared_size
        if size is None:
            return None
        return self._weight(self._names.shared_down, self._hidden, size)
