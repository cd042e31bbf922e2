"""Families: one file each, which turns a config.json into a recipe (models/spec.py).

To add one, write a file in this folder and add its name below; docs/add-a-model.md shows how.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from mainstem.core.errors import UnsupportedModel
from mainstem.models.config_file import (
    CONFIG_FILE,
    GENERATION_FILE,
    Config,
    check_unread,
    has_dtype,
    read_object,
)
from mainstem.models.families import (
    arcee,
    cohere,
    cwm,
    ernie,
    exaone,
    falcon,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    glm_moe,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    mistral,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    phi,
    phi3,
    qwen,
    qwen_hybrid,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from mainstem.models.families.common import Family
from mainstem.models.families.multimodal import text_part, without_vision
from mainstem.models.families.unsupported import REASONS
from mainstem.models.quantized.config import read_quantized
from mainstem.models.spec import ModelSpec
from mainstem.models.weight_files import embedding_dtype

# in the order in which they are listed for users
_MODULES = (
    llama, mistral, mixtral, qwen, qwen_moe, qwen_hybrid, gemma, gemma4, gpt_oss, phi, phi3,
    smollm3, granite, olmo, cohere, glm, glm_moe, exaone, ernie, seed_oss, starcoder2, nemotron,
    nemotron_h, falcon_h1, hunyuan, lfm2, arcee, cwm, falcon, gpt_neox, stablelm,
)  # fmt: skip
FAMILIES = tuple(
    each for module in _MODULES for each in vars(module).values() if isinstance(each, Family)
)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def read_spec(folder: Path, ignored: Collection[str] = ()) -> ModelSpec:
    """Return the recipe of the checkpoint in `folder`; if it cannot run, UnsupportedModel names the
    field.

    Unknown fields in `ignored` are skipped, and the recipe lists them. Chat models often have more
    end tokens in generation_config.json; these are added. If config.json has no dtype (gpt-oss),
    the recipe has that of the embedding.
    """
    table = read_object(folder / CONFIG_FILE)
    spec = spec_from_config(table, ignored)
    if not has_dtype(Config(table)):
        spec = replace(spec, dtype=embedding_dtype(folder, spec.names) or spec.dtype)
    generation = folder / GENERATION_FILE
    if not generation.is_file():
        return spec
    more = Config(read_object(generation)).token_ids("eos_token_id")
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *more))))


def spec_from_config(table: Mapping[str, object], ignored: Collection[str] = ()) -> ModelSpec:
    """Like `read_spec`, from the parsed file."""
    config = Config(table)
    architecture = _architecture(config)
    family = _BY_ARCHITECTURE[architecture]
    if family.is_part:
        config = text_part(config)
    quantized = read_quantized(config)
    spec = family.read(config)
    if family.is_part:
        spec = without_vision(spec)
    unknown = check_unread(config, architecture, ignored)
    return replace(spec, architecture=architecture, ignored_fields=unknown, quantized=quantized)


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModel(f"config names no single architecture: architectures={names!r}")
    if names[0] not in _BY_ARCHITECTURE:
        if reason := REASONS.get(names[0]):
            raise UnsupportedModel(f"architecture {names[0]} is not supported: it has {reason}")
        known = ", ".join(sorted(_BY_ARCHITECTURE))
        raise UnsupportedModel(f"architecture {names[0]} is not supported; known: {known}")
    return names[0]
