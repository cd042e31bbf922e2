"""The tensors of a mixture of experts, in one form for every backend and every checkpoint.

A layer of experts is most of a model's memory, so it is made once where it is used and filled
expert by expert: loading holds the layer and one expert, never two copies of the layer. A rank has
some columns of every expert (models/shard.py); `size` is the number of those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mainstem.models.names import ExpertLayout, Names
from mainstem.models.shard import WHOLE, Shard
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
    down_bias: Tensor | None  # [experts, hidden]; of ranks the first has it
    shared_gate_up: Tensor | None = None  # [2 * shared_size, hidden]
    shared_down: Tensor | None = None  # [hidden, shared_size]
    shared_gate: Tensor | None = None  # [1, hidden]


def read_experts(
    source: WeightSource,
    spec: ExpertsSpec,
    hidden_size: int,
    prefix: str,
    names: Names,
    shard: Shard = WHOLE,
) -> ExpertTensors:
    """Take a layer's experts from `source`; `prefix` is the layer's, with its dot. `spec` is that
    of the whole model."""
    return _Reader(source, spec, hidden_size, prefix, names, shard).read()


class _Reader:
    def __init__(
        self,
        source: WeightSource,
        spec: ExpertsSpec,
        hidden_size: int,
        prefix: str,
        names: Names,
        shard: Shard,
    ) -> None:
        self._source = source
        self._spec = spec
        self._hidden = hidden_size
        self._prefix = prefix
        self._names = names
        self._shard = shard
        self._columns = shard.columns(spec.size)

    def read(self) -> ExpertTensors:
        spec, names = self._spec, self._names
        experts, hidden = spec.num_experts, self._hidden
        size = self._columns.stop - self._columns.start
        has_down_bias = spec.has_bias and self._shard.rank == 0
        router = self._take(f"{names.router}.weight", experts, hidden)
        gate_up = router.new_empty(experts, 2 * size, hidden)
        down = router.new_empty(experts, hidden, size)
        gate_up_bias = router.new_empty(experts, 2 * size) if spec.has_bias else None
        down_bias = router.new_empty(experts, hidden) if has_down_bias else None
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
        rows = (self._columns,)
        columns = (slice(0, hidden), self._columns)
        for expert in range(self._spec.num_experts):
            gate, up, out = (
                name.format(expert)
                for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            for name, part in zip((gate, up), gate_up[expert].chunk(2), strict=True):
                part.copy_(self._take(f"{name}.weight", size, hidden, at=rows))
            down[expert] = self._take(f"{out}.weight", hidden, size, at=columns)
            if gate_up_bias is not None:
                for name, part in zip((gate, up), gate_up_bias[expert].chunk(2), strict=True):
                    part.copy_(self._take(f"{name}.bias", size, at=rows))
                self._fill_down_bias(f"{out}.bias", down_bias, expert)

    def _fill_interleaved(
        self, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> None:
        names, size, hidden = self._names, self._spec.size, self._hidden
        experts = self._spec.num_experts
        in_turns = slice(2 * self._columns.start, 2 * self._columns.stop)
        for expert in range(experts):
            one = slice(expert, expert + 1)
            turns = (one, slice(0, hidden), in_turns)
            found = self._take(names.expert_gate, experts, hidden, 2 * size, at=turns)[0]
            gate, up = gate_up[expert].chunk(2)
            gate.copy_(found[:, 0::2].t())
            up.copy_(found[:, 1::2].t())
            del found  # before the next part is read
            at = (one, self._columns)
            down[expert] = self._take(names.expert_down, experts, size, hidden, at=at)[0].t()
        if gate_up_bias is not None:
            name, at = f"{names.expert_gate}_bias", (slice(0, experts), in_turns)
            biases = self._take(name, experts, 2 * size, at=at)
            gate, up = gate_up_bias.chunk(2, dim=1)
            gate.copy_(biases[:, 0::2])
            up.copy_(biases[:, 1::2])
            self._fill_down_bias(f"{names.expert_down}_bias", down_bias)

    def _fill_down_bias(self, name: str, biases: Tensor | None, expert: int | None = None) -> None:
        """All of them, or one expert's."""
        if biases is None:
            self._source.drop(self._prefix + name)
            return
        target = biases if expert is None else biases[expert]
        target.copy_(self._take(name, *target.shape))

    def _shared_gate_up(self, like: Tensor) -> Tensor | None:
        size = self._spec.shared_size
        if size is None:
            return None
        names: Sequence[str] = self._names.shared_gate_up
        columns = self._shard.columns(size)
        joined = like.new_empty(2 * (columns.stop - columns.start), self._hidden)
        for name, part in zip(names, joined.chunk(2), strict=True):
            part.copy_(self._take(f"{name}.weight", size, self._hidden, at=(columns,)))
        return joined

    def _shared_down(self) -> Tensor | None:
        size = self._spec.shared_size
        if size is None:
            return None
        at = (slice(0, self._hidden), self._shard.columns(size))
        return self._take(f"{self._names.shared_down}.weight", self._hidden, size, at=at)
