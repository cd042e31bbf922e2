"""Recurrent layers of a step, on any device: the kernels of a backend over the slots of states."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mainstem.core.step import StateUse, Step
from mainstem.kernels.recurrent.rows import NUM_PACKED, LayerRows, RowUse, pack_rows, row_width
from mainstem.kernels.recurrent.segments import Segments, make_segments, make_serial_segments
from mainstem.kv.states import NO_STATE
from mainstem.models.block import Attention
from mainstem.models.recurrence import DeltaSpec, GateOrder, MambaSpec
from mainstem.models.recurrent_tensors import RecurrentTensors
from mainstem.models.spec import ModelSpec
from mainstem.runner.states import DeviceStates
from mainstem.runner.uploads import Uploads


class Kept(NamedTuple):
    """What the sequences of a step keep in one layer."""

    conv: Tensor
    matrix: Tensor
    rows: LayerRows | None  # None: no sequence of the step has rows


class Recurrence:
    """The recurrent layers of a decoder. `kernels` is a backend of kernels/recurrent. On a GPU, if
    deterministic, all tokens are computed one after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Sequence[RecurrentTensors],
        states: DeviceStates,
        kernels: ModuleType,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self.states = states
        self.is_deterministic = is_deterministic
        self._kernels = kernels
        self._layers = list(zip(spec.recurrences, tensors, states.layers, strict=True))
        self._eps = spec.norm.eps

    def step_segments(self, step: Step, device: torch.device) -> Segments:
        """The segments of a step."""
        use = step.states
        assert use is not None, "a step says nothing of states"
        found = (use.segment_starts, use.writes, use.seq_segments, use.reads)
        if self.is_deterministic:
            assert use.rows is None, "rows have no place in a deterministic step"
            return make_serial_segments(*found, device)
        rows = None
        if use.rows is not None and use.counts is not None:
            rows = (use.rows, use.counts)
        return make_segments(*found, step.num_decodes, device, rows)

    def one_prompt(self, num_tokens: int, slot: int, device: torch.device) -> Segments:
        """The segments of one sequence that begins with its first token and writes its state to
        `slot`."""
        reads, writes = np.full(1, NO_STATE, np.int32), np.full(1, slot, np.int32)
        found = (np.array([0, num_tokens], np.int32), writes, np.array([0, 1], np.int32), reads)
        if self.is_deterministic:
            return make_serial_segments(*found, device)
        return make_segments(*found, 0, device)

    def prompt_with_rows(self, num_tokens: int, device: torch.device) -> Segments:
        """Likewise of up to `num_tokens` that become rows after a state, in slots that only padding
        uses."""
        num_rows, last = self.states.rows[0].sums.shape[2], len(self.states.rows[0].sums) - 1
        reads, writes = np.full(1, self.states.num_states, np.int32), np.full(1, -1, np.int32)
        starts = np.array([0, min(num_tokens, num_rows)], np.int32)
        rows = (np.full(1, last, np.int32), np.zeros(1, np.int32))
        return make_segments(starts, writes, np.array([0, 1], np.int32), reads, 0, device, rows)

    def run(
        self,
        number: int,
        first: Tensor,
        segments: Segments,
        num_tokens: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run recurrent layer `number` on the output of its first product; returns the input of its
        second product, [rows, out_width], which is `out` if that is given. Rows after `num_tokens`
        are padding: they give zeros."""
        spec, tensors, state = self._layers[number]
        if out is None:
            out = first.new_empty(len(first), spec.out_width)
        if len(first) > num_tokens:
            out[num_tokens:].zero_()
        kept = Kept(*state, None if segments.rows is None else self.states.rows[number])
        first, new = first[:num_tokens], out[:num_tokens]
        if isinstance(spec, DeltaSpec):
            self._delta(spec, tensors, kept, first, segments, new)
        elif isinstance(spec, MambaSpec):
            self._mamba(spec, tensors, kept, first, segments, new)
        else:
            before, after, x = first.chunk(3, dim=1)
            self._convolve(tensors, kept, before * x, segments, new, is_activated=False)
            new.mul_(after)
        return out

    def _convolve(
        self,
        tensors: RecurrentTensors,
        kept: Kept,
        x: Tensor,
        segments: Segments,
        out: Tensor,
        *,
        is_activated: bool = True,
    ) -> None:
        self._kernels.convolve(
            x, tensors.conv, tensors.conv_bias, segments, kept.conv, out, is_activated, kept.rows
        )

    def _delta(
        self,
        spec: DeltaSpec,
        tensors: RecurrentTensors,
        kept: Kept,
        first: Tensor,
        segments: Segments,
        out: Tensor,
    ) -> None:
        tokens, keys, values = len(first), spec.key_heads * spec.key_dim, spec.out_width
        inputs, gate, b, a = torch.split(
            first, [spec.conv_channels, values, spec.value_heads, spec.value_heads], dim=1
        )
        mixed = first.new_empty(tokens, spec.conv_channels)
        self._convolve(tensors, kept, inputs, segments, mixed)
        q, k, v = torch.split(mixed, [keys, keys, values], dim=1)
        self._kernels.delta_rule(
            q.view(tokens, -1, spec.key_dim),
            k.view(tokens, -1, spec.key_dim),
            v.view(tokens, -1, spec.value_dim),
            a,
            b,
            tensors.decay,
            tensors.dt_bias,
            segments,
            kept.matrix,
            out.view(tokens, spec.value_heads, spec.value_dim),
            kept.rows,
        )
        self._gated_norm(out, gate, tensors.gain, spec.value_dim, GateOrder.NORM_FIRST)

    def _mamba(
        self,
        spec: MambaSpec,
        tensors: RecurrentTensors,
        kept: Kept,
        first: Tensor,
        segments: Segments,
        out: Tensor,
    ) -> None:
        tokens, width, shared = len(first), spec.out_width, spec.groups * spec.state_dim
        inputs, gate, dt = torch.split(first, [spec.conv_channels, width, spec.heads], dim=1)
        mixed = first.new_empty(tokens, spec.conv_channels)
        self._convolve(tensors, kept, inputs, segments, mixed)
        x, b, c = torch.split(mixed, [width, shared, shared], dim=1)
        self._kernels.mamba_scan(
            x.view(tokens, -1, spec.head_dim),
            b.view(tokens, -1, spec.state_dim),
            c.view(tokens, -1, spec.state_dim),
            dt,
            tensors.decay,
            tensors.dt_bias,
            tensors.skip,
            spec.dt_limits,
            segments,
            kept.matrix,
            out.view(tokens, spec.heads, spec.head_dim),
            kept.rows,
        )
        self._gated_norm(out, gate, tensors.gain, width // spec.norm_groups, spec.gate_order)

    def _gated_norm(
        self, x: Tensor, gate: Tensor, gain: Tensor | None, group: int, order: GateOrder
    ) -> None:
        """In place."""
        if order is GateOrder.NO_NORM:
            x.mul_(torch.nn.functional.silu(gate))
            return
        is_gate_first = order is GateOrder.GATE_FIRST
        self._kernels.gated_norm(x, gate, gain, self._eps, x, group=group, gate_first=is_gate_first)


class DecodeStates:
    """The slots of steps that only decode, in buffers at fixed addresses for CUDA graphs. Padding
    uses the slot after the last one."""

    def __init__(
        self, max_tokens: int, num_states: int, device: torch.device, *, is_serial: bool = False
    ) -> None:
        """is_serial: see Segments."""
        self.trash = num_states
        self._is_serial = is_serial
        self._numbers = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self._slots = torch.zeros((2, max_tokens), dtype=torch.int32, device=device)
        self._rows = torch.zeros(
            (NUM_PACKED, row_width(max_tokens)), dtype=torch.int32, device=device
        )
        self._uploads = Uploads(device)

    def clear(self, size: int) -> None:
        """Set `size` decodes that all are padding. A graph is captured over these: it runs once
        before, and must neither write where anything is kept nor read numbers of another size."""
        nobody = np.empty(0, np.int32)
        self._send(StateUse(nobody, nobody, nobody, nobody, nobody, nobody), size)

    def send(self, step: Step, size: int) -> None:
        """Set the slots of a step of up to `size` decodes."""
        assert step.states is not None, "a step says nothing of states"
        self._send(step.states, size)

    def _send(self, use: StateUse, size: int) -> None:
        slots = np.full((2, size), self.trash, np.int32)
        slots[0, : len(use.reads)] = use.reads
        slots[1, : len(use.writes)] = use.writes
        self._slots[:, :size].copy_(self._uploads.send(slots))
        if use.rows is None or use.counts is None:
            return
        rows = np.full(size, NO_STATE, np.int32)
        counts = np.zeros(size, np.int32)
        rows[: len(use.rows)], counts[: len(use.counts)] = use.rows, use.counts
        packed = pack_rows(rows, counts, *slots)
        self._rows[:, : packed.shape[1]].copy_(self._uploads.send(packed))

    def segments(self, size: int, *, has_rows: bool = False) -> Segments:
        """The segments of `size` decodes; some of them may have rows if `has_rows`."""
        ones = self._numbers[: size + 1]
        reads, writes = self._slots[:, :size]
        num_decodes = 0 if self._is_serial else size
        rows = None
        if has_rows:
            rows = RowUse.of_graph(self._rows[:, : row_width(size)], size)
        return Segments(ones, writes, ones, reads, num_decodes, size, 1, rows=rows)


class HybridAttention:
    """Runs each layer of a model that has both: attention, a recurrence, or both side by side."""

    def __init__(
        self,
        spec: ModelSpec,
        attention: Attention,
        recurrence: Recurrence,
        segments: Segments,
        num_tokens: int,
        room: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """`room` returns memory for the output of a recurrence, by rows and columns, where
        that of attention is, too; None: new memory."""
        self._room = room
        self._page_layers, self._state_layers = spec.page_layers, spec.state_layers
        self._recurrences = spec.recurrences
        self._attention = attention
        self._recurrence = recurrence
        self._segments = segments
        self._num_tokens = num_tokens

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See Attention.run in models/block.py."""
        page, state = self._page_layers[layer], self._state_layers[layer]
        if state is None:
            assert page is not None, "a layer without attention and recurrence"
            return self._attention.run(page, qkv)
        if page is None:
            out = None
            if self._room is not None:
                out = self._room(len(qkv), self._recurrences[state].out_width)
            return self._recurrence.run(state, qkv, self._segments, self._num_tokens, out)
        width = qkv.shape[1] - self._recurrences[state].first_width
        of_attention = qkv[:, :width].contiguous()  # it is rotated in place
        recurred = self._recurrence.run(state, qkv[:, width:], self._segments, self._num_tokens)
        return torch.cat((self._attention.run(page, of_attention), recurred), dim=1)
