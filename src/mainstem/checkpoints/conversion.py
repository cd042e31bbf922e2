"""A GGUF file of the llama architecture -> the six files of the Hugging Face layout."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mainstem.checkpoints.progress import Progress
from mainstem.core.errors import ModelNotFound

Floats = NDArray[np.float32]

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKEN_TYPE_CONTROL = 3  # llama.cpp's token types; 1 is an ordinary token


class Files(Protocol):
    """A folder that files are written to."""

    def write(self, name: str, text: str) -> None: ...

    def write_json(self, name: str, value: object) -> None: ...

    def write_tensors(self, name: str, tensors: dict[str, Floats]) -> None: ...


class _Tensor(Protocol):
    """What is used of a tensor in the GGUF reader."""

    name: str
    shape: Sequence[int]  # the fastest axis first
    data: NDArray[np.uint8]
    tensor_type: int


class _Reader(Protocol):
    """What is used of the GGUF reader."""

    fields: Mapping[str, "_Field"]
    tensors: Sequence[_Tensor]


class _Field(Protocol):
    """One setting of a GGUF file."""

    def contents(self) -> object: ...


_Dequantize = Callable[[NDArray[np.uint8], int], NDArray[np.float32]]


def convert(reader: _Reader, dequantize: _Dequantize, out: Files, progress: Progress) -> None:
    """Write the six files of the Hugging Face layout from a llama-architecture GGUF."""
    progress("convert", 0.0)
    fields = _Fields(reader.fields)
    if (kind := fields.text("general.architecture")) != "llama":
        raise ModelNotFound(f"the GGUF file has architecture {kind}, expected llama")
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    out.write_json("config.json", _model_config(fields, is_tied))
    tokenizer, tokenizer_config = _tokenizer_files(fields)
    out.write("tokenizer.json", tokenizer)
    out.write_json("tokenizer_config.json", tokenizer_config)
    out.write("chat_template.jinja", fields.text("tokenizer.chat_template"))
    ids = {key: fields.whole(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos")}
    pad_id = fields.whole("tokenizer.ggml.padding_token_id")
    out.write_json(
        "generation_config.json",
        {
            "bos_token_id": ids["bos"],
            "eos_token_id": ids["eos"],
            "pad_token_id": pad_id,
            "do_sample": True,
            "temperature": 0.2,  # this and the next: as SmolLM2's makers advise
            "top_p": 0.9,
        },
    )
    heads = {
        "q_proj": fields.whole("llama.attention.head_count"),
        "k_proj": fields.whole("llama.attention.head_count_kv"),
    }

    def load(tensor: _Tensor) -> Floats:
        values = dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False)
        part = _tensor_name(tensor.name).split(".")[-2]
        return _halves(values, heads[part]) if part in heads else values

    tensors: dict[str, Floats] = {}
    for index, tensor in enumerate(reader.tensors):
        tensors[_tensor_name(tensor.name)] = load(tensor)
        progress("convert", (index + 1) / len(reader.tensors))
    out.write_tensors("model.safetensors", tensors)


class _Fields:
    """The GGUF's settings, read with the type each must have."""

    def __init__(self, fields: Mapping[str, _Field]) -> None:
        self._fields = fields

    def _read(self, name: str) -> object:
        if name not in self._fields:
            raise ModelNotFound(f"the GGUF file has no field {name}")
        return self._fields[name].contents()

    def text(self, name: str) -> str:
        return str(self._read(name))

    def whole(self, name: str) -> int:
        return int(str(self._read(name)))

    def real(self, name: str) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.99999974e-06."""
        return float(str(np.float32(str(self._read(name)))))

    def items(self, name: str) -> list[object]:
        value = self._read(name)
        assert isinstance(value, list), f"{name} is not an array"
        return value


def _model_config(fields: _Fields, is_tied: bool) -> dict[str, object]:
    num_heads = fields.whole("llama.attention.head_count")
    hidden_size = fields.whole("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields.whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.whole("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.whole("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": fields.whole("llama.feed_forward_length"),
        "max_position_embeddings": fields.whole("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields.whole("llama.block_count"),
        "num_key_value_heads": fields.whole("llama.attention.head_count_kv"),
        "pretraining_tp": 1,
        "rms_norm_eps": fields.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": fields.real("llama.rope.freq_base"),
        "tie_word_embeddings": is_tied,
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": len(fields.items("tokenizer.ggml.tokens")),
    }


def _tokenizer_files(fields: _Fields) -> tuple[str, dict[str, object]]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with single digits."""
    kind = (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelNotFound(f"the GGUF's tokenizer {kind} is not one this conversion knows")
    tokens = [str(token) for token in fields.items("tokenizer.ggml.tokens")]
    types = fields.items("tokenizer.ggml.token_type")
    pairs = [str(merge).split(" ") for merge in fields.items("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    # "smollm" splits digits one by one before the usual byte-level split
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, types, strict=True) if kind == TOKEN_TYPE_CONTROL
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )

    def named(role: str) -> str:
        return tokens[fields.whole(f"tokenizer.ggml.{role}_token_id")]

    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it stands
        "add_bos_token": fields.text("tokenizer.ggml.add_bos_token") == "True",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "model_max_length": fields.whole("llama.context_length"),
        "chat_template": fields.text("tokenizer.chat_template"),
    }
    return tokenizer.to_str(), config


def _tensor_name(name: str) -> str:
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelNotFound(f"the GGUF file has an unknown tensor {name}")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def _halves(values: Floats, num_heads: int) -> Floats:
    """Rows of q or k from llama.cpp's order (rotary pairs) back to Hugging Face's (halves)."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
