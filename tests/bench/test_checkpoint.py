"""Folders of random weights that other engines can load, too."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM

from mainstem.core.config import CacheConfig, DType, EngineConfig, ModelConfig
from mainstem.core.errors import ConfigError
from mainstem.core.request import SamplingParams
from mainstem.engine.build import build_engine
from mainstem.models.families import spec_from_config
from mainstem_bench import checkpoint
from mainstem_bench.checkpoint import main, tensor_shapes
from mainstem_bench.shapes import CONFIGS, SHAPES
from tests.builders import a_request, run_all

pytestmark = pytest.mark.torch
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 96, "intermediate_size": 80, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
MADE_SMALL = {"tiny": {}, "qwen36-27b": SMALL, "qwen36-35b-a3b": SMALL | EXPERTS}


@pytest.mark.parametrize("name", MADE_SMALL)
def test_transformers_and_we_answer_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes of large models, made small; in several shards."""
    config = CONFIGS[name] | MADE_SMALL[name]
    monkeypatch.setitem(CONFIGS, name, config)
    monkeypatch.setitem(SHAPES, name, spec_from_config(config))
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    folder = tmp_path / "made"
    assert main(["--model-shape", name, str(folder)]) == 0
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = np.random.default_rng(0).integers(3, 96, 30).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=0)
    engine = build_engine(
        folder, EngineConfig(ModelConfig(dtype=DType.FP32), CacheConfig(kv_tokens=512))
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=4)
    (output,) = run_all(engine, [a_request(prompt, sampling=sampling)]).outputs
    engine.close()
    (record,) = output.logprobs
    far = torch.tensor(record.top_logprobs) - expected[torch.tensor(record.top_ids)]
    assert float(far.abs().max()) < 1e-4


def test_a_tokenizer_is_copied(tmp_path: Path) -> None:
    tokenizer, folder = tmp_path / "of", tmp_path / "made"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        (tokenizer / name).write_text("{}")
    main(["--model-shape", "tiny", "--tokenizer", str(tokenizer), str(folder)])
    assert (folder / "tokenizer.json").exists()
    assert (folder / "chat_template.jinja").exists()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_every_id_has_a_text(tmp_path: Path) -> None:
    """Clients of a server see a token only by its text."""
    of, folder = tmp_path / "of", tmp_path / "made"
    of.mkdir()
    small = Tokenizer(BPE({"a": 0, "b": 1}, []))
    small.add_special_tokens(["<s>"])
    small.save(str(of / "tokenizer.json"))
    main(["--model-shape", "tiny", "--tokenizer", str(of), str(folder)])
    filled = Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_ids = SHAPES["tiny"].vocab_size
    words = [filled.decode([number], skip_special_tokens=False) for number in range(num_ids)]
    assert all(words)
    assert len(set(words)) == num_ids
    assert words[:4] == ["a", "b", "<s>", "word3"]
    assert filled.encode("abba").ids == [0, 1, 1, 0]


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        main(["--model-shape", "tiny", str(tmp_path)])


def test_a_shape_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gemma4-31b: Gemma4ForCausalLM is not written"):
        main(["--model-shape", "gemma4-31b", str(tmp_path / "made")])


@pytest.mark.parametrize("name", ["qwen36-35b-a3b", "granite-4-h-small"])
def test_all_weights_of_a_shape_are_written(name: str) -> None:
    """Without the norms, which `num_weights` does not count."""
    spec = SHAPES[name]
    sizes = [int(np.prod(shape)) for shape in tensor_shapes(spec).values() if len(shape) > 1]
    assert sum(sizes) == pytest.approx(spec.num_weights, rel=1e-3)
