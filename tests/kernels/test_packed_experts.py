"""A layer of experts whose weights stay in 4 bits, under the interpreter."""

from dataclasses import replace

import pytest

from tests.kernels.interpreted import require_interpreter

require_interpreter()

import torch  # noqa: E402

from mainstem.kernels import LayoutError  # noqa: E402
from mainstem.kernels.dense.invariant import Tile  # noqa: E402
from mainstem.kernels.dense.nibbles import Nibbles  # noqa: E402
from mainstem.kernels.experts import packed  # noqa: E402
from mainstem.kernels.experts.packed import (  # noqa: E402
    FEW,
    MANY,
    SOME,
    choose_packed,
    packed_down,
    packed_gate_up,
)
from mainstem.kernels.experts.products import ExpertTiles  # noqa: E402
from mainstem.kernels.experts.route import Routing  # noqa: E402
from mainstem.models.expert_tensors import ExpertTensors  # noqa: E402
from mainstem.models.gpu.packed import pack_nibbles  # noqa: E402
from mainstem.models.packed import PackedKind, PackedWeight  # noqa: E402
from mainstem.models.spec import Activation  # noqa: E402
from tests.expert_layers import Case, a_spec, some_rows, some_tensors  # noqa: E402
from tests.kernels.test_experts import a_layer, assert_right, run  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SMALL = ExpertTiles(Tile(16, 32, 128, warps=4, stages=1), Tile(16, 64, 128, warps=4, stages=1))


def some_packed(case: Case, kind: PackedKind, dtype: torch.dtype) -> ExpertTensors:
    """Like some_tensors, with packed weights of experts."""
    generator = torch.Generator().manual_seed(5)

    def weight(out: int, width: int, spread: float) -> PackedWeight:
        experts = case.spec.num_experts
        values = torch.empty((experts, out, width // 2), dtype=torch.uint8)
        values.random_(0, 256, generator=generator)
        scales = (experts, out, width // 32)
        if kind is PackedKind.MXFP4:
            exponents = torch.empty(scales, dtype=torch.uint8).random_(
                119, 122, generator=generator
            )
            return PackedWeight(kind, values, exponents, None, 32)
        found = (spread / 8 * (0.5 + torch.rand(scales, generator=generator))).to(dtype)
        zeros = torch.empty(scales, dtype=torch.uint8).random_(6, 11, generator=generator)
        return PackedWeight(kind, values, found, zeros, 32)

    size, hidden = case.spec.size, case.hidden
    return replace(
        some_tensors(case, dtype),
        gate_up=weight(2 * size, hidden, hidden**-0.5),
        down=weight(hidden, size, size**-0.5),
    )


def dense(tensors: ExpertTensors, dtype: torch.dtype) -> ExpertTensors:
    gate_up, down = tensors.gate_up, tensors.down
    assert isinstance(gate_up, PackedWeight)
    assert isinstance(down, PackedWeight)
    return replace(tensors, gate_up=gate_up.dense(dtype), down=down.dense(dtype))


GPT_OSS = Case(
    "gpt-oss",
    replace(a_spec(num_experts=4, size=64, activation=Activation.CLAMPED_SILU), has_bias=True),
    hidden=160,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [PackedKind.MXFP4, PackedKind.INT4], ids=lambda kind: kind.value)
def test_the_layer_agrees_with_dequantized_weights(kind: PackedKind, dtype: torch.dtype) -> None:
    tensors = some_packed(GPT_OSS, kind, dtype)
    x = some_rows(9, GPT_OSS.hidden, dtype)
    layer = a_layer(GPT_OSS, tensors, 16, SMALL)
    assert_right(run(layer, x), x, dense(tensors, dtype), GPT_OSS.spec)


def test_deterministic_rows_do_not_depend_on_others() -> None:
    tensors = some_packed(GPT_OSS, PackedKind.MXFP4, torch.float32)
    x = some_rows(6, GPT_OSS.hidden)
    layer = a_layer(GPT_OSS, tensors, 8, None, is_deterministic=True)
    together = run(layer, x).clone()
    assert torch.equal(run(layer, x[2:3]), together[2:3])


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    assert choose_packed(32, 32, is_deterministic=False) is FEW
    assert choose_packed(32 * 20, 32, is_deterministic=False) is SOME
    assert choose_packed(32 * 500, 32, is_deterministic=False) is MANY
    assert {choose_packed(n, 32, is_deterministic=True) for n in (1, 640, 16000)} == {SOME}


class FewKernels:
    """Stands for few.py; it takes only some weights, and names each product that it computes."""

    def __init__(self, least_out: int) -> None:
        self.least_out, self.products = least_out, list[str]()

    def can_take(self, weights: Nibbles, is_gated: bool) -> bool:
        assert is_gated == (weights.num_out == 2 * GPT_OSS.spec.size)
        return weights.num_out >= self.least_out

    def few_gate_up(self, *_: object) -> None:
        self.products.append("gate_up")

    def few_down(self, *_: object) -> None:
        self.products.append("down")


@pytest.mark.parametrize(
    ("tiles", "least_out", "products"),
    [(FEW, 1, ["gate_up", "down"]), (FEW, 161, []), (SOME, 1, []), (FEW, 150, ["down"])],
    ids=["few rows", "no weight that it takes", "more rows", "one weight that it takes"],
)
def test_few_rows_have_a_kernel_of_their_own_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, tiles: ExpertTiles, least_out: int, products: list[str]
) -> None:
    kernels = FewKernels(least_out)
    monkeypatch.setattr(packed, "few_kernels", lambda device: kernels)
    tensors = some_packed(GPT_OSS, PackedKind.MXFP4, torch.float32)
    x = some_rows(3, GPT_OSS.hidden)
    run(a_layer(GPT_OSS, tensors, 4, tiles), x)
    assert kernels.products == products


def test_the_error_names_a_refused_argument() -> None:
    tensors = some_packed(GPT_OSS, PackedKind.MXFP4, torch.float32)
    assert isinstance(tensors.gate_up, PackedWeight)
    assert isinstance(tensors.down, PackedWeight)
    gate_up = pack_nibbles(tensors.gate_up, torch.float32)
    down = pack_nibbles(tensors.down, torch.float32)
    assert gate_up is not None
    assert down is not None
    routing = Routing.make(4, 2, 8, CPU)
    x, act, tile = torch.ones(2, 160), torch.ones(4, 64), SMALL.gate_up
    with pytest.raises(LayoutError, match=r"x must be \[rows, 160\]"):
        packed_gate_up(x[:, :128], routing, gate_up, None, "silu", tile, act)
    with pytest.raises(LayoutError, match="bias of gate_up"):
        packed_gate_up(x, routing, gate_up, torch.ones(4, 64), "silu", tile, act)
    with pytest.raises(LayoutError, match="float16"):
        packed_down(act.half(), routing, down, SMALL.down, torch.ones(4, 160))
    with pytest.raises(LayoutError, match="rows of out"):
        packed_down(act, routing, down, SMALL.down, torch.ones(3, 160))
