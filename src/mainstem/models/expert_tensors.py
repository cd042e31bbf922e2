"""The tensors of a mixture of experts, in one form for every backend and every checkpoint.

Experts are most of a model's memory, so a layer is allocated once, on its device, and filled expert
by expert: loading never needs two copies of a layer. Quantized experts stay packed; the shared
expert is read like any other product. A rank has some columns of every expert (models/shard.py);
in the shapes below, `size` is the number of columns of an expert that the rank has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.models.names import ExpertLayout, Names
from mainstem.models.packed import PackedStack, PackedWeight, Weight, on_top
from mainstem.models.rows import first_rows
from mainstem.models.shard import RankCut, length
from mainstem.models.spec import ExpertsSpec, MlpSpec
from mainstem.models.weights import WeightSource, take_weight


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Products as [.., out, in]; rows of gate_up: all of the gate, then all of up."""

    router: Tensor  # [experts, hidden]
    router_bias: Tensor | None  # [experts]
    gate_up: Weight  # [experts, 2 * size, hidden]
    gate_up_bias: Tensor | None  # [experts, 2 * size]
    down: Weight  # [experts, hidden, size]
    down_bias: Tensor | None  # [experts, hidden]; only rank 0 has it
    shared_gate_up: Weight | None = None  # [2 * shared_size, hidden]
    shared_down: Weight | None = None  # [hidden, shared_size]
    shared_gate: Tensor | None = None  # [1, hidden]
    scales: Tensor | None = None  # [experts] fp32 factors of the weights
    # whether experts are quantized in the checkpoint, but were dequantized to be stacked
    is_unpacked: bool = False


_WHOLE = RankCut()


def read_experts(
    source: WeightSource,
    spec: ExpertsSpec,
    hidden_size: int,
    prefix: str,
    names: Names,
    cut: RankCut = _WHOLE,
) -> ExpertTensors:
    """Take a layer's experts from `source`. `prefix` is the layer's prefix, with its dot; `spec`
    describes the whole model; `cut` says which part of it to read."""
    return _Reader(source, spec, hidden_size, prefix, names, cut).read()


class _Reader:
    def __init__(
        self,
        source: WeightSource,
        spec: ExpertsSpec,
        hidden_size: int,
        prefix: str,
        names: Names,
        cut: RankCut,
    ) -> None:
        self._source = source
        self._spec = spec
        self._hidden = hidden_size
        self._prefix = prefix
        self._names = names
        self._cut = cut
        self._columns = cut.columns(spec.size)
        self._is_unpacked = False

    def read(self) -> ExpertTensors:
        spec, names = self._spec, self._names
        experts, hidden = spec.num_experts, self._hidden
        router = self._dense(names.router, experts, hidden)
        gate_up_bias = down_bias = None
        if spec.has_bias:
            gate_up_bias = router.new_empty(experts, 2 * length(self._columns))
            if self._cut.shard.rank == 0:
                down_bias = router.new_empty(experts, hidden)
        if names.expert_layout is ExpertLayout.SEPARATE and self._has_stacked():
            gate_up, down = self._read_stacked(*names.stacked_experts)
        elif names.expert_layout is ExpertLayout.SEPARATE:
            gate_up, down = self._read_separate()
            self._fill_separate_biases(gate_up_bias, down_bias)
        elif names.expert_layout is ExpertLayout.STACKED:
            assert not spec.has_bias, "no family has stacked experts with biases"
            gate_up, down = self._read_stacked(names.expert_gate, names.expert_down)
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
            scales=self._scales() if spec.has_own_norms else None,
            is_unpacked=self._is_unpacked,
        )

    def _take(self, name: str, *shape: int, at: tuple[slice, ...] = ()) -> Tensor:
        return self._source.take(self._prefix + name, shape, at)

    def _scales(self) -> Tensor:
        name = self._prefix + self._names.expert_scales
        return self._source.take_wide(name, (self._spec.num_experts,))

    def _weight(self, name: str, *shape: int, at: tuple[slice, ...] = ()) -> Weight:
        return take_weight(self._source, self._prefix + name, *shape, at=at)

    def _down(self, name: str, size: int) -> Weight:
        """The rank's columns of a product [hidden, size]."""
        at = (slice(0, self._hidden), self._cut.columns(size))
        return self._weight(name, self._hidden, size, at=() if at[1] == slice(0, size) else at)

    def _dense(self, name: str, *shape: int) -> Tensor:
        weight = self._weight(name, *shape)
        return weight if isinstance(weight, Tensor) else weight.dense(self._source.dtype)

    def _joined(self, *weights: Weight) -> Weight:
        """The weights stacked along their rows."""
        whole = on_top(weights, self._source.dtype)
        self._note(weights, whole)
        return whole

    def _stackable(self, *weights: Weight) -> Weight:
        """Like `_joined`, but weights in act-order are dequantized, since each expert would need
        its own order."""
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
            both = (self._weight(name, size, hidden, at=(self._columns,)) for name in (gate, up))
            gate_up.put(expert, self._stackable(*both))
            down.put(expert, self._stackable(self._down(out, size)))
        return gate_up.whole, down.whole

    def _stack(self) -> PackedStack:
        return PackedStack(self._spec.num_experts, self._source.dtype)

    def _fill_separate_biases(self, gate_up: Tensor | None, down: Tensor | None) -> None:
        names, size = self._names, self._spec.size
        if gate_up is None:
            return
        for expert in range(self._spec.num_experts):
            both = (names.expert_gate, names.expert_up)
            for name, part in zip(both, gate_up[expert].chunk(2), strict=True):
                part.copy_(self._take(f"{name.format(expert)}.bias", size, at=(self._columns,)))
            target = None if down is None else down[expert]
            self._fill_down_bias(f"{names.expert_down.format(expert)}.bias", target)

    def _fill_down_bias(self, name: str, target: Tensor | None) -> None:
        if target is None:
            self._source.drop(self._prefix + name)
        else:
            target.copy_(self._take(name, *target.shape))

    def _has_stacked(self) -> bool:
        """Whether the files have stacked experts although most files of the family have separate
        ones, or the other way round: versions of transformers write both (Qwen 3.5)."""
        return self._source.has(self._prefix + self._names.stacked_experts[0])

    def _read_stacked(self, gate_up_name: str, down_name: str) -> tuple[Weight, Weight]:
        size, hidden, experts = self._spec.size, self._hidden, self._spec.num_experts
        gate_up, down = self._stack(), self._stack()
        up = slice(size + self._columns.start, size + self._columns.stop)
        for expert in range(experts):
            one = slice(expert, expert + 1)
            both = (
                self._take(gate_up_name, experts, 2 * size, hidden, at=(one, part))[0]
                for part in (self._columns, up)
            )
            gate_up.put(expert, torch.cat(tuple(both)))
            at = (one, slice(0, hidden), self._columns)
            down.put(expert, self._take(down_name, experts, hidden, size, at=at)[0])
        return gate_up.whole, down.whole

    def _read_interleaved(self) -> tuple[Weight, Weight]:
        """Read tensors with interleaved gate and up: packed ones are [experts, out, in], plain ones
        [experts, in, out]."""
        names, size, hidden = self._names, self._spec.size, self._hidden
        experts, count = self._spec.num_experts, length(self._columns)
        gate_up, down = self._stack(), self._stack()
        gates_first = torch.cat((torch.arange(0, 2 * count, 2), torch.arange(1, 2 * count, 2)))
        both, all_hidden = self._in_turns, slice(0, hidden)
        for expert in range(experts):
            one = slice(expert, expert + 1)
            in_turns = self._one_packed(names.expert_gate, experts, 2 * size, hidden, (one, both))
            if in_turns is not None:
                gate_up.put(expert, in_turns.rows_at(gates_first.to(in_turns.device)))
            else:
                at = (one, all_hidden, both)
                found = self._take(names.expert_gate, experts, hidden, 2 * size, at=at)[0]
                gate_up.put(expert, torch.cat((found[:, 0::2].t(), found[:, 1::2].t())))
                del found  # frees memory before the next part is read
            at = (one, all_hidden, self._columns)
            out = self._one_packed(names.expert_down, experts, hidden, size, at)
            if out is not None:
                down.put(expert, out)
            else:
                plain = self._take(
                    names.expert_down, experts, size, hidden, at=(one, self._columns)
                )
                down.put(expert, plain[0].t())
        return gate_up.whole, down.whole

    @property
    def _in_turns(self) -> slice:
        """The rank's columns of a tensor in which gate and up alternate."""
        return slice(2 * self._columns.start, 2 * self._columns.stop)

    def _one_packed(
        self, name: str, experts: int, out: int, width: int, at: tuple[slice, ...]
    ) -> PackedWeight | None:
        found = self._source.take_packed(self._prefix + name, (experts, out, width), at)
        return None if found is None else found.expert(0)

    def _fill_interleaved_biases(self, gate_up: Tensor | None, down: Tensor | None) -> None:
        if gate_up is None:
            return
        names, experts = self._names, self._spec.num_experts
        at = (slice(0, experts), self._in_turns)
        biases = self._take(f"{names.expert_gate}_bias", experts, 2 * self._spec.size, at=at)
        gate, up = gate_up.chunk(2, dim=1)
        gate.copy_(biases[:, 0::2])
        up.copy_(biases[:, 1::2])
        self._fill_down_bias(f"{names.expert_down}_bias", down)

    def _shared_gate_up(self) -> Weight | None:
        size = self._spec.shared_size
        if size is None:
            return None
        mlp = MlpSpec(size, self._spec.activation)
        rows = first_rows(mlp, self._cut.columns(size), self._names.shared_gate_up)
        return self._joined(
            *(self._weight(row.name, row.whole, self._hidden, at=(row.part,)) for row in rows)
        )

    def _shared_down(self) -> Weight | None:
        size = self._spec.shared_size
        return None if size is None else self._down(self._names.shared_down, size)
