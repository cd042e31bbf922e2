"""A checkpoint's config.json, read field by field.

A Config remembers which fields a family has read. A field that was not read is accepted if it is
known to be harmless or has a value that changes nothing. Otherwise the model is refused, with the
field's name: an unknown field may change the model's output.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from mainstem.core.config import DType
from mainstem.core.errors import UnsupportedModel

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}


class Config:
    """The fields of a config.json. If a field is missing or has a wrong type, UnsupportedModel
    names it. A null field counts as missing.
    """

    def __init__(self, table: Mapping[str, object]) -> None:
        self._table = dict(table)
        self._asked: set[str] = set()

    @property
    def asked(self) -> frozenset[str]:
        """Names of all fields that were read, even if the file does not have them."""
        return frozenset(self._asked)

    def unread(self) -> dict[str, object]:
        """The fields that were not read."""
        return {name: value for name, value in self._table.items() if name not in self._asked}

    def get(self, name: str) -> object:
        """The value as it is; None if there is none."""
        self._asked.add(name)
        return self._table.get(name)

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"config field {name}={value!r} must be a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UnsupportedModel(f"config field {name}={value!r} must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"config field {name}={value!r} must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise UnsupportedModel(f"config field {name}={value!r} must be a text")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers."""
        values = self._value(name, None)
        if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
            raise UnsupportedModel(f"config field {name} must be a list of numbers")
        return tuple(map(float, values))

    def sizes(self, name: str, count: int) -> tuple[int, ...]:
        """A list of `count` positive whole numbers."""
        values = self.items(name) or []
        if len(values) != count or not all(isinstance(v, int) and v > 0 for v in values):
            raise UnsupportedModel(
                f"config field {name}={values!r} must be a list of {count} positive whole numbers"
            )
        return tuple(int(str(v)) for v in values)

    def names(self) -> tuple[str, ...]:
        """Names of all fields, in the order of the file."""
        return tuple(self._table)

    def items(self, name: str) -> list[object] | None:
        """A list of anything; None if there is none."""
        values = self.get(name)
        if values is not None and not isinstance(values, list):
            raise UnsupportedModel(f"config field {name}={values!r} must be a list")
        return values

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids: a number, a list, or nothing."""
        value = self.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise UnsupportedModel(f"config field {name}={value!r} must be token ids")
        return tuple(values)

    def table(self, name: str) -> "Config":
        """A nested object; empty if there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise UnsupportedModel(f"{name}={value!r} is not an object")
        return Config(value or {})

    def only(self, name: str, *allowed: object) -> None:
        """Raise UnsupportedModel unless the field has one of these values, or is missing."""
        value = self.get(name)
        if value is not None and value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed) or "null"
            raise UnsupportedModel(f"config field {name}={value!r}: only {choices} is supported")

    def is_null(self, name: str) -> bool:
        """Whether the file has the field, with the value null; this does not count as reading
        it."""
        return name in self._table and self._table[name] is None

    def has(self, name: str) -> bool:
        """Whether the file has the field; this does not count as reading it."""
        return self._table.get(name) is not None

    def merged(self, other: "Config") -> "Config":
        """These fields and those of `other`; a field of `other` overrides unless it is null."""
        said = {name: value for name, value in other._table.items() if value is not None}
        return Config({**self._table, **said})

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModel(f"config field {name} is missing")
        return value


def has_dtype(config: Config) -> bool:
    """Whether the file says which dtype the weights have, here or in `text_config`."""
    parts = (config, config.table("text_config"))
    return any(part.has("dtype") or part.has("torch_dtype") for part in parts)


def read_dtype(config: Config) -> DType:
    """The dtype of the checkpoint's weights. If the file does not say: fp32, as transformers has
    it, but bf16 if some weights are quantized."""
    older = config.get("torch_dtype")
    usual = "bfloat16" if config.has("quantization_config") else "float32"
    name = config.get("dtype") or older or usual
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; known: {sorted(_DTYPES)}")
    return _DTYPES[str(name)]


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} does not hold an object")
    return config


def check_unread(config: Config, architecture: str, ignored: Collection[str]) -> tuple[str, ...]:
    """Return the names of unknown fields that are in `ignored`. Raises UnsupportedModel for other
    unknown fields, for known fields with unsupported values, and for known fields in `ignored`."""
    unknown = []
    for name, value in config.unread().items():
        if name in _HARMLESS or name.startswith("_") or value is None:
            continue
        if name == "layer_types":
            if isinstance(value, list) and set(value) <= {"full_attention"}:
                continue
            raise UnsupportedModel(
                f"layer_types: {architecture} is supported with full_attention layers only"
            )
        if name in _NEUTRAL:
            config.only(name, *_NEUTRAL[name])
        elif value is not False:  # False: an unknown switch that is off
            unknown.append(name)
    if refused := [name for name in unknown if name not in ignored]:
        raise UnsupportedModel(_told_unknown(config, refused, architecture))
    # fields that are known to change the output cannot be ignored
    known = config.asked | _NEUTRAL.keys() | {"layer_types"}
    if refused := sorted(known.intersection(ignored) - set(unknown)):
        raise UnsupportedModel(
            f"ignore_config_fields: {', '.join(refused)} cannot be ignored: answers depend on it. "
            "Only unknown fields can be ignored"
        )
    return tuple(sorted(unknown))


def _told_unknown(config: Config, names: Sequence[str], architecture: str) -> str:
    fields = ", ".join(f"{name}={_shorten(repr(config.get(name)))}" for name in names)
    them = "it" if len(names) == 1 else "them"
    return (
        f"config field {fields} is not known to {architecture} and may change the answers. If you "
        f"know that it does not, load the model without {them}: "
        f"--ignore-config-fields {','.join(names)}"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def words_of(lines: Iterable[str]) -> frozenset[str]:
    """The words of some lines of text."""
    return frozenset(" ".join(lines).split())


# none of these changes a decoder's logits
_HARMLESS = words_of((
    # names and versions
    "model_type model_name name version model_version transformers_version unsloth_version",
    "unsloth_fixed base_model base_model_name_or_path tokenizer_class transformers.js_config",
    "is_llama_config license language tags library_name auto_map",
    # other names for lengths; max_position_embeddings is used
    "model_max_length max_sequence_length max_seq_len max_seq_length seq_length",
    "tokenizer_model_max_length tokenizer_padding_side",
    # training
    "initializer_range initializer_factor attention_dropout hidden_dropout attn_pdrop resid_pdrop",
    "embd_pdrop attention_probs_dropout_prob hidden_dropout_prob attn_dropout_prob pretraining_tp",
    "emb_dropout_prob resid_dropout embd_dropout residual_dropout embedding_dropout dropout",
    "dropout_rate layerdrop neftune_noise_alpha gradient_checkpointing use_bfloat16 bf16 fp16 fp32",
    "loss_type ignore_index router_aux_loss_coef router_jitter_noise output_router_logits",
    # how the model is run; and `max_window_layers`, which only Qwen uses
    "max_window_layers use_cache output_attentions output_hidden_states return_dict",
    "return_dict_in_generate torchscript chunk_size_feed_forward attn_implementation",
    "use_flash_attn use_flash_attention use_flash_attention_2 flash_attention cache_implementation",
    # heads for other tasks
    "id2label label2id num_labels problem_type finetuning_task task_specific_params",
    "classifier_dropout",
    # generation
    "pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id",
    "bos_token eos_token pad_token unk_token prefix bad_words_ids do_sample temperature top_k",
    "top_p min_p top_h max_length min_length max_new_tokens min_new_tokens max_time num_beams",
    "repetition_penalty length_penalty no_repeat_ngram_size early_stopping typical_p",
    "num_return_sequences forced_bos_token_id forced_eos_token_id forced_decoder_ids",
    "force_words_ids constraints sequence_bias suppress_tokens begin_suppress_tokens",
    "remove_invalid_values exponential_decay_length_penalty diversity_penalty num_beam_groups",
    "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff",
    "guidance_scale low_memory penalty_alpha renormalize_logits num_assistant_tokens output_scores",
    "output_logits generation_config",
))  # fmt: skip

# fields that change a model's output, and the values with which they change nothing; a family that
# supports other values reads the field itself
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tf_legacy_loss": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "attention_multiplier": (1.0,),
    "logit_scale": (1.0,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "qk_layernorm": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
}
