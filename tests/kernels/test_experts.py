"""Routing, grouped products and the whole layer of experts, under the interpreter."""

import logging
from dataclasses import replace

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mainstem.core.config import Quantize  # noqa: E402
from mainstem.kernels import LayoutError, PlanTooLarge  # noqa: E402
from mainstem.kernels.dense.invariant import Tile  # noqa: E402
from mainstem.kernels.experts import choose as choose_module  # noqa: E402
from mainstem.kernels.experts import products, reference  # noqa: E402
from mainstem.kernels.experts import route as route_module  # noqa: E402
from mainstem.kernels.experts.activate import ACTIVATIONS, gated_rows  # noqa: E402
from mainstem.kernels.experts.choose import choose  # noqa: E402
from mainstem.kernels.experts.products import (  # noqa: E402
    FEW,
    FULL_PRECISION,
    GROUPED,
    HOPPER,
    MANY,
    SOME,
    ExpertTiles,
)
from mainstem.kernels.experts.route import (  # noqa: E402
    ExpertRouter,
    Routing,
    most_tiles,
    route,
)
from mainstem.models.expert_tensors import ExpertTensors  # noqa: E402
from mainstem.models.gpu.experts import ExpertSpace, GpuExperts, Linear  # noqa: E402
from mainstem.models.gpu.linears import LinearMaker  # noqa: E402
from mainstem.models.packed import PackedKind, PackedWeight, Weight, as_tensor  # noqa: E402
from mainstem.models.spec import Activation, ExpertsSpec  # noqa: E402
from tests.expert_layers import (  # noqa: E402
    CASES,
    Case,
    a_spec,
    right_answer,
    some_rows,
    some_tensors,
)

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SMALL = ExpertTiles(Tile(16, 32, 64, warps=4, stages=1), Tile(16, 64, 64, warps=4, stages=1))
# Relative errors. The interpreter truncates bf16 instead of rounding it.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def plain_linear(weight: Weight, bias: Tensor | None) -> Linear:
    assert bias is None
    return lambda x, out: torch.mm(x, as_tensor(weight).t(), out=out)


def a_layer(
    case: Case,
    tensors: ExpertTensors,
    max_tokens: int,
    tiles: ExpertTiles | None = SMALL,
    is_deterministic: bool = False,
) -> GpuExperts:
    space = ExpertSpace.make(case.spec, case.hidden, max_tokens, tensors.router.dtype, CPU)
    space.rows.fill_(float("nan"))  # NaN, since rows that were not written must not be read
    space.act.fill_(float("nan"))
    return GpuExperts(
        tensors, case.spec, space, plain_linear, is_deterministic=is_deterministic, tiles=tiles
    )


def run(layer: GpuExperts, x: Tensor) -> Tensor:
    return layer(x, torch.full_like(x, float("nan")))


def assert_right(found: Tensor, x: Tensor, tensors: ExpertTensors, spec: ExpertsSpec) -> None:
    assert found.dtype == x.dtype
    tolerance = TOLERANCE[x.dtype]
    right = right_answer(x, tensors, spec)
    torch.testing.assert_close(found.float(), right, rtol=tolerance, atol=tolerance)


def as_fp8(weight: Weight) -> PackedWeight:
    dense = as_tensor(weight)
    scales = dense.new_ones((*dense.shape[:-1], 1))
    values = dense.to(torch.float8_e4m3fn)
    return PackedWeight(PackedKind.FP8, values, scales, None, dense.shape[-1], 1)


def test_experts_without_a_kernel_are_dequantized_and_the_log_names_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = case_of("gelu")
    tensors = some_tensors(case)
    gate_up, down = as_fp8(tensors.gate_up), as_fp8(tensors.down)
    packed = replace(tensors, gate_up=gate_up, down=down)
    layer = a_layer(case, packed, 4)
    assert layer.unpacked is not None
    assert layer.unpacked.stored_bytes == gate_up.nbytes + down.nbytes
    assert layer.unpacked.held_bytes == 4 * (gate_up.values.numel() + down.values.numel())
    assert a_layer(case, tensors, 4).unpacked is None
    maker = LinearMaker(Quantize.NONE, False, torch.float32, CPU)
    for _ in range(2):
        maker.note_experts(replace(layer.unpacked, stored_bytes=10**9, held_bytes=2 * 10**9))
    with caplog.at_level(logging.WARNING):
        maker.finish()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the experts of 2 layers are dequantized to torch.float32")
    assert said.endswith("no kernel supports fp8; they take 4.0 GB instead of 2.0")


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    "name",
    [
        "gelu", "top 8", "everything", "not normalized", "shared", "wide",
        "sigmoid scores and a bias", "softmax and a bias, not normalized", "without gates",
    ],
)  # fmt: skip
def test_a_layer_agrees_with_the_reference(name: str) -> None:
    """Tokens for two blocks of routing, the last not full; then one token in the same buffers."""
    case = case_of(name)
    tensors = some_tensors(case)
    layer = a_layer(case, tensors, 18)
    for tokens in (18, 1):
        x = some_rows(tokens, case.hidden)
        kept = x.clone()
        assert_right(run(layer, x), x, tensors, case.spec)
        assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "tiles", [FEW, SOME, MANY, GROUPED], ids=["few", "some", "many", "grouped"]
)
def test_all_tiles_and_the_library_agree(tiles: ExpertTiles) -> None:
    case = case_of("everything")
    tensors, x = some_tensors(case), some_rows(5, case.hidden)
    assert_right(run(a_layer(case, tensors, 5, tiles), x), x, tensors, case.spec)


def test_the_library_computes_experts_without_gates() -> None:
    case = case_of("without gates")
    tensors, x = some_tensors(case), some_rows(5, case.hidden)
    assert_right(run(a_layer(case, tensors, 5, GROUPED), x), x, tensors, case.spec)


def test_devices_without_tensor_descriptors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_boxes", lambda device: False)
    case = case_of("everything")
    tensors, x = some_tensors(case), some_rows(5, case.hidden)
    assert_right(run(a_layer(case, tensors, 5, SMALL), x), x, tensors, case.spec)


def test_bf16_agrees_with_the_reference() -> None:
    case = case_of("everything")
    tensors = some_tensors(case, torch.bfloat16)
    x = some_rows(7, case.hidden, torch.bfloat16)
    assert_right(run(a_layer(case, tensors, 7), x), x, tensors, case.spec)


def test_all_tokens_may_be_routed_to_the_same_experts() -> None:
    case = Case("skewed", replace(a_spec(num_experts=9, top_k=2), has_bias=True))
    tensors = some_tensors(case)
    assert tensors.router_bias is not None
    tensors.router_bias[4], tensors.router_bias[8] = 60.0, 50.0
    x = some_rows(20, case.hidden)
    layer = a_layer(case, tensors, 20)
    assert_right(run(layer, x), x, tensors, case.spec)


def test_a_call_without_tokens_does_nothing() -> None:
    case = CASES[0]
    layer = a_layer(case, some_tensors(case), 4)
    assert run(layer, torch.empty(0, case.hidden)).shape == (0, case.hidden)


def test_rows_may_have_gaps_between_them() -> None:
    case = CASES[0]
    tensors, whole = some_tensors(case), some_rows(9, 3 * case.hidden)
    x = whole[:, 8 : 8 + case.hidden]
    wide = torch.full((9, 2 * case.hidden), float("nan"))
    out = wide[:, case.hidden :]
    assert a_layer(case, tensors, 9)(x, out) is out
    assert_right(out, x, tensors, case.spec)
    assert bool(wide[:, : case.hidden].isnan().all())


def test_a_deterministic_row_does_not_depend_on_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Router sums are split over programs for the parts, but not for all 18 tokens. The interpreter
    multiplies tiles with numpy, whose bits depend on the tile's shape alone."""
    case = case_of("everything")
    monkeypatch.setattr(route_module, "SPLIT_LOGITS", 4 * (case.spec.num_experts + 1))
    tensors, x = some_tensors(case), some_rows(18, case.hidden)
    space = ExpertSpace.make(case.spec, case.hidden, 18, torch.float32, CPU)

    def row_by_row(weight: Weight, bias: Tensor | None) -> Linear:
        matrix = as_tensor(weight)
        return lambda x, out: torch.stack([matrix @ row for row in x], out=out)

    layer = GpuExperts(tensors, case.spec, space, row_by_row, is_deterministic=True)
    together = run(layer, x)
    for first, last in ((0, 1), (15, 18)):
        assert torch.equal(run(layer, x[first:last]), together[first:last])


def routed(logits: Tensor, top_k: int, is_normalized: bool, tile_rows: int = 4) -> Routing:
    """Routes these logits, with the identity as the router."""
    tokens, experts = logits.shape
    routing = Routing.make(experts, top_k, tokens, CPU)
    router = ExpertRouter(torch.eye(experts), None, experts, top_k, is_normalized)
    route(logits, router, routing, tile_rows)
    return routing


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "is_normalized"),
    [(1, 8, 2, True), (16, 5, 1, False), (40, 33, 8, True), (3, 512, 16, False)],
)
def test_routing_agrees_with_a_sort(
    tokens: int, experts: int, top_k: int, is_normalized: bool
) -> None:
    logits = some_rows(tokens, experts) * 3
    logits[:, 3] = logits[:, 1]  # ties
    found = routed(logits, top_k, is_normalized)
    ids, weights = reference.route(logits, top_k, is_normalized)
    assert torch.equal(found.ids.long(), ids)
    torch.testing.assert_close(found.weights, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("tokens", "tile_rows"), [(1, 4), (16, 1), (17, 16), (50, 4)])
def test_rows_are_sorted_and_cut_into_tiles(tokens: int, tile_rows: int) -> None:
    experts, top_k = 11, 3
    logits = some_rows(tokens, experts)
    logits[:, 5] = -50.0  # an expert without tokens
    logits[:, 7] = 50.0  # an expert with all tokens
    found = routed(logits, top_k, True, tile_rows)
    pairs = [(e, t, s) for t, row in enumerate(found.ids.tolist()) for s, e in enumerate(row)]
    pairs.sort(key=lambda pair: pair[:2])
    assert found.sorted_tokens.tolist() == [token for _, token, _ in pairs]
    assert found.sorted_experts.tolist() == [expert for expert, _, _ in pairs]
    for place, (_, token, slot) in enumerate(pairs):
        assert int(found.positions[token, slot]) == place
    right, start = [], 0
    for expert, end in enumerate(found.ends.tolist()):
        assert end - start == sum(pair[0] == expert for pair in pairs)
        right += [(expert, row, min(row + tile_rows, end)) for row in range(start, end, tile_rows)]
        start = end
    num_tiles = most_tiles(tokens * top_k, experts, tile_rows)
    lists = (found.tile_experts, found.tile_starts, found.tile_ends)
    tiles = [tuple(tile) for tile in torch.stack(lists, 1)[:num_tiles].tolist()]
    assert int(found.tile_count) == len(right)
    assert tiles[: len(right)] == right
    assert all(expert == -1 for expert, _, _ in tiles[len(right) :])


def test_most_tiles_is_for_the_worst_distribution_of_rows() -> None:
    assert most_tiles(1, 128, 16) == 1
    assert most_tiles(8, 128, 16) == 8  # eight experts have one row each
    assert most_tiles(2 + 15, 2, 16) == 2  # experts have 1 and 16 rows
    assert most_tiles(2 + 16, 2, 16) == 3  # experts have 1 and 17 rows
    assert most_tiles(0, 8, 16) == 0


def test_nan_is_routed_to_existing_experts() -> None:
    logits = some_rows(6, 8)
    logits[1] = float("nan")
    logits[2, 3], logits[3] = 3e38, -3e38
    with np.errstate(invalid="ignore"):
        routing = routed(logits, 2, True)
    assert bool(((routing.ids >= 0) & (routing.ids < 8)).all())
    assert routing.ends[-1] == 12
    assert sorted(routing.positions.flatten().tolist()) == list(range(12))


def test_zeros_of_both_signs_are_equal() -> None:
    found = routed(torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0, -1.0, -1.0, -1.0]]), 2, True)
    assert found.ids.tolist() == [[1, 2]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_agrees_with_the_reference(activation: str) -> None:
    both, out = some_rows(3, 80) * 2, torch.empty(3, 40)
    both[0, :2] = both[1, 40:42] = torch.tensor([-9.0, 9.0])  # beyond the clamps
    gated_rows(both, activation, out)
    right = reference.gated(both[:, :40], both[:, 40:], activation)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


def test_kernels_have_code_for_every_activation() -> None:
    assert set(ACTIVATIONS) == {activation.value for activation in Activation}


def test_tiles_are_chosen_by_the_number_of_rows() -> None:
    x = torch.empty(1, 64, dtype=torch.bfloat16)
    assert choose(8, 128, x, is_deterministic=False) is FEW
    assert choose(32 * 128, 128, x, is_deterministic=False) is SOME
    assert choose(512 * 128, 128, x, is_deterministic=False) is MANY
    assert choose(512 * 128, 128, x.float(), is_deterministic=False) is FULL_PRECISION
    for rows in (1, 100, 1000, 100_000):
        assert choose(rows, 128, x, is_deterministic=True) is SOME
    for tiles in (FEW, SOME, MANY, HOPPER, GROUPED):
        assert tiles.gate_up.rows == tiles.down.rows


def test_hopper_has_its_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's tiles need rows of x that begin at multiples of 32 bytes."""
    monkeypatch.setattr(choose_module, "hopper_kernels", lambda device: products)
    for width, tiles in ((64, HOPPER), (72, MANY)):
        x = torch.empty(1, width, dtype=torch.bfloat16)
        assert choose(512 * 128, 128, x, is_deterministic=False) is tiles


def test_the_error_names_a_refused_argument() -> None:
    case = CASES[0]
    layer = a_layer(case, some_tensors(case), 4)
    with pytest.raises(PlanTooLarge, match="5 tokens, buffers were made for 4"):
        run(layer, some_rows(5, case.hidden))
    with pytest.raises(LayoutError, match="router must be"):
        run(layer, some_rows(2, case.hidden + 8))
    odd = Case("odd", a_spec(size=20))
    with pytest.raises(LayoutError, match="multiples of 8"):
        run(a_layer(odd, some_tensors(odd), 4), some_rows(2, 32))
    with pytest.raises(LayoutError, match="tiles cannot be chosen"):
        a_layer(case, some_tensors(case), 4, FEW, is_deterministic=True)
    with pytest.raises(LayoutError, match="activation must be one of silu"):
        gated_rows(some_rows(2, 16), "swish", torch.empty(2, 8))
    with pytest.raises(LayoutError, match="at most 16 of at most 512"):
        routed(some_rows(2, 8), 9, True)
