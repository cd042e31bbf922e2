"""ModelSpec: what a checkpoint's config.json says about the mathematics, and nothing else.

Every field of the file is either read, known to be harmless, or accepted only at given values.
Names that begin with an underscore are private notes of the tool that wrote them. Anything else is
refused by name, unless the user says that it does not matter: a field we do not know may change the
answer.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
QUANTIZED = (  # what is said of checkpoints whose weights are quantized
    "quantized checkpoints are not supported yet. Use the model's fp32, bf16 or fp16 checkpoint; "
    "--quantize int8 (CPU) or fp8 (GPU) makes its weights smaller as they are loaded"
)


class Norm(Enum):
    RMS = "rms"


class RopeScaling(Enum):
    NONE = "default"
    LINEAR = "linear"  # all frequencies divided by `factor`
    LLAMA3 = "llama3"  # low frequencies divided, high ones kept, smooth in between
    YARN = "yarn"  # likewise by dims, and all scores scaled


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: frequencies theta^(-2i/rotary_dim), then scaled."""

    theta: float
    rotary_dim: int  # leading dims of a head that are rotated
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0  # yarn: turns in the original context above which a dim is kept ...
    beta_slow: float = 1.0  # ... and below which it is divided
    has_whole_bounds: bool = True  # yarn: these dims are rounded to whole numbers
    score_factor: float = 1.0  # yarn: query and key are multiplied by it each

    @property
    def has_fixed_frequencies(self) -> bool:
        """Whether a key can be turned to another position: it is not for kinds of scaling that
        depend on the length of the context (dynamic, longrope)."""
        return self.scaling in (
            RopeScaling.NONE,
            RopeScaling.LINEAR,
            RopeScaling.LLAMA3,
            RopeScaling.YARN,
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder's shape and switches."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: Norm
    norm_eps: float
    rope: RopeSpec
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_parallel_residual: bool  # attention and MLP read the same input (Phi-2, Falcon)
    has_tied_embeddings: bool
    dtype: DType  # of the checkpoint
    sliding_window: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    ignored_fields: tuple[str, ...] = ()  # of the file: not known, and ignored by order

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.rope.rotary_dim % 2 or self.rope.rotary_dim > self.head_dim:
            raise UnsupportedModel(
                f"{self.rope.rotary_dim} rotary dims do not fit a head of {self.head_dim}"
            )

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.head_dim**-0.5 * self.rope.score_factor**2)

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers of K and V that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_layer_params(self) -> int:
        """Weights of the products in all layers."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def check_context(self, num_tokens: int) -> None:
        """Raise UnsupportedModel where a context of this length would be windowed."""
        if self.sliding_window is not None and self.sliding_window < num_tokens:
            raise UnsupportedModel(
                f"sliding_window={self.sliding_window} is shorter than the context of {num_tokens} "
                f"tokens; windowed attention is not supported, "
                f"set max_model_len to {self.sliding_window} or less"
            )


# architecture -> fields that only it reads
_ARCHITECTURES: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": frozenset({"attention_bias", "mlp_bias"}),
    "MistralForCausalLM": frozenset({"sliding_window"}),
    "Qwen2ForCausalLM": frozenset({"max_window_layers"}),
    "Qwen3ForCausalLM": frozenset({"attention_bias", "max_window_layers"}),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    "architectures vocab_size hidden_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim intermediate_size max_position_embeddings rms_norm_eps "
    "rope_theta rope_scaling rope_parameters tie_word_embeddings torch_dtype dtype "
    "bos_token_id eos_token_id sliding_window use_sliding_window"
)

# none of these changes a decoder's logits
_HARMLESS = _words(
    # names and versions
    "model_type model_name name version model_version transformers_version unsloth_version "
    "unsloth_fixed base_model base_model_name_or_path tokenizer_class transformers.js_config "
    "is_llama_config license language tags library_name auto_map "
    # lengths beside max_position_embeddings
    "model_max_length max_sequence_length max_seq_len max_seq_length seq_length "
    "tokenizer_model_max_length tokenizer_padding_side "
    # training
    "initializer_range initializer_factor attention_dropout hidden_dropout attn_pdrop resid_pdrop "
    "embd_pdrop attention_probs_dropout_prob hidden_dropout_prob attn_dropout_prob "
    "emb_dropout_prob resid_dropout embd_dropout residual_dropout embedding_dropout dropout "
    "dropout_rate layerdrop neftune_noise_alpha gradient_checkpointing use_bfloat16 bf16 fp16 fp32 "
    "loss_type ignore_index "
    # how it is run; and Qwen's windows, which others do not have
    "max_window_layers use_cache output_attentions output_hidden_states return_dict "
    "return_dict_in_generate torchscript chunk_size_feed_forward attn_implementation "
    "use_flash_attn use_flash_attention use_flash_attention_2 flash_attention "
    # heads for other tasks
    "id2label label2id num_labels problem_type finetuning_task task_specific_params "
    "classifier_dropout "
    # generation
    "pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id "
    "bos_token eos_token pad_token unk_token prefix bad_words_ids do_sample temperature top_k "
    "top_p min_p top_h max_length min_length max_new_tokens min_new_tokens max_time num_beams "
    "repetition_penalty length_penalty no_repeat_ngram_size early_stopping typical_p "
    "num_return_sequences forced_bos_token_id forced_eos_token_id forced_decoder_ids "
    "force_words_ids constraints sequence_bias suppress_tokens begin_suppress_tokens "
    "remove_invalid_values exponential_decay_length_penalty diversity_penalty num_beam_groups "
    "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "guidance_scale low_memory penalty_alpha renormalize_logits num_assistant_tokens output_scores "
    "output_logits generation_config"
)

_ONLY_AT: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "tf_legacy_loss": (False, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, None),
    "attention_multiplier": (1.0, None),
    "logit_scale": (1.0, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "qk_layernorm": (False, None),
}

_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}


def read_spec(folder: Path, ignored: Collection[str] = ()) -> ModelSpec:
    """The spec of the checkpoint in `folder`; UnsupportedModel names the field in the way.

    Fields that are not known and whose names are in `ignored` are passed over; the spec names them.
    Chat models often name further end tokens in generation_config.json; they are added.
    """
    spec = spec_from_config(_read_object(folder / CONFIG_FILE), ignored)
    generation = folder / GENERATION_FILE
    if not generation.is_file():
        return spec
    more = _ids(_read_object(generation), "eos_token_id")
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *more))))


def _read_object(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} does not hold an object")
    return config


def spec_from_config(config: Mapping[str, object], ignored: Collection[str] = ()) -> ModelSpec:
    """As read_spec, from the parsed file."""
    _refuse_quantized(config)
    architecture = _architecture(config)
    _refuse_known(ignored, architecture)
    unknown = _unknown_fields(config, architecture)
    if refused := [name for name in unknown if name not in ignored]:
        raise UnsupportedModel(_told_unknown(config, refused, architecture))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(config.get("attention_bias"))
    hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    head_dim = _int(config, "head_dim", hidden_size // num_heads)
    max_positions = _int(config, _positions_field(config))
    return ModelSpec(
        architecture=architecture,
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_int(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=_int(config, "intermediate_size"),
        max_positions=max_positions,
        norm=Norm.RMS,
        norm_eps=_float(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, head_dim, max_positions),
        has_qkv_bias=is_qwen2 or attention_bias,
        has_out_bias=attention_bias,
        has_mlp_bias=bool(config.get("mlp_bias")),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        has_parallel_residual=False,
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config),
        sliding_window=_sliding_window(config, architecture),
        bos_id=_ids(config, "bos_token_id")[0] if _ids(config, "bos_token_id") else None,
        eos_ids=_ids(config, "eos_token_id"),
        ignored_fields=tuple(sorted(unknown)),
    )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModel(f"config names no single architecture: architectures={names!r}")
    if names[0] not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {names[0]} is not supported; known: {', '.join(sorted(_ARCHITECTURES))}"
        )
    return names[0]


def _unknown_fields(config: Mapping[str, object], architecture: str) -> list[str]:
    """The fields that are not known; raises UnsupportedModel for a known one at a value that is not
    supported."""
    own, unknown = _ARCHITECTURES[architecture], []
    for name, value in config.items():
        if name in own or name in _READ or name in _HARMLESS or name.startswith("_"):
            continue
        if name == "layer_types":
            if isinstance(value, list) and set(value) <= {"full_attention"}:
                continue
            raise UnsupportedModel("layer_types: only full_attention layers are supported")
        if name not in _ONLY_AT:
            # a field left at nothing cannot change anything
            if value is not None and value is not False:
                unknown.append(name)
        elif value not in _ONLY_AT[name]:
            allowed = " or ".join(repr(choice) for choice in _ONLY_AT[name])
            raise UnsupportedModel(f"config field {name}={value!r}: only {allowed} is supported")
    return unknown


def _told_unknown(config: Mapping[str, object], names: Sequence[str], architecture: str) -> str:
    fields = ", ".join(f"{name}={_shorten(repr(config[name]))}" for name in names)
    them = "it" if len(names) == 1 else "them"
    return (
        f"config field {fields} is not known to {architecture} and may change the answers. If you "
        f"know that it does not, load the model without {them}: "
        f"--ignore-config-fields {','.join(names)}"
    )


def _refuse_known(ignored: Collection[str], architecture: str) -> None:
    """What is known to change the answers cannot be wished away."""
    known = _READ | _ONLY_AT.keys() | _ARCHITECTURES[architecture] | {"layer_types"}
    if refused := sorted(known.intersection(ignored)):
        raise UnsupportedModel(
            f"ignore_config_fields: {', '.join(refused)} cannot be ignored: answers depend on it. "
            "Only fields that are not known can be"
        )


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _positions_field(config: Mapping[str, object]) -> str:
    """LLaMA-1 has another name for it, alone or beside the usual one."""
    usual, older = "max_position_embeddings", "max_sequence_length"
    return older if config.get(usual) is None and config.get(older) is not None else usual


def _refuse_quantized(config: Mapping[str, object]) -> None:
    found = config.get("quantization_config")
    if not found:
        return
    known = found if isinstance(found, Mapping) else {}
    bits = known.get("bits", 4 if known.get("load_in_4bit") else None)
    said = [str(known.get("quant_method", "unknown method")), f"{bits}-bit" if bits else ""]
    how = ", ".join(filter(None, said))
    raise UnsupportedModel(f"quantization_config: the weights are quantized ({how}); {QUANTIZED}")


def _sliding_window(config: Mapping[str, object], architecture: str) -> int | None:
    window = config.get("sliding_window")
    if window is None:
        return None
    if architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        return None
    return _int(config, "sliding_window")


_ROPE_SETTINGS: dict[RopeScaling, set[str]] = {
    RopeScaling.NONE: set(),
    RopeScaling.LINEAR: {"factor"},
    RopeScaling.LLAMA3: {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    RopeScaling.YARN: {
        "factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
    },
}


def _rope(config: Mapping[str, object], head_dim: int, max_positions: int) -> RopeSpec:
    """transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    table: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{name}={value!r} is not an object")
        table.update(value)
    theta = _float(table, "rope_theta", _float(config, "rope_theta", 10000.0))
    kind = table.pop("rope_type", table.pop("type", "default"))
    table.pop("type", None)
    table.pop("rope_theta", None)
    if table.pop("partial_rotary_factor", 1.0) not in (1.0, None):
        raise UnsupportedModel("partial_rotary_factor: only 1.0 is supported")
    try:
        scaling = RopeScaling(kind)
    except ValueError:
        known = ", ".join(member.value for member in RopeScaling)
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; known: {known}") from None
    if (
        unknown := {name for name, value in table.items() if value is not None}
        - _ROPE_SETTINGS[scaling]
    ):
        raise UnsupportedModel(f"rope_type {kind!r} does not know {sorted(unknown)}")
    if scaling is RopeScaling.NONE:
        return RopeSpec(theta=theta, rotary_dim=head_dim)
    if scaling is RopeScaling.LINEAR:
        return RopeSpec(theta, head_dim, scaling, factor=_float(table, "factor"))
    if scaling is RopeScaling.YARN:
        return _yarn(table, theta, head_dim, max_positions)
    return RopeSpec(
        theta=theta,
        rotary_dim=head_dim,
        scaling=scaling,
        factor=_float(table, "factor"),
        low_freq_factor=_float(table, "low_freq_factor"),
        high_freq_factor=_float(table, "high_freq_factor"),
        original_positions=_int(table, "original_max_position_embeddings", max_positions),
    )


def _yarn(table: Mapping[str, object], theta: float, head_dim: int, max_positions: int) -> RopeSpec:
    original = _int(table, "original_max_position_embeddings", max_positions)
    factor = _float(table, "factor", max_positions / original)
    has_whole_bounds = table.get("truncate")
    if has_whole_bounds not in (None, True, False):
        raise UnsupportedModel(f"config field truncate={has_whole_bounds!r} must be true or false")

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    score_factor = growth(1.0)
    if table.get("mscale") and table.get("mscale_all_dim"):
        score_factor = growth(_float(table, "mscale")) / growth(_float(table, "mscale_all_dim"))
    return RopeSpec(
        theta=theta,
        rotary_dim=head_dim,
        scaling=RopeScaling.YARN,
        factor=factor,
        original_positions=original,
        beta_fast=_float(table, "beta_fast", 32.0),
        beta_slow=_float(table, "beta_slow", 1.0),
        has_whole_bounds=has_whole_bounds is not False,
        score_factor=_float(table, "attention_factor", score_factor),
    )


def _dtype(config: Mapping[str, object]) -> DType:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; known: {sorted(_DTYPES)}")
    return _DTYPES[str(name)]


def _int(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config field {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config field {name}={value!r} must be a positive whole number")
    return value


def _float(config: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = config.get(name)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config field {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModel(f"config field {name}={value!r} must be a positive number")
    return float(value)


def _ids(config: Mapping[str, object], name: str) -> tuple[int, ...]:
    value = config.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise UnsupportedModel(f"config field {name}={value!r} must be token ids")
    return tuple(values)
