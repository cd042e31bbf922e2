"""Checkpoints: shards, dtypes, tied embeddings, and errors."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FalconConfig, LlamaConfig, PreTrainedConfig

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel
from mainstem.models import weights
from mainstem.models.cpu.decoder import Decoder, load_decoder
from mainstem.models.families import read_spec
from mainstem.models.shard import Shard
from mainstem.models.tensors import TensorReader
from mainstem.models.weight_files import INDEX_FILE, SINGLE_FILE, weight_files
from mainstem.models.weights import (
    Checkpoint,
    WeightDigest,
    compute_dtype,
    has_fast_matmul,
)
from tests.models.checkpoints import SMALL, SMALL_FALCON, VOCAB, make_checkpoint, write_checkpoint


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(folder, read_spec(folder), dtype)


def qkv(decoder: Decoder, x: torch.Tensor) -> torch.Tensor:
    """A product of the last layer."""
    product = decoder.layers[2].qkv
    assert product is not None
    return product(x)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Put tensors into the checkpoint, or take them out; `__` stands for a dot."""
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / SINGLE_FILE)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "one")
    make_checkpoint("llama", tmp_path / "many", max_shard="40KB")
    assert len(weight_files(tmp_path / "many")) > 3
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    hidden = torch.randn(2, 48)
    assert torch.equal(one.logits(hidden), many.logits(hidden))
    x = torch.randn(2, 48)
    assert torch.equal(qkv(one, x), qkv(many, x))


def test_the_error_names_a_missing_shard(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, max_shard="40KB")
    gone = weight_files(tmp_path)[1]
    gone.unlink()
    with pytest.raises(UnsupportedModel, match=gone.name):
        load(tmp_path)


def test_a_single_file_wins_over_shards_that_an_earlier_model_left(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "new")
    edit(tmp_path / "new", lm_head__weight=torch.randn(VOCAB, 48))
    make_checkpoint("llama", tmp_path / "both", max_shard="40KB")
    shutil.copy(tmp_path / "new" / SINGLE_FILE, tmp_path / "both")
    assert [file.name for file in weight_files(tmp_path / "both")] == [SINGLE_FILE]
    hidden = torch.randn(2, 48)
    new, both = load(tmp_path / "new"), load(tmp_path / "both")
    assert torch.equal(new.logits(hidden), both.logits(hidden))


def test_the_only_file_may_have_any_name(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    expected = load(tmp_path).logits(torch.ones(1, 48))
    other = (tmp_path / SINGLE_FILE).rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    assert torch.equal(load(tmp_path).logits(torch.ones(1, 48)), expected)
    assert len(WeightDigest(tmp_path).wait()) == 32
    shutil.copy(other, tmp_path / "another.safetensors")
    said = r"2 safetensors files \(another\.safetensors, gptq_model-4bit-128g\.safetensors\)"
    with pytest.raises(UnsupportedModel, match=said):
        weight_files(tmp_path)


def test_the_error_for_a_folder_without_weights_names_the_usual_file(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    (tmp_path / SINGLE_FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=rf"{SINGLE_FILE} is missing; only safetensors"):
        load(tmp_path)


def test_an_index_may_not_point_elsewhere(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    (tmp_path / SINGLE_FILE).rename(tmp_path / "other.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(UnsupportedModel, match="outside"):
        weight_files(tmp_path)


def test_the_error_names_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    edit(tmp_path, model__surprise=torch.zeros(2))
    with pytest.raises(UnsupportedModel, match=r"unexpected tensors model\.surprise"):
        load(tmp_path)
    edit(tmp_path, model__surprise=None, model__norm__weight=None)
    with pytest.raises(UnsupportedModel, match=r"lacks model\.norm\.weight"):
        load(tmp_path)
    edit(tmp_path, model__norm__weight=torch.zeros(5))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has shape \[5\]"):
        load(tmp_path)


def test_quantized_weights_without_a_config_have_their_own_error(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    edit(
        tmp_path,
        model__layers__0__mlp__up_proj__weight=None,
        model__layers__0__mlp__up_proj__qweight=torch.zeros(6, 80, dtype=torch.int32),
    )
    with pytest.raises(UnsupportedModel, match=r"config\.json has no quantization_config"):
        load(tmp_path)


def test_the_error_names_a_damaged_file(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnsupportedModel, match=SINGLE_FILE):
        load(tmp_path)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    edit(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    load(tmp_path)


def test_tied_heads_share_the_embedding(tmp_path: Path) -> None:
    make_checkpoint("smollm2 (tied)", tmp_path)
    decoder = load(tmp_path)
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ decoder.embedding.T)


def test_tied_embeddings_may_be_stored_as_the_head(tmp_path: Path) -> None:
    make_checkpoint("smollm2 (tied)", tmp_path)
    expected = load(tmp_path)
    table = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"]
    edit(tmp_path, lm_head__weight=table, model__embed_tokens__weight=None)
    decoder = load(tmp_path)
    assert torch.equal(decoder.embedding, table)
    hidden = torch.randn(3, 48)
    assert torch.equal(decoder.logits(hidden), expected.logits(hidden))
    edit(tmp_path, lm_head__weight=None)
    with pytest.raises(UnsupportedModel, match=r"lacks model\.embed_tokens\.weight$"):
        load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL, tie_word_embeddings=True), FalconConfig(**SMALL_FALCON)],
    ids=["llama", "falcon"],
)
def test_a_decoder_saved_without_its_head_is_read(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = write_checkpoint(config, tmp_path)
    expected = load(tmp_path)
    model.base_model.save_pretrained(tmp_path / "base")
    assert not any(
        name.startswith(("model.", "transformer."))
        for name in load_file(tmp_path / "base" / SINGLE_FILE)
    )
    shutil.copy(tmp_path / "config.json", tmp_path / "base")  # its own names no head
    found = load(tmp_path / "base")
    assert torch.equal(found.embedding, expected.embedding)
    x = torch.randn(2, 48)
    assert torch.equal(qkv(found, x), qkv(expected, x))
    assert torch.equal(found.logits(x), expected.logits(x))


HEAD = {"lm_head__weight": torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(1))}


def test_a_head_that_differs_from_a_tied_embedding_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("smollm2 (tied)", tmp_path)
    edit(tmp_path, **HEAD)
    with caplog.at_level(logging.WARNING, "mainstem.models"):
        decoder = load(tmp_path)
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ HEAD["lm_head__weight"].T)
    (record,) = caplog.records
    assert "a different lm_head: this head is used" in record.getMessage()


@pytest.mark.parametrize("changed_row", [None, 0, VOCAB - 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_whether_a_stored_head_is_a_copy_of_the_embedding(
    changed_row: int | None, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row in either rank's half is changed, or none."""
    monkeypatch.setattr(weights, "_COMPARED_ROWS", 16)  # several comparisons
    make_checkpoint("smollm2 (tied)", tmp_path)
    head = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"].clone()
    if changed_row is not None:
        head[changed_row, 7] += 0.5
    edit(tmp_path, lm_head__weight=head)
    spec = read_spec(tmp_path)
    reader = TensorReader(Checkpoint(tmp_path, torch.float32), spec, Shard(rank, 2))
    embedding = reader.embedding()
    for index in range(spec.num_layers):
        reader.layer(index)
    weight = reader.ends(embedding).head.dense
    is_tied = weight.data_ptr() == embedding.data_ptr()
    assert is_tied is (changed_row is None)


def test_a_copy_of_the_embedding_in_another_dtype_is_a_copy(tmp_path: Path) -> None:
    make_checkpoint("smollm2 (tied)", tmp_path, dtype=torch.bfloat16)
    head = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"].float()
    edit(tmp_path, lm_head__weight=head)
    files = Checkpoint(tmp_path, torch.bfloat16)
    assert not files.has_other("lm_head", "model.embed_tokens")


def test_a_head_of_another_shape_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("smollm2 (tied)", tmp_path)
    edit(tmp_path, lm_head__weight=torch.zeros(VOCAB + 1, 48))
    load(tmp_path)
    assert "lm_head.weight has another shape than model.embed_tokens.weight" in caplog.text


def test_auto_dtype_avoids_slow_16_bit_arithmetic() -> None:
    assert compute_dtype(DType.AUTO, DType.FP32) == torch.float32
    assert compute_dtype(DType.BF16, DType.FP32) == torch.bfloat16
    expected = torch.bfloat16 if has_fast_matmul(torch.bfloat16) else torch.float32
    assert compute_dtype(DType.AUTO, DType.BF16) == expected


@pytest.mark.parametrize(
    ("supported", "avx512", "avx512_bf16", "is_fast"),
    [
        (False, False, False, False),
        (True, False, False, True),  # Arm
        (True, True, False, False),  # Cascade Lake: oneDNN emulates bf16
        (True, True, True, True),
    ],
)
def test_emulated_bf16_is_not_fast(
    supported: bool, avx512: bool, avx512_bf16: bool, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "has_products", lambda dtype: supported)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert has_fast_matmul(torch.bfloat16) is is_fast
    expected = torch.bfloat16 if is_fast else torch.float32
    assert compute_dtype(DType.AUTO, DType.BF16) == expected


def test_the_digest_differs_for_different_weights(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    before = WeightDigest(tmp_path).wait()
    assert WeightDigest(tmp_path).wait() == before
    weight = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"]
    edit(tmp_path, model__embed_tokens__weight=weight + 1.0)
    assert WeightDigest(tmp_path).wait() != before
