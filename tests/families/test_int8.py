"""--quantize int8 on blocks other than Llama's keeps logprobs close to the plain model's."""

from pathlib import Path

import pytest
import torch
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    SmolLM3Config,
    StableLmConfig,
)

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, Quantize
from mainstem.core.request import SamplingParams
from mainstem.engine.build import build_engine
from tests.builders import a_request, run_all
from tests.models.checkpoints import SMALL, SMALL_FALCON, VOCAB, write_checkpoint

CONFIGS: dict[str, PreTrainedConfig] = {
    "phi": PhiConfig(**SMALL),
    "phi 3": Phi3Config(**SMALL),
    "falcon 7B": FalconConfig(**SMALL_FALCON),
    "falcon 40B": FalconConfig(**SMALL_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "gemma 2": Gemma2Config(**SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=11),
    "gemma 3": Gemma3TextConfig(**SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=11),
    "olmo 2": Olmo2Config(**SMALL),
    "granite": GraniteConfig(
        **SMALL,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=2.5,
    ),
    "smollm 3": SmolLM3Config(**SMALL, no_rope_layers=[1, 1, 1]),
    "stablelm": StableLmConfig(**SMALL | {"hidden_size": 96}, use_qkv_bias=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_of_a_quantized_decoder_are_close(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(CONFIGS[name], tmp_path)
    prompt = torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        exact = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    engine = build_engine(
        tmp_path,
        EngineConfig(model=ModelConfig(quantize=Quantize.INT8), cache=CacheConfig(kv_tokens=256)),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = run_all(engine, [a_request(prompt, sampling=sampling)]).outputs
    engine.close()
    assert output.prompt_logprobs is not None
    ours = torch.tensor([record.logprob for record in output.prompt_logprobs if record])
    theirs = exact[torch.arange(63), torch.tensor(prompt[1:])]
    # with 48 random channels, rounding to 8 bits moves logprobs by a tenth of their spread
    assert float((ours - theirs).abs().mean()) < 0.2 * float(theirs.std())
