"""A model split over ranks answers as the whole one, whatever its family."""

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)

from mainstem.core.config import (
    CacheConfig,
    EngineConfig,
    Quantize,
)
from mainstem.core.errors import ConfigError
from mainstem.core.request import Output
from mainstem.models.collectives import ALONE, Collectives
from mainstem.models.cpu.decoder import make_decoder
from mainstem.models.families import read_spec, spec_from_config
from mainstem.models.shard import RankCut, Shard, part_of, shards_that_divide
from mainstem.models.spec import ModelSpec
from mainstem.models.tensors import TensorReader
from mainstem.models.weights import RandomWeights, part_shape
from mainstem.runner.attention import CpuAttention
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from mainstem.runner.pages import DevicePages
from mainstem.runner.single import SingleTokenPass
from mainstem_bench.shapes import SHAPES
from tests.models.checkpoints import SMALL, write_checkpoint
from tests.models.rank_outputs import TOLERANCE, a_config, check_same, outputs
from tests.models.ranks import Thread, run_ranks
from tests.runner.recipes import RECIPES

CPU = torch.device("cpu")
WIDE = SMALL | {  # four ranks can split the query heads, but have copies of the two KV heads
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
FALCON = {k: v for k, v in WIDE.items() if k not in {"intermediate_size", "num_key_value_heads"}}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
UNEQUAL = {"intermediate_size": 82}  # on 2 ranks: 32 and 50; on 4: 16, 16, 16 and 34
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE | UNEQUAL, attention_bias=True, mlp_bias=True),
    "llama, tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "mistral": MistralConfig(**WIDE, sliding_window=11, head_dim=16),
    "qwen 2": Qwen2Config(**WIDE),
    "qwen 3": Qwen3Config(**WIDE, head_dim=16, attention_bias=True),
    "qwen 2 moe": Qwen2MoeConfig(
        **WIDE, **EXPERTS, shared_expert_intermediate_size=96, mlp_only_layers=[1]
    ),
    "qwen 3 moe": Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "mixtral": MixtralConfig(**WIDE, num_local_experts=5, num_experts_per_tok=2, head_dim=16),
    "gpt-oss": GptOssConfig(
        **WIDE, num_local_experts=5, num_experts_per_tok=3, head_dim=16, sliding_window=11
    ),
    "gemma 2": Gemma2Config(
        **WIDE, head_dim=16, sliding_window=11, final_logit_softcapping=3.0, attention_bias=True
    ),
    "gemma 3": Gemma3TextConfig(**WIDE, head_dim=16, sliding_window=11),
    "gemma 4": Gemma4TextConfig(
        **WIDE | {"num_hidden_layers": 3},
        head_dim=16,
        global_head_dim=32,
        sliding_window=11,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=WIDE["vocab_size"],
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "falcon 7b": FalconConfig(**FALCON),
    "falcon 40b": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon 11b": FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1
    ),
    "falcon, biases": FalconConfig(**FALCON, parallel_attn=False, multi_query=False, bias=True),
    "granite": GraniteConfig(
        **WIDE, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=2.5
    ),
    "olmo 2": Olmo2Config(**WIDE),
    "phi 2": PhiConfig(**WIDE | {"hidden_size": 128}),
    "phi 3": Phi3Config(**WIDE),
    "smollm 3": SmolLM3Config(**WIDE, no_rope_layer_interval=2),
    "stablelm": StableLmConfig(**WIDE | {"hidden_size": 128}, use_parallel_residual=True),
}
QUICK = ("llama", "llama, tied", "falcon 40b", "gemma 4", "gpt-oss", "olmo 2", "phi 2")


@pytest.mark.parametrize("of", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_ranks_answer_as_one_process(name: str, of: int, tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[name], tmp_path)
    expected = outputs(tmp_path)
    for found in run_ranks(of, lambda ranks: outputs(tmp_path, ranks)):
        check_same(found, expected, TOLERANCE)


def test_a_rank_without_a_part_of_the_vocabulary_answers_as_one_process(tmp_path: Path) -> None:
    """Three ranks have 16, 16 and 1 of the 33 tokens; a fourth has rows of zeros."""
    config = LlamaConfig(**WIDE | {"vocab_size": 33, "num_hidden_layers": 1})
    write_checkpoint(config, tmp_path)
    expected = outputs(tmp_path)
    for found in run_ranks(4, lambda ranks: outputs(tmp_path, ranks)):
        check_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("name", ["llama, tied", "phi 3"])
def test_ranks_quantize_their_parts(name: str, tmp_path: Path) -> None:
    """Both ranks give the same outputs, about as close to fp32 as int8 in one process."""
    write_checkpoint(FAMILIES[name], tmp_path)
    whole = outputs(tmp_path, quantize=Quantize.INT8)
    first, second = run_ranks(2, lambda ranks: outputs(tmp_path, ranks, Quantize.INT8))
    check_same(second, first, 0.0)
    exact = outputs(tmp_path)

    def off(found: Sequence[Output]) -> float:
        """The mean difference of the prompts' logprobs."""
        pairs = zip(_of_prompts(found), _of_prompts(exact), strict=True)
        return float(np.mean([abs(one - two) for one, two in pairs]))

    assert 0 < off(first) < 2 * off(whole)


def _of_prompts(found: Sequence[Output]) -> list[float]:
    records = [record for output in found for record in output.prompt_logprobs or ()]
    return [record.logprob for record in records if record is not None]


def test_the_error_names_a_size_that_cannot_be_divided() -> None:
    small = spec_from_config(
        LlamaConfig(**SMALL).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    )
    assert shards_that_divide(small) == (1, 2)  # 2 KV heads rule out 3 ranks, MLPs rule out 6
    with pytest.raises(ConfigError, match=r"over 4 ranks: num_attention_heads=6 .*: 1, 2$"):
        part_of(small, Shard(0, 4))
    with pytest.raises(ConfigError, match="num_key_value_heads=2 is neither"):
        part_of(small, Shard(0, 3))
    narrow = {**WIDE, "intermediate_size": 44, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ConfigError, match="an MLP of 44 columns has fewer than 16 for each"):
        part_of(spec_from_config(LlamaConfig(**narrow).to_dict()), Shard(0, 4))
    for name in ("qwen36-27b", "granite-4-h-small"):
        with pytest.raises(ConfigError, match="recurrent layers are not split over ranks yet"):
            part_of(SHAPES[name], Shard(0, 2))
    assert shards_that_divide(SHAPES["qwen36-27b"]) == (1,)
    assert shards_that_divide(SHAPES["llama-30b"]) == (1, 2, 4, 13, 26, 52)
    assert shards_that_divide(SHAPES["qwen3-30b-a3b"]) == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("Gemma 4 with experts", "experts whose outputs are normed on their own"),
        ("Gemma 4 with inputs of layers", "layers with embeddings of their own"),
    ],
)
def test_the_error_names_layers_that_are_not_split_yet(recipe: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        part_of(RECIPES[recipe], Shard(0, 2))


def test_part_of_gives_the_sizes_of_a_rank() -> None:
    whole = SHAPES["llama2-70b"]
    part = part_of(whole, Shard(3, 4))
    assert (part.num_heads, part.num_kv_heads, part.vocab_rows) == (16, 2, 8000)
    mlp = part.layers[0].mlp
    assert mlp is not None
    assert mlp.size == 7168
    assert part.kv_elements_per_token * 4 == whole.kv_elements_per_token
    assert part.num_weights * 4 == whole.num_weights
    assert part_of(whole, Shard()) is whole
    assert part_of(whole, Shard(0, 16)).num_kv_heads == 1  # two ranks have the same one


def test_unequal_parts_cover_the_whole() -> None:
    for size in (82, 90, 2880, 1000, 17 * 16):
        for of in (2, 3, 5):
            parts = [RankCut(Shard(rank, of)).columns(size) for rank in range(of)]
            assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
            assert (parts[0].start, parts[-1].stop) == (0, size)
            assert all(part.start % 8 == 0 and part.stop > part.start for part in parts)


class Taken(RandomWeights):
    """Counts what is read of each tensor."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"), 0)
        self.numbers: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.largest = 0

    def take(self, name: str, shape: Iterable[int], at: tuple[slice, ...] = ()) -> Tensor:
        whole = tuple(shape)
        count = prod(part_shape(whole, at))
        self.numbers[name] = self.numbers.get(name, 0) + count
        self.shapes[name] = whole
        self.largest = max(self.largest, count)
        return super().take(name, whole, at)


def _taken(spec: ModelSpec, shard: Shard) -> Taken:
    taken = Taken()
    reader = TensorReader(taken, spec, shard)
    embedding = reader.embedding()
    for index in range(spec.num_layers):
        reader.layer(index)
    reader.ends(embedding)
    return taken


@pytest.mark.parametrize("name", ["llama", "falcon 40b", "gpt-oss", "qwen 2 moe", "phi 3"])
def test_a_rank_never_reads_a_whole_matrix(name: str) -> None:
    """Of each matrix, both ranks together read each number once; both read routers and gates."""
    config = FAMILIES[name]
    spec = spec_from_config(config.to_dict() | {"architectures": [_architecture(config)]})
    both = [_taken(spec, Shard(rank, 2)) for rank in range(2)]
    for tensor, shape in both[0].shapes.items():
        read = [taken.numbers.get(tensor, 0) for taken in both]
        if "bias" in tensor or (len(shape) == 1 and ("norm" in tensor or "ln_" in tensor)):
            continue
        if any(part in tensor for part in ("mlp.gate.", "router.", "shared_expert_gate.")):
            assert read == [prod(shape)] * 2
        else:
            assert sum(read) == prod(shape), tensor
            assert max(read) < 0.65 * prod(shape), tensor
    assert max(taken.largest for taken in both) < 0.6 * _taken(spec, Shard()).largest


def _architecture(config: PreTrainedConfig) -> str:
    return type(config).__name__.removesuffix("Config") + "ForCausalLM"


def test_a_layer_makes_two_sums_and_a_parallel_layer_one(tmp_path: Path) -> None:
    def sums(name: str) -> int:
        folder = tmp_path / name
        write_checkpoint(FAMILIES[name], folder)

        def count(ranks: Thread) -> int:
            decoder = make_decoder(folder_origin(folder).open(torch.float32, CPU), spec, ranks)
            ranks.num_sums = 0
            x = decoder.embed(torch.tensor([3]))
            for layer in decoder.layers:
                layer.finish(layer, x, x.new_zeros(1, decoder.spec.num_heads * spec.head_dim))
            return ranks.num_sums

        spec = read_spec(folder)
        (found,) = set(run_ranks(2, count))
        return found

    assert sums("llama, tied") == 1 + 2 * 2
    assert sums("phi 2") == 1 + 2


@pytest.mark.parametrize("has_bias", [False, True])
def test_either_all_ranks_use_the_single_token_pass_or_none(has_bias: bool, tmp_path: Path) -> None:
    """Only one rank has the bias of a product that is summed over ranks."""
    write_checkpoint(LlamaConfig(**WIDE, attention_bias=has_bias), tmp_path)
    spec = read_spec(tmp_path)

    def has_pass(ranks: Thread) -> bool:
        decoder = make_decoder(folder_origin(tmp_path).open(torch.float32, CPU), spec, ranks)
        pages = DevicePages(decoder.spec, 1, 4, torch.float32)
        gains = decoder.query_gains
        tables = CpuAttention(decoder.spec, pages, 4, decoder.sinks, gains).tables
        return SingleTokenPass.make(decoder, pages, tables) is not None

    assert run_ranks(2, has_pass) == [not has_bias] * 2


class Deaf:
    """A single rank, whose collectives must not be called."""

    shard = Shard()
    is_capturable = True

    def sum_(self, x: Tensor) -> Tensor:
        raise AssertionError("a single rank must not sum")

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError("a single rank must not gather")


@pytest.mark.parametrize("name", ["olmo 2", "phi 2"])
def test_a_single_rank_makes_no_collective_calls(name: str, tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[name], tmp_path)
    check_same(outputs(tmp_path, Deaf()), outputs(tmp_path), 0.0)


def test_page_names_depend_on_the_rank_and_the_number_of_ranks(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["llama"], tmp_path)

    def identity(ranks: Collectives) -> bytes:
        return load_cpu_runner(folder_origin(tmp_path), a_config(), ranks)[1].identity

    found = [identity(ALONE), *run_ranks(2, identity), *run_ranks(4, identity)]
    assert len(set(found)) == 7


def test_all_ranks_have_as_many_pages_as_the_rank_with_the_fewest(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["llama"], tmp_path)

    def num_pages(ranks: Thread) -> int:
        tokens = 512 if ranks.shard.rank == 0 else 128
        config = EngineConfig(cache=CacheConfig(page_size=4, kv_tokens=tokens))
        runner, facts = load_cpu_runner(folder_origin(tmp_path), config, ranks)
        assert runner.pages.num_pages == facts.num_pages
        return facts.num_pages

    assert run_ranks(2, num_pages) == [32, 32]


@pytest.mark.slow
def test_smollm2_on_three_ranks_answers_as_one_process(smollm2_folder: Path) -> None:
    expected = outputs(smollm2_folder)
    for found in run_ranks(3, lambda ranks: outputs(smollm2_folder, ranks)):
        check_same(found, expected, 1e-3)
