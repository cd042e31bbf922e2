"""The text part of a multimodal checkpoint: it answers as the whole model does without images."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig
from mainstem.core.errors import UnsupportedModel
from mainstem.core.request import SamplingParams
from mainstem.engine.build import build_engine
from tests.builders import a_request, run_all
from tests.models.checkpoints import SMALL

PROMPT = list(range(3, 40))
ANSWER_TOKENS = 8
TEXT = SMALL | {"head_dim": 16, "sliding_window": 11}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma() -> PreTrainedModel:
    config = Gemma3Config(
        text_config={"model_type": "gemma3_text", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config)


def gemma4() -> PreTrainedModel:
    text = {"global_head_dim": 24, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 1}
    types = ["sliding_attention", "full_attention", "full_attention"]
    vision = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}
    config = Gemma4Config(
        text_config={
            "model_type": "gemma4_text",
            **TEXT,
            **text,
            "layer_types": types,
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "pad_token_id": 0,
        },
        vision_config={"model_type": "gemma4_vision", **VISION, **vision},
    )
    return Gemma4ForConditionalGeneration(config)


def mistral() -> PreTrainedModel:
    config = Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


def save(model: PreTrainedModel, folder: Path) -> list[int]:
    """Give the model random weights and save it to `folder`; returns its answer."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name:
                parameter.add_(1.0)
    model.eval().save_pretrained(folder)
    model.generation_config.eos_token_id = None
    ids = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=0
    )
    answer: list[int] = ids[0, len(PROMPT) :].tolist()
    return answer


def answer_of(folder: Path) -> list[int]:
    config = EngineConfig(
        model=ModelConfig(model="a model", dtype=DType.FP32), cache=CacheConfig(kv_tokens=256)
    )
    engine = build_engine(folder, config)
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    outputs = run_all(engine, [a_request(PROMPT, sampling=sampling)]).outputs
    engine.close()
    return [token_id for output in outputs for token_id in output.token_ids]


def _older_name(name: str) -> str:
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return f"model.{name.replace('language_model.model.', 'language_model.')}"


def rename_as_older_transformers(folder: Path) -> None:
    """Versions 4.52 to 4.57 put all but the head under `model.`."""
    path = folder / "model.safetensors"
    renamed = {_older_name(name): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path)


@pytest.mark.parametrize("make", [gemma, mistral])
def test_the_text_part_answers_as_the_whole_model(
    make: type[PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = save(make(), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert answer_of(tmp_path) == expected
    assert "a model is loaded without its vision tower" in caplog.text
    rename_as_older_transformers(tmp_path)
    assert answer_of(tmp_path) == expected


def test_the_text_part_of_gemma_4_answers_as_the_whole_model(tmp_path: Path) -> None:
    """All its files have the names of newer versions of transformers."""
    expected = save(gemma4(), tmp_path)
    assert answer_of(tmp_path) == expected


def test_a_head_is_used_although_only_the_text_config_says_that_it_is_not_tied(
    tmp_path: Path,
) -> None:
    """transformers 5 writes such files when it saves a published Mistral Small 3.1 again."""
    expected = save(mistral(), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    assert answer_of(tmp_path) == expected


def test_only_tensors_of_images_are_dropped(tmp_path: Path) -> None:
    save(gemma(), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "audio_tower.weight": torch.zeros(2)}, path)
    with pytest.raises(UnsupportedModel, match=r"unexpected tensors audio_tower\.weight"):
        answer_of(tmp_path)
