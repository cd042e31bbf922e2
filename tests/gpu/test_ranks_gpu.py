"""Two ranks on one card, over gloo: the answers of one process, token for token.

This does not measure speed: every sum goes through the host. Ranks on separate cards use NCCL.
"""

import json
import math
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Timer
from time import monotonic

import psutil
import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from mainstem.core.config import (  # noqa: E402
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    Fetch,
    ModelConfig,
    SchedConfig,
    StoreConfig,
)
from mainstem.core.errors import EngineLost  # noqa: E402
from mainstem.core.events import EventBus  # noqa: E402
from mainstem.core.metrics import Counters  # noqa: E402
from mainstem.core.request import Request, SamplingParams  # noqa: E402
from mainstem.engine.build import build_engine  # noqa: E402
from mainstem.engine.engine import Engine  # noqa: E402
from tests.builders import a_request, run_all  # noqa: E402

LIMIT_S = 5.0
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 256, 512, 10, 4, 2, 64, 1024
TEXT = [random.Random(0).randrange(3, VOCAB) for _ in range(400)]
Answers = dict[str, list[tuple[int, float]]]  # tokens and their logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, large enough that a wrong layer shows."""
    made = tmp_path_factory.mktemp("ranks") / "model"
    made.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator)
        return drawn.mul_(1.5 / math.sqrt(shape[-1]))

    ends = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: weight(VOCAB, HIDDEN) for name in ends}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.self_attn.q_proj.weight": weight(HEADS * DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": weight(KV_HEADS * DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": weight(KV_HEADS * DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * DIM),
            f"{layer}.mlp.gate_proj.weight": weight(MLP, HIDDEN),
            f"{layer}.mlp.up_proj.weight": weight(MLP, HIDDEN),
            f"{layer}.mlp.down_proj.weight": weight(HIDDEN, MLP),
        }
    save_file(tensors, made / "model.safetensors")
    return made


def a_config(num_ranks: int, disk: Path) -> EngineConfig:
    """Little room on the device, so that sequences are preempted and pages leave it."""
    model = ModelConfig(
        dtype=DType.FP32,
        device=Device.CUDA,
        tensor_parallel=num_ranks,
        ranks_on_one_gpu=num_ranks > 1,
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(kv_tokens=640),
        sched=SchedConfig(chunk_tokens=128, max_model_len=512),
        store=StoreConfig(host_gb=0.1, disk_dir=str(disk), disk_gb=0.5, fetch=Fetch.ALWAYS),
    )


def shared_prompts() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
    prompts = [TEXT[:150] + TEXT[160 + number : 190] for number in range(6)]
    return [a_request(ids, sampling=sampling, name=str(n)) for n, ids in enumerate(prompts)]


def asked(engine: Engine, requests: Sequence[Request]) -> Answers:
    found: Answers = {}
    for output in run_all(engine, requests).outputs:
        so_far = found.setdefault(str(output.request_id), [])
        so_far += [(each.token_id, each.logprob) for each in output.logprobs]
    return found


def assert_same(got: Answers, expected: Answers) -> None:
    for name, answer in got.items():
        ids, logprobs = zip(*answer, strict=True)
        expected_ids, expected_logprobs = zip(*expected[name], strict=True)
        assert ids == expected_ids, name
        assert logprobs == pytest.approx(expected_logprobs, abs=2e-2), name


def test_two_ranks_on_one_card_answer_as_one(folder: Path, tmp_path: Path) -> None:
    with closing(build_engine(folder, a_config(1, tmp_path / "alone"))) as engine:
        expected = asked(engine, shared_prompts())
    bus = EventBus()
    counters = Counters().attach(bus)
    config = a_config(2, tmp_path / "ranks")
    with closing(build_engine(folder, config, bus)) as engine:
        assert_same(asked(engine, shared_prompts()), expected)
        engine.flush()
        engine.clear_device()
        assert_same(asked(engine, shared_prompts()), expected)
        assert counters.loaded_pages["host"] >= 9, "the pages that all share"
    with closing(build_engine(folder, config, bus)) as engine:
        assert_same(asked(engine, shared_prompts()), expected)
        assert counters.loaded_pages["disk"] + counters.prefetched_pages >= 9
        kill_a_rank(engine)


def kill_a_rank(engine: Engine) -> None:
    children = psutil.Process().children()
    ranks = [child for child in children if "rank_process" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    Timer(0.2, max(ranks, key=lambda rank: rank.pid).kill).start()
    with pytest.raises(EngineLost, match=r"rank 1 of 2 \(process \d+\) was killed by SIGKILL"):
        keep_asking(engine, monotonic() + 0.2 + LIMIT_S)


def keep_asking(engine: Engine, end_s: float) -> None:
    while monotonic() < end_s:
        if not engine.has_work:
            for request in shared_prompts():
                engine.submit(request)
        engine.step()
