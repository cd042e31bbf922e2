"""Steps of recurrent layers for tests, and how close answers must be."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.kernels.recurrent import reference
from mainstem.kernels.recurrent.rows import LayerRows, RowUse, pack_rows
from mainstem.kernels.recurrent.segments import Segments, make_segments, make_serial_segments

SLOTS = 24
ROW_SLOTS = 12
Ints = NDArray[np.int32]
# Relative to the largest value of the answer. fp32: sums of some hundred products in another order.
# 16 bits: the answer is rounded, by 2^-9 or 2^-12 of a value.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# Kernels for GPUs also round the state, the scores and the solution of the triangular system before
# they multiply them, and the interpreter truncates bf16.
TRITON_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Part:
    """A sequence of a step: the lengths of its segments, the slot it reads, those it writes; the
    slot of its rows and their number."""

    lengths: tuple[int, ...]
    read: int
    writes: tuple[int, ...]
    row_slot: int = -1
    count: int = 0


def a_step(*parts: Part, num_decodes: int = 0) -> Segments:
    slots = np.array([part.row_slot for part in parts], np.int32)
    counts = np.array([part.count for part in parts], np.int32)
    return make_segments(*_arrays(parts), num_decodes, rows=(slots, counts))


def graph_step(*parts: Part, padding: int = 0) -> Segments:
    """A step of decodes as in a CUDA graph, with padding, which uses the last slot."""
    padded = [*parts, *[Part((1,), SLOTS - 1, (SLOTS - 1,))] * padding]
    slots, counts, reads, writes = np.array(
        [(part.row_slot, part.count, part.read, part.writes[0]) for part in padded], np.int32
    ).T
    ones = torch.arange(len(padded) + 1, dtype=torch.int32)
    packed = torch.from_numpy(pack_rows(slots, counts, reads, writes))
    rows = RowUse.of_graph(packed, len(padded))
    slots_read, slots_written = (torch.from_numpy(part.copy()) for part in (reads, writes))
    return Segments(ones, slots_written, ones, slots_read, len(padded), len(padded), 1, rows=rows)


def a_row_decode(read: int, row_slot: int, count: int, write: int = -1) -> Part:
    return Part((1,), read, (write,), row_slot, count)


def a_serial_step(*parts: Part) -> Segments:
    """Whose tokens are computed one after the other."""
    return make_serial_segments(*_arrays(parts))


def _arrays(parts: tuple[Part, ...]) -> tuple[Ints, Ints, Ints, Ints]:
    lengths = [n for part in parts for n in part.lengths]
    return (
        np.cumsum([0, *lengths], dtype=np.int32),
        np.array([slot for part in parts for slot in part.writes], dtype=np.int32),
        np.cumsum([0, *(len(part.lengths) for part in parts)], dtype=np.int32),
        np.array([part.read for part in parts], dtype=np.int32),
    )


# Decodes come first. Slots 0 to 7 are read only; 8 and more are written by one sequence.
STEPS: dict[str, tuple[tuple[Part, ...], int]] = {
    "decodes": (
        (Part((1,), 8, (8,)), Part((1,), 3, (9,)), Part((1,), 3, (10,)), Part((1,), -1, (11,))),
        4,
    ),
    "one token, not a decode": ((Part((1,), 8, (8,)), Part((1,), -1, (9,))), 0),
    "one token a segment": ((Part((1, 1, 1, 1, 1), 8, (9, 10, 11, 12, 8)),), 0),
    "in place": ((Part((3, 70), 8, (9, 8)), Part((2,), 10, (10,))), 0),
    "first segment in place": ((Part((1, 5), 8, (8, 9)), Part((2, 1, 1), 10, (11, 10, 12))), 0),
    "from zeros": ((Part((1,), -1, (8,)), Part((2, 66), -1, (9, 10)), Part((64,), -1, (11,))), 1),
    "mixed": (
        (Part((1,), 8, (8,)), Part((1,), 0, (9,)), Part((5, 2, 20), 0, (10, 11, 12)),
         Part((65,), -1, (13,)), Part((1, 30), 14, (15, 14)), Part((2,), 1, (16,))),
        2,
    ),
}  # fmt: skip
# Slots 0 to 7 are bases; row slots belong to one sequence.
ROW_STEPS: dict[str, tuple[tuple[Part, ...], int]] = {
    "one sequence": ((a_row_decode(3, 0, 5),), 1),
    "no rows yet": ((a_row_decode(3, 0, 0), a_row_decode(-1, 1, 0)), 2),
    "siblings": (tuple(a_row_decode(2, n, (0, 1, 7, 15)[n]) for n in range(4)), 4),
    "several bases": (
        tuple(a_row_decode((4, 2, 4, -1, 2, 4)[n], n, (3, 15, 0, 2, 9, 1)[n]) for n in range(6)),
        6,
    ),
    "folds": (
        (a_row_decode(2, 0, 3, 8), a_row_decode(2, 1, 15), a_row_decode(9, 2, 14, 9),
         a_row_decode(-1, 3, 2, 10), a_row_decode(5, 4, 0, 11)),
        5,
    ),
    "mixed": (
        (a_row_decode(2, 0, 3), Part((1,), 8, (8,)), a_row_decode(2, 5, 6, 9),
         Part((1,), 2, (10,)), a_row_decode(7, 3, 1),
         Part((13,), 2, (-1,), 6), Part((5, 20), 2, (11, 12)), Part((1,), -1, (-1,), 7),
         Part((16,), 1, (-1,), 1)),
        5,
    ),
}  # fmt: skip
LONG_STEP = (Part((1,), 0, (8,)), Part((700, 129), -1, (9, 10)), Part((513,), 1, (1,))), 1


@dataclass(frozen=True)
class Shape:
    """Heads and dims of a recurrent layer; of a Mamba-2 layer keys are states, values heads."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32


@dataclass
class Case:
    """Arguments of an operation on one step. `run` calls it, on copies of the states."""

    name: str
    args: dict[str, object]
    states: Tensor | None
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    rows: LayerRows | None = None

    def run(self, operations: object) -> tuple[Tensor, Tensor]:
        """Return the output and the states after the step; inputs must not change."""
        out, states, _ = self.run_rows(operations)
        return out, states

    def run_rows(self, operations: object) -> tuple[Tensor, Tensor, LayerRows | None]:
        """Likewise, and the rows after the step."""
        before = {k: v.clone() for k, v in self.args.items() if isinstance(v, Tensor)}
        out = torch.full(self.out_shape, float("nan"), dtype=self.dtype)
        args = dict(self.args)
        states = torch.empty(0)
        if self.states is not None:
            states = self.states.clone()
            args["conv" if self.name == "convolve" else "matrix"] = states
        rows = self.rows
        if rows is not None:
            args["rows"] = rows = LayerRows(*(part.clone() for part in rows))
        getattr(operations, self.name)(**args, out=out)
        for key, value in before.items():
            assert torch.equal(value, self.args[key]), f"{key} was changed"  # type: ignore[arg-type]
        return out, states, rows


class Random:
    """Seeded tensors, as column slices of wider matrices whose other columns are NaN."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def rows(self, tokens: int, *shape: int, scale: float = 1.0) -> Tensor:
        width = int(np.prod(shape))
        wide = torch.full((tokens, width + 24), float("nan"), dtype=self._dtype)
        wide[:, 8 : 8 + width] = torch.randn(tokens, width, generator=self._generator) * scale
        return wide[:, 8 : 8 + width].view(tokens, *shape)

    def constant(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale + shift

    def states(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """States of SLOTS slots; those that no step reads or writes are NaN."""
        found = torch.randn(SLOTS, *shape, generator=self._generator).to(dtype)
        found[17:] = float("nan")
        return found


def tokens_of(segments: Segments) -> int:
    return int(segments.starts[-1])


def a_convolution(
    segments: Segments,
    dtype: torch.dtype = torch.float32,
    channels: int = 40,
    kernel: int = 4,
    has_bias: bool = True,
    activation: bool = True,
) -> Case:
    some = Random(dtype)
    tokens = tokens_of(segments)
    args: dict[str, object] = {
        "x": some.rows(tokens, channels),
        "weight": some.constant(channels, kernel).to(dtype),
        "bias": some.constant(channels).to(dtype) if has_bias else None,
        "segments": segments,
        "activation": activation,
    }
    states = some.states(kernel - 1, channels, dtype=dtype)
    return Case("convolve", args, states, dtype, (tokens, channels))


def a_delta_rule(
    segments: Segments,
    dtype: torch.dtype = torch.float32,
    shape: Shape = Shape(),  # noqa: B008
    strength: float = 0.0,
) -> Case:
    """`strength`: the mean of a_log; from about 4 on, decays underflow."""
    some = Random(dtype)
    tokens = tokens_of(segments)
    heads = shape.value_heads
    args: dict[str, object] = {
        "q": some.rows(tokens, shape.key_heads, shape.key_dim),
        "k": some.rows(tokens, shape.key_heads, shape.key_dim),
        "v": some.rows(tokens, heads, shape.value_dim),
        "a": some.rows(tokens, heads, scale=2.0),
        "b": some.rows(tokens, heads, scale=2.0),
        "a_log": some.constant(heads, shift=strength),
        "dt_bias": some.constant(heads, shift=-2.0),
        "segments": segments,
    }
    states = some.states(heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    return Case("delta_rule", args, states, dtype, (tokens, heads, shape.value_dim))


def a_mamba_scan(
    segments: Segments,
    dtype: torch.dtype = torch.float32,
    shape: Shape = Shape(),  # noqa: B008
    strength: float = 0.0,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Case:
    some = Random(dtype)
    tokens = tokens_of(segments)
    heads = shape.value_heads
    args: dict[str, object] = {
        "x": some.rows(tokens, heads, shape.value_dim),
        "b": some.rows(tokens, shape.key_heads, shape.key_dim, scale=0.5),
        "c": some.rows(tokens, shape.key_heads, shape.key_dim, scale=0.5),
        "dt": some.rows(tokens, heads, scale=2.0),
        "a_log": some.constant(heads, shift=strength),
        "dt_bias": some.constant(heads, shift=-2.0),
        "d": some.constant(heads),
        "limits": limits,
        "segments": segments,
    }
    states = some.states(heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    return Case("mamba_scan", args, states, dtype, (tokens, heads, shape.value_dim))


def a_gated_norm(
    dtype: torch.dtype = torch.float32,
    width: int = 96,
    group: int = 24,
    gains: int = 24,
    gate_first: bool = False,
) -> Case:
    some = Random(dtype)
    args: dict[str, object] = {
        "x": some.rows(5, width),
        "gate": some.rows(5, width),
        "gain": some.constant(gains).to(dtype),
        "eps": 1e-5,
        "group": group,
        "gate_first": gate_first,
    }
    return Case("gated_norm", args, None, dtype, (5, width))


CASES: Mapping[str, Callable[..., Case]] = {
    "convolve": a_convolution,
    "delta_rule": a_delta_rule,
    "mamba_scan": a_mamba_scan,
}


def assert_as_reference(
    case: Case, operations: object, tolerance: Mapping[torch.dtype, float] = TOLERANCE
) -> None:
    """Output and written states agree with the reference; other slots keep their bits."""
    right_out, right_states = case.run(reference)
    out, states = case.run(operations)
    assert_near(out, right_out, tolerance[case.dtype])
    if case.states is None:
        return
    segments = case.args["segments"]
    assert isinstance(segments, Segments)
    written = sorted(set(segments.writes.tolist()))
    assert_near(states[written], right_states[written], tolerance[case.dtype])
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert_same(states[others], case.states[others])


def with_rows(case: Case, shape: Shape, room: int, dtype: torch.dtype = torch.float32) -> Case:
    """The case with rows in every row slot; NaN after a sequence's own. dtype: of keys and
    values."""
    some = torch.Generator().manual_seed(1)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(ROW_SLOTS, *sizes, generator=some)

    channels, before = (case.out_shape[1], case.states) if case.name == "convolve" else (8, None)
    conv = draw(3 if before is None else before.shape[1], channels)
    keys = torch.nn.functional.normalize(draw(shape.key_heads, room, shape.key_dim), dim=-1)
    values = draw(shape.value_heads, room, shape.value_dim)
    sums = -draw(shape.value_heads, room).abs().mul(0.1).cumsum(-1)
    segments = case.args["segments"]
    assert isinstance(segments, Segments)
    assert segments.rows is not None
    for slot in range(ROW_SLOTS):
        of_slot = segments.rows.slots[: segments.num_seqs] == slot
        count = int(segments.rows.counts[: segments.num_seqs][of_slot].sum())
        for part in (keys, values, sums):
            part[slot, :, count:] = float("nan")
    rows = LayerRows(conv.to(case.dtype), keys.to(dtype), values.to(dtype), sums)
    return replace(case, rows=rows)


def assert_rows_as_reference(
    case: Case, operations: object, tolerance: Mapping[torch.dtype, float] = TOLERANCE
) -> None:
    """Output, written states and written rows agree with the reference; all else keeps its
    bits."""
    segments, allowed = case.args["segments"], tolerance[case.dtype]
    assert isinstance(segments, Segments)
    assert case.states is not None
    right_out, right_states, right_rows = case.run_rows(reference)
    out, states, rows = case.run_rows(operations)
    assert rows is not None
    assert right_rows is not None
    assert_near(out, right_out, allowed)
    written = sorted(set(segments.writes.tolist()) - {-1})
    others = [slot for slot in range(SLOTS) if slot not in written]
    if written:
        assert_near(states[written], right_states[written], allowed)
    assert_same(states[others], case.states[others])
    parts = [0] if case.name == "convolve" else [1, 2, 3]
    for index, (part, right) in enumerate(zip(rows, right_rows, strict=True)):
        if index in parts:
            assert_same(part.isnan().float(), right.isnan().float())
            if index == 3:  # logarithms: the kernels' least is -120 a token
                part, right = part.exp(), right.exp()  # noqa: PLW2901
            assert_near(part.nan_to_num(), right.nan_to_num(), allowed)
        else:
            assert case.rows is not None
            assert_same(part, case.rows[index])


def assert_near(found: Tensor, right: Tensor, tolerance: float) -> None:
    assert found.dtype == right.dtype
    assert found.isfinite().all()
    worst = float((found.double() - right.double()).abs().max())
    assert worst <= tolerance * max(float(right.double().abs().max()), 1e-3), worst


def assert_same(found: Tensor, right: Tensor) -> None:
    """The same bits, NaN included."""
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def steps() -> Iterator[tuple[str, Segments]]:
    for name, (parts, num_decodes) in STEPS.items():
        yield name, a_step(*parts, num_decodes=num_decodes)


def cut_otherwise(make: Callable[..., Case], operations: object, dtype: torch.dtype) -> None:
    """Tokens of a serial step have the same bits in one piece, beside another sequence, and in
    several steps of which some have one token; so have the states."""
    one = make(a_serial_step(Part((70,), 0, (9,))), dtype)
    out, states = one.run(operations)
    pieces = make(a_serial_step(Part((1, 4, 64, 1), 0, (10, 11, 12, 9))), dtype)
    found, cut_states = pieces.run(operations)
    assert_same(found, out)
    assert_same(cut_states[9], states[9])
    beside = make(a_serial_step(Part((70,), 0, (9,)), Part((3, 20), 1, (13, 14))), dtype)
    for name, value in one.args.items():
        if isinstance(value, Tensor) and len(value) == 70:
            beside.args[name][:70] = value  # type: ignore[index]
        elif name != "segments":
            beside.args[name] = value
    beside.states = one.states
    found, states_beside = beside.run(operations)
    assert_same(found[:70], out)
    assert_same(states_beside[9], states[9])
    first = 0
    kept = one.states
    for count in (1, 3, 1, 1, 64):
        step = a_serial_step(Part((count,), 9 if first else 0, (9,)))
        args = {
            name: value[first : first + count]
            if isinstance(value, Tensor) and len(value) == 70
            else value
            for name, value in one.args.items()
        }
        args["segments"] = step
        shape = (count, *one.out_shape[1:])
        found, kept = Case(one.name, args, kept, dtype, shape).run(operations)
        assert_same(found, out[first : first + count])
        first += count
    assert kept is not None
    assert_same(kept[9], states[9])
