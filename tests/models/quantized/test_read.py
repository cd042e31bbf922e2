"""Every format except MXFP4 is read exactly, whole and in parts."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import Config
from mainstem.models.packed import PackedWeight
from mainstem.models.quantized.config import read_quantized
from mainstem.models.weight_files import SINGLE_FILE
from mainstem.models.weights import Checkpoint
from tests.models.quantized.cases import CASES, FP8, gptq_config
from tests.models.quantized.oracles import Case, Tensors, fp8, gptq

pytestmark = pytest.mark.torch
NAME = "model.layers.0.mlp.up_proj"
OUT, WIDTH = 40, 96  # neither is a multiple of 128, and 40 is not one of 32


def saved(
    folder: Path, config: Mapping[str, object], tensors: Tensors, dtype: torch.dtype = torch.float32
) -> Checkpoint:
    whole = {f"{NAME}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / SINGLE_FILE)
    quantized = read_quantized(Config({"quantization_config": config}))
    return Checkpoint(folder, dtype, quantized=quantized)


def taken(source: Checkpoint, at: tuple[slice, ...] = (), width: int = WIDTH) -> PackedWeight:
    packed = source.take_packed(NAME, (OUT, width), at)
    assert packed is not None
    return packed


def own_bytes(packed: PackedWeight) -> int:
    parts = (packed.values, packed.scales, packed.zeros, packed.order)
    return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_number_is_decoded_as_the_format_says(case: Case, tmp_path: Path) -> None:
    tensors, right = case.make(np.random.default_rng(0), OUT, WIDTH)
    source = saved(tmp_path, case.config, tensors)
    found = taken(source)
    assert found.shape == (OUT, WIDTH)
    assert torch.equal(found.dense(torch.float32), torch.from_numpy(right))
    rounded = torch.from_numpy(right).to(torch.bfloat16)
    assert torch.equal(found.dense(torch.bfloat16), rounded)
    source.finish()  # fails if a tensor was neither read nor known to be unnecessary


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "at",
    [(slice(8, 24),), (slice(3, 37),), (slice(None), slice(32, 64)), (slice(16, 40), slice(0, 48))],
    ids=["rows", "odd rows", "columns", "both"],
)
def test_reading_a_part_gives_that_part_of_the_whole(
    case: Case, at: tuple[slice, ...], tmp_path: Path
) -> None:
    tensors, right = case.make(np.random.default_rng(0), OUT, WIDTH)
    source = saved(tmp_path, case.config, tensors)
    if len(at) == 2 and "act-order" in case.name:
        with pytest.raises(UnsupportedModel, match="act-order"):
            taken(source, at)
        return
    found = taken(source, at)
    assert torch.equal(found.dense(torch.float32), torch.from_numpy(right)[at])
    assert own_bytes(found) == found.nbytes, "a part keeps the whole in memory"


def test_scales_are_in_the_compute_dtype(tmp_path: Path) -> None:
    tensors, right = gptq(np.random.default_rng(0), OUT, WIDTH)
    found = taken(saved(tmp_path, gptq_config(), tensors, torch.float16))
    assert found.scales.dtype == torch.float16
    assert torch.equal(found.dense(torch.float32), torch.from_numpy(right))


def test_a_product_that_is_not_quantized_stays_plain(tmp_path: Path) -> None:
    source = saved(tmp_path, gptq_config(), {"weight": torch.ones(OUT, WIDTH)})
    assert source.take_packed(NAME, (OUT, WIDTH)) is None
    assert torch.equal(source.take(f"{NAME}.weight", (OUT, WIDTH)), torch.ones(OUT, WIDTH))
    source.finish()


def test_rules_may_give_modules_other_bits_or_leave_them_plain(tmp_path: Path) -> None:
    dynamic = {
        r"+:.*up_proj": {"bits": 8, "group_size": 32},
        r"-:model\.layers\.0\.mlp\.down.*": {},
    }
    config = gptq_config(dynamic=dynamic)
    tensors, right = gptq(np.random.default_rng(0), OUT, WIDTH, bits=8, group=32)
    found = taken(saved(tmp_path, config, tensors))
    assert torch.equal(found.dense(torch.float32), torch.from_numpy(right))
    quantized = read_quantized(Config({"quantization_config": config}))
    assert quantized is not None
    assert quantized.packing_of("model.layers.0.mlp.down_proj") is None
    assert quantized.packing_of("model.layers.1.mlp.down_proj") == quantized.packing
    assert quantized.packing_of("lm_head") is None


def test_the_tensors_in_the_files_decide_which_products_are_packed(tmp_path: Path) -> None:
    config = gptq_config(dynamic={r"-:.*up_proj": {}})
    tensors, right = gptq(np.random.default_rng(0), OUT, WIDTH)
    found = taken(saved(tmp_path, config, tensors))
    assert torch.equal(found.dense(torch.float32), torch.from_numpy(right))


def _without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def _changed(tensors: Tensors, name: str, tensor: Tensor) -> Tensors:
    return {**tensors, name: tensor}


def test_the_error_names_a_damaged_tensor(tmp_path: Path) -> None:
    tensors, _ = gptq(np.random.default_rng(0), OUT, WIDTH)
    with pytest.raises(UnsupportedModel, match=r"lacks model\.layers\.0\.mlp\.up_proj\.scales"):
        taken(saved(tmp_path, gptq_config(), _without(tensors, "scales")))
    with pytest.raises(UnsupportedModel, match=r"scales has shape \[6, 40\], expected \[3, 40\]"):
        taken(saved(tmp_path, gptq_config(group_size=32), tensors))
    uneven = _changed(tensors, "g_idx", torch.zeros(WIDTH, dtype=torch.int32))
    with pytest.raises(UnsupportedModel, match="g_idx does not give each group 16 columns"):
        taken(saved(tmp_path, gptq_config(desc_act=True), uneven))
    with pytest.raises(UnsupportedModel, match=r"96 columns are not a multiple .* groups of 40"):
        taken(saved(tmp_path, gptq_config(group_size=40), tensors))
    wrong = {"weight": torch.ones(OUT, WIDTH), "weight_scale": torch.ones(())}
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight is of torch\.float32, expected"):
        taken(saved(tmp_path, FP8, wrong))


def test_bytes_without_scales_are_not_read_as_numbers(tmp_path: Path) -> None:
    source = saved(tmp_path, FP8, {"weight": torch.ones(OUT, WIDTH).to(torch.float8_e4m3fn)})
    assert source.take_packed(NAME, (OUT, WIDTH)) is None
    with pytest.raises(UnsupportedModel, match="no quantization_config that describes it"):
        source.take(f"{NAME}.weight", (OUT, WIDTH))


@pytest.mark.parametrize("name", ["input_scale", "activation_scale", "k_scale", "kv_scale"])
def test_scales_of_activations_are_ignored(name: str, tmp_path: Path) -> None:
    tensors, right = fp8(np.random.default_rng(0), OUT, WIDTH, scale_shape=())
    source = saved(tmp_path, FP8, {**tensors, name: torch.ones(())})
    assert torch.equal(taken(source).dense(torch.float32), torch.from_numpy(right))
    source.finish()


def test_biases_that_tools_add_are_dropped_if_they_are_zero(tmp_path: Path) -> None:
    tensors, _ = gptq(np.random.default_rng(0), OUT, WIDTH)
    source = saved(tmp_path, gptq_config(), {**tensors, "bias": torch.zeros(OUT)})
    taken(source)
    source.finish()
    source = saved(tmp_path, gptq_config(), {**tensors, "bias": torch.ones(OUT)})
    taken(source)
    with pytest.raises(UnsupportedModel, match=r"a bias that is not expected, .*up_proj\.bias"):
        source.finish()
