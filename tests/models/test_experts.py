"""Mixtures of experts: both layouts are read in parts, and the CPU's output is right."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen2MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from mainstem.core.errors import UnsupportedModel
from mainstem.models.cpu.activations import gated, plain
from mainstem.models.cpu.experts import CpuExperts
from mainstem.models.expert_tensors import ExpertTensors, read_experts
from mainstem.models.names import ExpertLayout, Names
from mainstem.models.packed import as_tensor
from mainstem.models.spec import Activation, ExpertsSpec
from mainstem.models.weight_files import SINGLE_FILE
from mainstem.models.weights import Checkpoint, RandomWeights, WeightSource
from tests.expert_layers import CASES, Case, a_spec, right_answer, some_rows, some_tensors
from tests.models.live_bytes import LiveBytes

pytestmark = pytest.mark.torch

MIXTRAL = Names(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)
GPT_OSS = Names(
    router="mlp.router",
    expert_layout=ExpertLayout.INTERLEAVED,
    expert_gate="mlp.experts.gate_up_proj",
    expert_down="mlp.experts.down_proj",
)
PREFIX = "model.layers.3."


def separate(tensors: ExpertTensors, names: Names) -> dict[str, Tensor]:
    """Experts in the layout of Mixtral's and Qwen's checkpoints."""
    found = {f"{names.router}.weight": tensors.router}
    for expert in range(len(tensors.router)):
        gate, up = as_tensor(tensors.gate_up)[expert].chunk(2)
        found[f"{names.expert_gate.format(expert)}.weight"] = gate
        found[f"{names.expert_up.format(expert)}.weight"] = up
        found[f"{names.expert_down.format(expert)}.weight"] = as_tensor(tensors.down)[expert]
    if tensors.shared_gate_up is not None and tensors.shared_down is not None:
        gate, up = as_tensor(tensors.shared_gate_up).chunk(2)
        found[f"{names.shared_gate_up[0]}.weight"] = gate
        found[f"{names.shared_gate_up[1]}.weight"] = up
        found[f"{names.shared_down}.weight"] = as_tensor(tensors.shared_down)
    if tensors.shared_gate is not None:
        found[f"{names.shared_gate}.weight"] = tensors.shared_gate
    return {PREFIX + name: tensor.contiguous() for name, tensor in found.items()}


def interleaved(tensors: ExpertTensors, names: Names) -> dict[str, Tensor]:
    """Experts in the layout of gpt-oss."""
    found = {
        f"{names.router}.weight": tensors.router,
        names.expert_gate: in_turns(as_tensor(tensors.gate_up).transpose(1, 2)),
        names.expert_down: as_tensor(tensors.down).transpose(1, 2),
    }
    if tensors.router_bias is not None:
        assert tensors.gate_up_bias is not None
        assert tensors.down_bias is not None
        found[f"{names.router}.bias"] = tensors.router_bias
        found[f"{names.expert_gate}_bias"] = in_turns(tensors.gate_up_bias)
        found[f"{names.expert_down}_bias"] = tensors.down_bias
    return {PREFIX + name: tensor.contiguous() for name, tensor in found.items()}


def in_turns(gate_then_up: Tensor) -> Tensor:
    gate, up = gate_then_up.chunk(2, dim=-1)
    return torch.stack((gate, up), dim=-1).flatten(-2)


def assert_same(found: ExpertTensors, right: ExpertTensors) -> None:
    for field in fields(right):
        mine, theirs = getattr(found, field.name), getattr(right, field.name)
        if isinstance(theirs, Tensor):
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


def saved(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file(tensors, folder / SINGLE_FILE)
    return Checkpoint(folder, torch.float32)


def read(source: WeightSource, case: Case, names: Names) -> ExpertTensors:
    return read_experts(source, case.spec, case.hidden, PREFIX, names)


@pytest.mark.parametrize("names", [MIXTRAL, Names()], ids=["mixtral", "qwen"])
@pytest.mark.parametrize("name", ["silu", "shared", "gated shared"])
def test_experts_in_separate_tensors_are_read(tmp_path: Path, name: str, names: Names) -> None:
    case = case_of(name)
    right = some_tensors(case)
    source = saved(tmp_path, separate(right, names))
    assert_same(read(source, case, names), right)
    source.finish()


@pytest.mark.parametrize("name", ["silu", "biases"])
def test_interleaved_experts_are_read(tmp_path: Path, name: str) -> None:
    case = case_of(name)
    right = some_tensors(case)
    source = saved(tmp_path, interleaved(right, GPT_OSS))
    assert_same(read(source, case, GPT_OSS), right)
    source.finish()


def test_biases_of_separate_experts_are_read(tmp_path: Path) -> None:
    case = case_of("biases")
    right, names = some_tensors(case), Names()
    tensors = separate(right, names)
    assert right.router_bias is not None
    assert right.gate_up_bias is not None
    assert right.down_bias is not None
    tensors[f"{PREFIX}{names.router}.bias"] = right.router_bias
    for expert in range(case.spec.num_experts):
        gate, up = right.gate_up_bias[expert].chunk(2)
        for name, bias in (
            (names.expert_gate, gate),
            (names.expert_up, up),
            (names.expert_down, right.down_bias[expert]),
        ):
            tensors[f"{PREFIX}{name.format(expert)}.bias"] = bias.contiguous().clone()
    source = saved(tmp_path, tensors)
    assert_same(read(source, case, names), right)
    source.finish()


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_missing_and_unread_experts_are_named(tmp_path: Path) -> None:
    case, names = case_of("silu"), Names()
    tensors = separate(some_tensors(case), names)
    tensors[f"{PREFIX}mlp.experts.6.gate_proj.weight"] = torch.zeros(1)
    source = saved(tmp_path, tensors)
    read(source, case, names)
    with pytest.raises(UnsupportedModel, match=r"unexpected.*experts\.6\.gate_proj"):
        source.finish()
    del tensors[f"{PREFIX}mlp.experts.6.gate_proj.weight"]
    del tensors[f"{PREFIX}mlp.experts.2.down_proj.weight"]
    source = saved(tmp_path, tensors)
    read(source, case, names)
    with pytest.raises(UnsupportedModel, match=r"lacks.*experts\.2\.down_proj\.weight"):
        source.finish()


def test_a_tensor_may_be_taken_in_parts(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(3, 4, 5)
    source = saved(tmp_path, {"a": whole, "b": whole[0].clone()})
    at = (slice(1, 2), slice(2, None))
    assert torch.equal(source.take("a", (3, 4, 5), at), whole[1:2, 2:])
    assert torch.equal(source.take("a", (3, 4, 5), (slice(0, 1),)), whole[:1])
    with pytest.raises(UnsupportedModel, match=r"unexpected tensors b$"):
        source.finish()
    assert source.take("b", (4, 5)).shape == (4, 5)
    source.finish()
    with pytest.raises(UnsupportedModel, match=r"a has shape \[3, 4, 5\], expected \[3, 4, 6\]"):
        source.take("a", (3, 4, 6), at)
    assert source.take("c", (3, 4, 6), at).shape == (1, 2, 6)
    assert source.take("c", (3, 4, 6), at).shape == (1, 2, 6)
    with pytest.raises(UnsupportedModel, match=r"lacks c$"):
        source.finish()


def test_random_weights_can_be_taken_in_parts() -> None:
    source = RandomWeights(torch.float32, torch.device("cpu"), seed=0)
    assert source.take("x", (3, 4, 5), (slice(0, 2), slice(1, 4, 2))).shape == (2, 2, 5)
    found = read(source, case_of("biases"), GPT_OSS)
    assert found.down.shape == (6, 32, 24)


class Copies:
    """A source that returns a new tensor for every part, as one on a device does."""

    def __init__(self, inner: WeightSource) -> None:
        self._inner = inner

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        return self._inner.take(name, shape, at).clone()

    def take_packed(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> None:
        return None

    def has(self, name: str) -> bool:
        return self._inner.has(name)


@pytest.mark.parametrize("names", [MIXTRAL, GPT_OSS], ids=["separate", "interleaved"])
def test_loading_takes_little_more_memory_than_the_layer(tmp_path: Path, names: Names) -> None:
    """One of 32 experts is 3 % of the layer; the source's copies count too."""
    case = Case("32 experts", replace(a_spec(num_experts=32), size=32), hidden=64)
    make = separate if names is MIXTRAL else interleaved
    source = saved(tmp_path, make(some_tensors(case), names))
    with LiveBytes() as live:
        found = read_experts(Copies(source), case.spec, case.hidden, PREFIX, names)  # type: ignore[arg-type]
    total = found.router.nbytes + found.gate_up.nbytes + found.down.nbytes
    assert total <= live.now <= live.most <= 1.1 * total


@pytest.mark.parametrize("tokens", [0, 1, 2, 19])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_agrees_with_the_reference(case: Case, tokens: int) -> None:
    tensors, x = some_tensors(case), some_rows(tokens, case.hidden)
    kept = x.clone()
    found = CpuExperts(tensors, case.spec)(x)
    torch.testing.assert_close(found, right_answer(x, tensors, case.spec), rtol=1e-4, atol=1e-4)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("tokens", [1, 19])
def test_bf16_is_right_within_its_rounding(tokens: int) -> None:
    """Each of several products rounds activations and outputs to 8 bits: errors of 2^-8 near 1."""
    case = case_of("gated shared")
    tensors, x = some_tensors(case, torch.bfloat16), some_rows(tokens, case.hidden, torch.bfloat16)
    found = CpuExperts(tensors, case.spec)(x)
    assert found.dtype == torch.bfloat16
    right = right_answer(x, tensors, case.spec)
    torch.testing.assert_close(found.float(), right, rtol=2e-2, atol=3e-2)


def test_ties_between_experts_are_broken_by_the_lowest_index() -> None:
    case = case_of("silu")
    tensors = some_tensors(case)
    tensors.router.zero_()
    x = some_rows(5, case.hidden)
    found = CpuExperts(tensors, case.spec)(x)
    as_tensor(tensors.gate_up)[2:] = float("nan")  # never read: the first two of six are chosen
    assert torch.equal(CpuExperts(tensors, case.spec)(x), found)
    assert not found.isnan().any()


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)


def test_gpt_oss_answers_as_transformers(tmp_path: Path) -> None:
    config = GptOssConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=6, num_experts_per_tok=3
    )
    module = GptOssMLP(config)
    fill(module)
    tensors = {f"{PREFIX}mlp.{n}": t.detach().clone() for n, t in module.named_parameters()}
    spec = ExpertsSpec(6, 3, 24, Activation.CLAMPED_SILU, has_bias=True)
    source = saved(tmp_path, tensors)
    found = CpuExperts(read_experts(source, spec, 32, PREFIX, GPT_OSS), spec)
    source.finish()
    x = some_rows(11, 32) * 3
    with torch.no_grad():
        right = module(x[None])[0][0]
    torch.testing.assert_close(found(x), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_qwen2_moe_answers_as_transformers(is_normalized: bool) -> None:
    config = Qwen2MoeConfig(
        hidden_size=32, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        num_experts=6, num_experts_per_tok=3, norm_topk_prob=is_normalized,
    )  # fmt: skip
    module = Qwen2MoeSparseMoeBlock(config)
    fill(module)
    found = {n: t.detach() for n, t in module.named_parameters()}
    tensors = ExpertTensors(
        router=found["gate.weight"],
        router_bias=None,
        gate_up=found["experts.gate_up_proj"],
        gate_up_bias=None,
        down=found["experts.down_proj"],
        down_bias=None,
        shared_gate_up=torch.cat(
            (found["shared_expert.gate_proj.weight"], found["shared_expert.up_proj.weight"])
        ),
        shared_down=found["shared_expert.down_proj.weight"],
        shared_gate=found["shared_expert_gate.weight"],
    )
    spec = ExpertsSpec(
        6, 3, 24, Activation.SILU, is_normalized, shared_size=40, has_shared_gate=True
    )
    x = some_rows(11, 32)
    with torch.no_grad():
        right = module(x[None])[0]
    torch.testing.assert_close(CpuExperts(tensors, spec)(x), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [a for a in Activation if a.value != "clamped"])
def test_activations_do_not_change_their_inputs(activation: Activation) -> None:
    x = some_rows(3, 16)
    kept = x.clone()
    both = gated(activation)(x)
    torch.testing.assert_close(both, plain(activation)(x[:, :8]) * x[:, 8:])
    assert torch.equal(x, kept)


def test_the_clamped_activation_needs_a_gate() -> None:
    with pytest.raises(UnsupportedModel, match="clamped"):
        plain(Activation.CLAMPED_SILU)
