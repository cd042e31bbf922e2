"""GGUF files of other architectures than the default model's become Hugging Face folders."""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import Gemma3TextConfig, Qwen2Config

from mainstem.checkpoints.conversion import convert
from mainstem.checkpoints.progress import unseen
from mainstem.core.errors import ModelNotFound
from mainstem.models.families import read_spec
from tests.models.checkpoints import SMALL, write_checkpoint

SPACE = "\u2581"
LETTERS = ["h", "e", "l", "o", SPACE]
# type, token, score: SentencePiece merges the two neighbours that make the token of highest score
PIECES = [
    (3, "<pad>", 0.0),
    (3, "<eos>", 0.0),
    (3, "<bos>", 0.0),
    (2, "<unk>", 0.0),
    (4, SPACE * 2, -1000.0),
    *((1, letter, -100.0) for letter in LETTERS),
    *((6, f"<0x{byte:02X}>", 0.0) for byte in range(128)),
    (1, "he", -2.0),
    (1, "el", -1.0),
    (1, "ll", -3.0),
    (1, f"{SPACE}o", -4.0),
]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class Folder:
    """Where a conversion writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        (self._path / name).write_bytes(b"".join(parts))

    def write_json(self, name: str, value: object) -> None:
        (self._path / name).write_text(json.dumps(value))


def tensor_name(name: str, post_attention: str) -> str:
    """The name in llama.cpp; `post_attention` is that of `post_attention_layernorm`."""
    stem, kind = name.rsplit(".", 1)
    if stem == "lm_head":
        return f"output.{kind}"
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    found = post_attention if part == "post_attention_layernorm" else NAMES[part]
    return f"blk.{layer}.{found}.{kind}"


def write_common(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(SMALL["num_hidden_layers"])
    writer.add_context_length(SMALL["max_position_embeddings"])
    writer.add_embedding_length(SMALL["hidden_size"])
    writer.add_feed_forward_length(SMALL["intermediate_size"])
    writer.add_head_count(SMALL["num_attention_heads"])
    writer.add_head_count_kv(SMALL["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)


def finish(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gemma(folder: Path, path: Path) -> None:
    """The checkpoint in `folder` as llama.cpp writes it."""
    writer = gguf.GGUFWriter(path, "gemma3")
    write_common(writer)
    writer.add_key_length(16)
    writer.add_sliding_window(11)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    types, tokens, scores = zip(*PIECES, strict=True)
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(types))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        grown = values + 1 if name.endswith("norm.weight") else values
        tensors[tensor_name(name, "post_attention_norm")] = grown
    finish(writer, tensors)


def write_qwen(folder: Path, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    write_common(writer)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["h", "i", "hi", "1", "2", "Ġ", "<think>", "<|end|>"])
    writer.add_token_types([1, 1, 1, 1, 1, 1, 4, 3])
    writer.add_token_merges(["h i"])
    writer.add_pad_token_id(7)
    writer.add_eos_token_id(7)
    writer.add_bos_token_id(7)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
    tensors = load_file(folder / "model.safetensors")
    finish(writer, {tensor_name(name, "ffn_norm"): each for name, each in tensors.items()})


def convert_file(path: Path, into: Path) -> Path:
    reading = importlib.import_module("gguf")  # untyped, as in the package
    convert(reading.GGUFReader(path), reading.dequantize, Folder(into), unseen)
    return into


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `saved`, as transformers wrote it, and `made`, converted from its GGUF file."""
    folder = tmp_path_factory.mktemp("gemma")
    config = Gemma3TextConfig(
        **SMALL | {"vocab_size": len(PIECES), "bos_token_id": 2, "eos_token_id": 1},
        head_dim=16,
        sliding_window=11,
        query_pre_attn_scalar=16,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5000.0}},
    )
    write_checkpoint(config, folder / "saved")
    write_gemma(folder / "saved", folder / "gemma.gguf")
    convert_file(folder / "gemma.gguf", folder / "made")
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    sizes = {"vocab_size": 8, "bos_token_id": 7, "eos_token_id": 7}
    write_checkpoint(Qwen2Config(**SMALL | sizes), folder / "saved")
    write_qwen(folder / "saved", folder / "qwen.gguf")
    convert_file(folder / "qwen.gguf", folder / "made")
    return folder


@pytest.mark.parametrize("name", ["gemma", "qwen"])
def test_a_conversion_keeps_weights_and_recipe(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    expected = load_file(folder / "saved" / "model.safetensors")
    found = load_file(folder / "made" / "model.safetensors")
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_allclose(found[tensor], values, rtol=0, atol=1e-6, err_msg=tensor)
    assert read_spec(folder / "made") == read_spec(folder / "saved")


def test_pieces_are_merged_by_their_scores(gemma: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gemma / "made" / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<bos>", "h", "el", "l", "o"]
    assert tokenizer.encode("he  o o").tokens == ["<bos>", "he", SPACE * 2, "o", f"{SPACE}o"]
    assert tokenizer.encode("o!<eos>").tokens == ["<bos>", "o", "<0x21>", "<eos>"]
    for text in ("hello  o", "e! h", " o"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_tokenizer_of_qwen_is_converted(qwen: Path) -> None:
    tokenizer = Tokenizer.from_file(str(qwen / "made" / "tokenizer.json"))
    assert tokenizer.encode("hi 12<think><|end|>").tokens == [
        "hi",
        "Ġ",
        "1",
        "2",
        "<think>",
        "<|end|>",
    ]
    assert tokenizer.decode(tokenizer.encode("hi 12<think>hi<|end|>").ids) == "hi 12<think>hi"
    assert (qwen / "made" / "chat_template.jinja").is_file()


@pytest.mark.parametrize(("kind", "said"), [("bert", "bert, known: llama"), ("gemma3", "no field")])
def test_unknown_architectures_and_missing_fields_are_refused(
    kind: str, said: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", kind)
    finish(writer, {"output_norm.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(ModelNotFound, match=said):
        convert_file(tmp_path / "other.gguf", tmp_path / "made")
