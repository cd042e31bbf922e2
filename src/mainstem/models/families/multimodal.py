"""The text part of a multimodal checkpoint.

config.json holds the decoder's fields in `text_config`, and fields for images next to it. Tensors
of the decoder have a prefix, which differs between versions of transformers.
"""

from dataclasses import replace

from mainstem.models.config_file import Config
from mainstem.models.spec import ModelSpec

# fields that do not concern the decoder
_BESIDE = (
    "architectures",
    "text_config",
    "vision_config",
    "vision_feature_layer",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "boi_token_index",
    "boi_token_id",
    "eoi_token_index",
    "eoi_token_id",
    "image_token_index",
    "image_token_id",
    "video_token_id",
    "audio_config",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "audio_token_id",
    "vision_soft_tokens_per_image",
)
_RENAMED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def text_part(config: Config) -> Config:
    """The decoder's fields; top-level fields override them, except those for images."""
    text = config.table("text_config").merged(config)
    for name in _BESIDE:
        text.get(name)
    return text


def without_vision(spec: ModelSpec) -> ModelSpec:
    """The recipe of the decoder alone: tensors of the vision tower are ignored."""
    ignored = (*spec.names.ignored_beginnings, *_VISION)
    names = replace(spec.names, renamed_beginnings=_RENAMED, ignored_beginnings=ignored)
    vision = "its vision tower and projector: it reads text"
    return replace(spec, names=names, dropped=(*spec.dropped, vision))
