"""Which graphs are captured and which of them a step replays."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mainstem.core.step import Step
from mainstem.kernels.attention.plan import ALL_LAUNCHES, Launches
from mainstem.runner.gates import LAYERS_AT_ONCE
from mainstem.runner.gpu_inputs import all_sizes
from mainstem.runner.graphs import (
    FEW_TOKENS,
    GRAPH_SIZES,
    MOST_TOKENS_OF_FEWER,
    Piece,
    StepGraphs,
    graph_sizes,
)
from mainstem_bench.shapes import SHAPES
from tests.runner.recorded_graphs import Recorder
from tests.runner.steps import Seq, Work, a_step

pytestmark = pytest.mark.torch

Call = tuple[int, Launches, int]  # size, launches and which piece
NUM_PIECES = 3
LAYERS = range(NUM_PIECES * LAYERS_AT_ONCE)
KINDS = (ALL_LAUNCHES, Launches(large=False, merge=True), Launches(large=False, merge=False))
EVERY_KIND = [Launches(large, merge) for large in (False, True) for merge in (False, True)]


class Order:
    """Records the order of events: pieces as calls, a gate's layers as numbers."""

    def __init__(self) -> None:
        self.calls: list[Call | int] = []

    def pieces_of(self, size: int, launches: Launches) -> list[Piece]:
        return [
            Piece(
                partial(self.calls.append, (size, launches, index)),
                range(index * LAYERS_AT_ONCE, (index + 1) * LAYERS_AT_ONCE),
            )
            for index in range(NUM_PIECES)
        ]

    def before(self, layer: int) -> None:
        self.calls.append(layer)


def a_step_of(tokens: int) -> Step:
    seq = Seq(0, list(range(tokens)), list(range(-(-tokens // 16))))
    return a_step([Work(seq, tokens)], page_size=16, vocab=100)


@pytest.fixture
def order() -> Order:
    return Order()


@pytest.fixture
def graphs(order: Order, monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    made = StepGraphs(GRAPH_SIZES, KINDS, Recorder(monkeypatch).wrap(order.pieces_of), LAYERS)
    sizes = [call[0] for call in order.calls if isinstance(call, tuple)]
    assert sizes == sorted(sizes, reverse=True), "the largest is first: the others use its memory"
    order.calls.clear()
    return made


@pytest.mark.parametrize("launches", EVERY_KIND)
@pytest.mark.parametrize("size", GRAPH_SIZES)
def test_a_step_replays_all_that_its_plan_needs(
    graphs: StepGraphs, order: Order, size: int, launches: Launches
) -> None:
    graphs.replay(size, launches, order)
    pieces = [call for call in order.calls if isinstance(call, tuple)]
    assert [call[2] for call in pieces] == list(range(NUM_PIECES))
    replayed = {call[:2] for call in pieces}
    assert len(replayed) == 1, "pieces of several passes were mixed"
    found_size, found = replayed.pop()
    assert found_size == size
    assert found.large >= launches.large
    assert found.merge >= launches.merge
    if size <= MOST_TOKENS_OF_FEWER and not launches.large:
        assert found == launches, "small steps launch only what they need"


def test_each_piece_waits_for_its_first_layer(graphs: StepGraphs, order: Order) -> None:
    graphs.replay(8, ALL_LAUNCHES, order)
    expected: list[Call | int] = []
    for index in range(NUM_PIECES):
        expected += [index * LAYERS_AT_ONCE, (8, ALL_LAUNCHES, index)]
    assert order.calls == expected


def test_a_piece_that_is_no_graph_runs_in_each_replay_between_the_others(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces_of(size: int, launches: Launches) -> list[Piece]:
        first, apart, last = order.pieces_of(size, launches)
        return [first, apart._replace(is_captured=False), last]

    recorder = Recorder(monkeypatch)
    graphs = StepGraphs((4,), KINDS[:1], recorder.wrap(pieces_of), LAYERS)
    order.calls.clear()
    for _ in range(2):
        graphs.replay(4, ALL_LAUNCHES, order)
    pieces = [call[2] for call in order.calls if isinstance(call, tuple)]
    assert pieces == [0, 1, 2] * 2
    assert recorder.num_captured == 2


def test_a_step_takes_the_smallest_graph_that_holds_it(graphs: StepGraphs) -> None:
    for tokens in (1, 2, 3, 9, 16, 17, 49, 255, 256, 257, 1000, 1024, 1025, 2049, 4096):
        smallest = min(size for size in GRAPH_SIZES if size >= tokens)
        assert graphs.size_for(a_step_of(tokens)) == smallest
    assert graphs.size_for(a_step_of(4097)) is None


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama31-70b", 1024),
        ("llama31-8b", 1024),
        ("llama32-1b", 1920),
        ("qwen3-30b-a3b", 4096),
        ("qwen36-35b-a3b", 4096),
    ],
)
def test_graphs_end_at_1024_tokens_or_where_computing_takes_longer_than_launching(
    name: str, most: int
) -> None:
    assert graph_sizes(SHAPES[name], 8192) == tuple(size for size in GRAPH_SIZES if size <= most)
    assert graph_sizes(SHAPES[name], 100)[-1] == 96, "no step is larger"


def test_the_warm_up_runs_the_matrix_products_of_large_graphs() -> None:
    """The warm-up runs all sizes of `all_sizes`; steps without graphs use no other sizes."""
    assert {size for size in GRAPH_SIZES if size > FEW_TOKENS} <= set(all_sizes(GRAPH_SIZES[-1]))


def test_steps_that_move_pages_or_copy_what_they_write_or_load_have_no_graph(
    graphs: StepGraphs,
) -> None:
    step = a_step_of(4)
    slot = step.write_slots.max(keepdims=True) + 100
    copying = replace(step, copy_from=slot, copy_to=slot + 1)
    assert graphs.size_for(copying) == 4
    assert graphs.size_for(replace(copying, copy_from=step.write_slots[:1])) is None
    assert graphs.size_for(replace(copying, load_ids=np.zeros(1, np.int32))) is None
    page = np.zeros(1, np.int32)
    assert graphs.size_for(replace(step, move_from=page, move_to=page + 1, move_by=page)) is None


def test_without_sizes_no_step_has_a_graph(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = StepGraphs((), KINDS, Recorder(monkeypatch).wrap(order.pieces_of), LAYERS)
    assert graphs.size_for(a_step_of(1)) is None
    assert order.calls == []


def test_every_piece_runs_once_before_it_is_captured(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel may be compiled, and no algorithm chosen, during a capture."""
    StepGraphs((4,), KINDS, Recorder(monkeypatch).wrap(order.pieces_of), LAYERS)
    assert order.calls == [(4, kind, index) for kind in KINDS for index in range(NUM_PIECES)]
