"""`mainstem bench recurrent`: one layer of the gated delta rule on a GPU, each case checked before
it is timed: decodes with rows beside states that siblings share, and prompts (`recurrent_prompts`).

A time is the median of replays of a CUDA graph with a cold L2 cache, in the form that an engine
replays: padding, folds and plain decodes are possible. The floor is the time to move, once,

    base states read x heads x dim x dim x 4
    + own rows x ((key heads + heads) x dim x 2 + heads x 4)
    + states written by folds + queries, keys, values and outputs

at the card's bandwidth. A case may take `allowed` times its floor and FIXED_US; random mixes of
group sizes and row counts only on average. Where nothing is shared, a case is all steps from one
fold to the next.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.cli.parser import Parser
from mainstem.kernels.recurrent.delta import delta_rule
from mainstem.kernels.recurrent.rows import LayerRows, RowUse, pack_rows
from mainstem.kernels.recurrent.segments import Segments
from mainstem.plan.cost import H200
from mainstem_bench.kernel import Bench as AttentionBench
from mainstem_bench.kernel import fingerprint, require_card
from mainstem_bench.recurrent_prompts import PROMPT_CASES, PROMPT_SHAPES, prompt_line

KEY_HEADS, HEADS, DIM = 16, 48, 128
DTYPE = torch.bfloat16
DEVICE = "cuda"
ROOM = 64
STATE_BYTES = HEADS * DIM * DIM * 4
ROW_BYTES = (KEY_HEADS + HEADS) * DIM * 2 + HEADS * 4
TOKEN_BYTES = 2 * (KEY_HEADS + HEADS) * DIM * 2
FIXED_US = 8.0
NUM_TIMED = 7
WARM_UPS = 3
TOLERANCE = 0.02  # largest error / largest value, of bf16 rows and outputs
CHECKED = 16  # sequences whose states are computed at once by the check
FOLD_AFTER = 24  # rows of a sequence that shares nothing; see docs/adr/0022
OWN_SHARE = 1.3  # allowed over the floor, on average between two folds
MIXES, MIX_SHARE = 24, 2.0

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """Groups of siblings: for each sequence the rows that it has before the step."""

    name: str
    counts: tuple[tuple[int, ...], ...]
    folds: bool = False  # every sequence writes its state
    is_plain: bool = False  # no rows: every sequence writes its state at every step
    allowed: float = 1.8

    @property
    def floor_us(self) -> float:
        seqs = sum(len(group) for group in self.counts)
        moved = len(self.counts) * STATE_BYTES + seqs * TOKEN_BYTES
        moved += sum(sum(group) for group in self.counts) * ROW_BYTES
        moved += seqs * STATE_BYTES if self.folds or self.is_plain else 0
        return 1e6 * moved / H200.bytes_per_s


def siblings(seqs: int, group: int, rows: int) -> Case:
    name = f"{seqs} sequences in groups of {group}, {rows} own rows"
    return Case(name, tuple((rows,) * group for _ in range(seqs // group)))


def own_steps(seqs: int, fold_after: int) -> list[Case]:
    """The steps of sequences that share nothing, from one fold to the next."""
    name = f"{seqs} sequences, nothing shared"
    return [
        Case(f"{name}, {rows} rows", ((rows,),) * seqs, folds=rows == fold_after - 1)
        for rows in range(fold_after)
    ]


def random_mixes(num: int, seed: int) -> list[Case]:
    """Steps of unequal groups whose members have unequal numbers of rows."""
    random = np.random.default_rng(seed)
    cases = []
    for number in range(num):
        seqs = int(random.choice([24, 64, 128, 256, 400]))
        most = int(random.choice([1, 4, 16, 64]))
        sizes: list[int] = []
        while sum(sizes) < seqs:
            sizes.append(min(int(random.integers(1, most + 1)), seqs - sum(sizes)))
        counts = tuple(
            tuple(int(rows) for rows in random.integers(0, ROOM, size)) for size in sizes
        )
        rows = sum(map(sum, counts)) / seqs
        name = (
            f"mix {number}: {seqs} sequences, {len(sizes)} groups of 1 to {most}, {rows:.0f} rows"
        )
        cases.append(Case(name, counts))
    return cases


@dataclass(frozen=True, slots=True)
class Measured:
    us: float
    max_error: float


@dataclass
class Layer:
    """The arguments of one case on the card."""

    case: Case
    segments: Segments
    rows: LayerRows | None
    matrix: Tensor
    out: Tensor
    inputs: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        q, k, v, a, b, a_log, dt_bias = self.inputs
        delta_rule(q, k, v, a, b, a_log, dt_bias, self.segments, self.matrix, self.out, self.rows)


def make_layer(case: Case) -> Layer:
    """Random numbers; the rows lie in slots in random order."""
    torch.manual_seed(0)
    bases = np.repeat(np.arange(len(case.counts)), [len(group) for group in case.counts])
    counts = np.concatenate([np.array(group) for group in case.counts]).astype(np.int32)
    reads = bases.astype(np.int32)
    seqs = len(reads)
    order = np.random.default_rng(0).permutation(seqs).astype(np.int32)
    writes = np.full(seqs, -1, np.int32)
    if case.folds or case.is_plain:
        writes = np.arange(len(case.counts), len(case.counts) + seqs).astype(np.int32)
    num_states = int(max(reads.max(), writes.max())) + 1
    segments = _segments(case, order, counts, reads, writes)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=DTYPE)

    inputs = [
        draw(seqs, KEY_HEADS, DIM), draw(seqs, KEY_HEADS, DIM), draw(seqs, HEADS, DIM),
        draw(seqs, HEADS), draw(seqs, HEADS),
        torch.rand(HEADS, device=DEVICE), torch.full((HEADS,), -2.0, device=DEVICE),
    ]  # fmt: skip
    matrix = torch.randn(num_states, HEADS, DIM, DIM, device=DEVICE).mul_(0.1)
    sums = torch.rand(seqs, HEADS, ROOM, device=DEVICE).mul_(-0.05).cumsum(-1)
    rows = None if case.is_plain else LayerRows(
        draw(seqs, 3, 8), torch.nn.functional.normalize(draw(seqs, KEY_HEADS, ROOM, DIM), dim=-1),
        draw(seqs, HEADS, ROOM, DIM), sums,
    )  # fmt: skip
    return Layer(case, segments, rows, matrix, draw(seqs, HEADS, DIM), inputs)


def _segments(case: Case, slots: Ints, counts: Ints, reads: Ints, writes: Ints) -> Segments:
    ones = torch.arange(len(reads) + 1, dtype=torch.int32, device=DEVICE)
    packed = torch.from_numpy(pack_rows(slots, counts, reads, writes)).to(DEVICE)
    rows = None if case.is_plain else RowUse.of_graph(packed, len(reads))
    read, written = (torch.from_numpy(part).to(DEVICE) for part in (reads, writes))
    return Segments(ones, written, ones, read, len(reads), len(reads), 1, rows=rows)


def check(layer: Layer) -> float:
    """Run a layer once; the largest error / the largest value of outputs, rows and states."""
    before = [part.clone() for part in layer.rows or ()]
    old = layer.matrix.clone()
    layer.out.fill_(float("nan"))
    layer.run()
    q, k, v, a, b, a_log, dt_bias = (part.float() for part in layer.inputs)
    q, k = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (q, k))
    q = torch.nn.functional.normalize(q, dim=-1) * DIM**-0.5
    k = torch.nn.functional.normalize(k, dim=-1)
    logs = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    reads, writes = layer.segments.reads.long(), layer.segments.writes.long()
    worst = 0.0
    for seqs in torch.split(torch.arange(len(q), device=DEVICE), CHECKED):
        state = old[reads[seqs]]
        if layer.segments.rows is not None:
            slots = layer.segments.rows.slots[seqs].long()
            state = _with_rows(state, before, slots, layer.segments.rows.counts[seqs].long())
        state = state * logs[seqs].exp()[..., None, None]
        u = v[seqs] - torch.einsum("shk,shkv->shv", k[seqs], state)
        u = u * b[seqs].sigmoid()[..., None]
        state += k[seqs][..., None] * u[:, :, None]
        right = torch.einsum("shk,shkv->shv", q[seqs], state)
        worst = max(worst, _error(layer.out[seqs], right))
        if int(writes[seqs[0]]) >= 0:
            worst = max(worst, _error(layer.matrix[writes[seqs]], state))
        elif layer.rows is not None and layer.segments.rows is not None:
            counts = layer.segments.rows.counts[seqs].long()
            worst = max(worst, _error(layer.rows.values[slots, :, counts], u))
    return worst


def _with_rows(state: Tensor, rows: list[Tensor], slots: Tensor, counts: Tensor) -> Tensor:
    keys, values, sums = (part[slots].float() for part in rows[1:])
    places = torch.arange(ROOM, device=DEVICE)
    is_row = (places < counts[:, None])[:, None]
    last = sums.gather(2, (counts - 1).clamp(min=0)[:, None, None].expand(-1, HEADS, 1))
    last = torch.where((counts > 0)[:, None, None], last, 0.0)
    weights = torch.where(is_row, (last - sums).clamp(max=0).exp(), 0.0)
    keys = keys.repeat_interleave(HEADS // KEY_HEADS, 1) * weights[..., None]
    return state * last[..., None].exp() + keys.mT @ values


def _error(found: Tensor, right: Tensor) -> float:
    error = float((found.float() - right).abs().max() / right.abs().max())
    return error if error == error else float("inf")  # noqa: PLR0124  # NaN


class Bench:
    """Checks and times cases, with a cold cache."""

    def __init__(self) -> None:
        self._clock = AttentionBench()

    def measure(self, case: Case) -> Measured:
        layer = make_layer(case)
        error = check(layer)
        if not error < TOLERANCE:
            raise AssertionError(f"{case.name}: error {error}, allowed {TOLERANCE}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.run()
        return Measured(self._clock.time_us(graph.replay, NUM_TIMED, WARM_UPS), error)


def line_of(name: str, us: float, floor: float, bar: float, error: float) -> dict[str, object]:
    return {
        "case": name,
        "us": round(us, 1),
        "floor_us": round(floor, 1),
        "over_floor": round(us / floor, 2),
        "bar_us": round(bar, 1),
        "is_within_bar": us <= bar,
        "max_error": float(f"{error:.2g}"),
    }


def case_line(bench: Bench, case: Case) -> dict[str, object]:
    measured, floor = bench.measure(case), case.floor_us
    return line_of(
        case.name, measured.us, floor, case.allowed * floor + FIXED_US, measured.max_error
    )


def mean_line(
    bench: Bench, name: str, cases: list[Case], allowed: float, fixed_us: float
) -> dict[str, object]:
    """Mean times of several cases, which are printed too."""
    measured = [bench.measure(case) for case in cases]
    floors = [case.floor_us for case in cases]
    shares = [(one.us - fixed_us) / floor for one, floor in zip(measured, floors, strict=True)]
    us, floor = float(np.mean([one.us for one in measured])), float(np.mean(floors))
    # of steps in a row their sum counts; of unrelated ones the mean of their shares
    share = float(np.mean(shares)) if fixed_us else us / floor
    line = line_of(name, us, floor, us * allowed / share, max(one.max_error for one in measured))
    steps = [
        [case.name, round(one.us, 1), round(floor, 1)]
        for case, one, floor in zip(cases, measured, floors, strict=True)
    ]
    return line | {"share": round(share, 2), "is_within_bar": share <= allowed, "steps": steps}


def main(args: list[str]) -> int:
    """Print one JSON line per case; returns 1 if a case misses its limit."""
    parser = Parser(prog="mainstem bench recurrent")
    parser.add_argument("--seed", type=int, default=0, help="of the random mixes")
    parser.add_argument("--mixes", type=int, default=MIXES, help="how many random mixes")
    parser.add_argument("--only", choices=("decodes", "prompts"), help="default: both")
    chosen = parser.parse_args(args)
    require_card()
    status = 0
    for line in chain(
        [] if chosen.only == "prompts" else decode_lines(chosen.mixes, chosen.seed),
        [] if chosen.only == "decodes" else prompt_lines(),
    ):
        status |= not line["is_within_bar"]
        print(json.dumps({**line, **fingerprint()}), flush=True)
    return status


def decode_lines(num_mixes: int, seed: int) -> Iterator[dict[str, object]]:
    bench = Bench()
    for rows in (8, 32, 63):
        yield case_line(bench, siblings(256, 16, rows))
    plain = Case("256 sequences, a state each, no rows", ((0,),) * 256, is_plain=True)
    yield case_line(bench, plain)
    name = f"256 sequences, nothing shared, a fold after {FOLD_AFTER} tokens"
    yield mean_line(bench, name, own_steps(256, FOLD_AFTER), OWN_SHARE, 0.0)
    if mixes := random_mixes(num_mixes, seed):
        name = f"{num_mixes} random mixes, seed {seed}"
        yield mean_line(bench, name, mixes, MIX_SHARE, FIXED_US)


def prompt_lines() -> Iterator[dict[str, object]]:
    clock = AttentionBench()
    for shape in PROMPT_SHAPES:
        for case in PROMPT_CASES:
            yield prompt_line(clock, shape, case)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
