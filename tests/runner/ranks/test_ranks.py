"""A model on ranks, over gloo, gives the answers of one process, token for token. Failures are
tested, too.

Greedy decoding in fp32. Ranks add in another order, so logits differ in their last bits. The chance
that these bits decide one of a few hundred tokens of a random model is below one in a thousand.
"""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Timer
from time import monotonic, sleep

import psutil
import pytest
import torch
from transformers import GptOssConfig, LlamaConfig

from mainstem import LLM
from mainstem.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    Fetch,
    KvDType,
    ModelConfig,
    SchedConfig,
    StoreConfig,
)
from mainstem.core.errors import ConfigError, EngineLost
from mainstem.core.events import EventBus
from mainstem.core.metrics import Counters
from mainstem.core.request import Overflow, Request, SamplingParams
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem.runner.origin import folder_origin
from mainstem.runner.ranks.load import load_ranks
from tests.builders import a_request, run_all
from tests.models.checkpoints import make_checkpoint, write_checkpoint
from tests.models.quantized.cases import CASES
from tests.models.quantized.checkpoints import write_gpt_oss, write_quantized
from tests.models.quantized.test_ranks import WIDE
from tests.models.test_shards import FAMILIES
from tests.runner.ranks.test_group import is_over

pytestmark = pytest.mark.torch

WINDOW = 96
LIMIT_S = 60.0  # for the report that a rank ended, which comes much sooner
TEXT = [random.Random(0).randrange(3, 190) for _ in range(200)]
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, seed=3, max_tokens=12, logprobs=1, ignore_eos=True
)
EDITED = SamplingParams(
    temperature=0.0, max_tokens=12, min_tokens=3, presence_penalty=0.5, logit_bias={7: 2.0}, n=2,
    logprobs=2, prompt_logprobs=1,
)  # fmt: skip
Answers = dict[tuple[str, int], list[tuple[int, float]]]  # tokens and their logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks") / "model"
    make_checkpoint("llama", made)
    return made


def a_config(num_ranks: int, disk: Path) -> EngineConfig:
    """So few device pages that sequences are preempted and pages are evicted."""
    return EngineConfig(
        model=ModelConfig(
            dtype=DType.FP32, device=Device.CPU, threads=1, tensor_parallel=num_ranks
        ),
        cache=CacheConfig(kv_tokens=192),
        sched=SchedConfig(chunk_tokens=24, max_model_len=WINDOW),
        store=StoreConfig(host_gb=0.001, disk_dir=str(disk), disk_gb=0.1, fetch=Fetch.ALWAYS),
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)


def shared_prompts(prefix: str) -> list[Request]:
    """Prompts that share most of their tokens and do not fit on the device together."""
    prompts = [TEXT[:40] + TEXT[50 + number : 58] for number in range(6)]
    return [
        a_request(ids, name=f"{prefix}{n}", sampling=greedy(30)) for n, ids in enumerate(prompts)
    ]


def asked(engine: Engine, requests: Sequence[Request]) -> Answers:
    found: Answers = {}
    for output in run_all(engine, requests).outputs:
        so_far = found.setdefault((str(output.request_id), output.index), [])
        so_far += [(each.token_id, each.logprob) for each in output.logprobs]
    return found


def assert_same(got: Answers, expected: Answers) -> None:
    for name, answer in got.items():
        ids, logprobs = zip(*answer, strict=True)
        expected_ids, expected_logprobs = zip(*expected[name], strict=True)
        assert ids == expected_ids, name
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3), name


def answers(engine: Engine) -> Answers:
    """Answers to a conversation that outgrows the window, to prompts that share a prefix, to one
    with draws and one with edited logits; then to the shared prompts again, after eviction."""
    turns = [
        a_request(
            TEXT[:length], name=f"turn {length}", sampling=greedy(4), session="s",
            overflow=Overflow.KV,
        )
        for length in (80, 110, 120)
    ]  # fmt: skip
    drawn = a_request(TEXT[100:130], name="drawn", sampling=DRAWN)
    edited = a_request(TEXT[:30], name="edited", sampling=EDITED)
    found: Answers = {}
    for requests in [*([turn] for turn in turns), shared_prompts("first "), [drawn, edited]]:
        found |= asked(engine, requests)
    engine.flush()
    engine.clear_device()
    return found | asked(engine, shared_prompts("second "))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    config = a_config(1, tmp_path_factory.mktemp("alone"))
    with closing(build_engine(folder, config)) as engine:
        return answers(engine)


def kill_a_rank(engine: Engine, after_s: float, victim: int) -> None:
    """Kill a rank while requests run: an error in time names the rank, and all ranks end."""
    ranks = rank_processes()
    assert len(ranks) == 2
    timer = Timer(after_s, ranks[victim].kill)
    timer.start()
    with pytest.raises(EngineLost, match=rf"rank {victim} of 2 \(process {ranks[victim].pid}\)"):
        keep_asking(engine, monotonic() + after_s + LIMIT_S)
    end_s = monotonic() + LIMIT_S
    while not all(is_over(rank.pid) for rank in ranks):
        assert monotonic() < end_s
        sleep(0.01)


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended; its parent may not have heard of it yet
        return ""


def rank_processes() -> list[psutil.Process]:
    """The ranks' processes, in the order in which they were started."""
    children = psutil.Process().children()
    found = [child for child in children if "rank_process" in command_of(child)]
    return sorted(found, key=lambda child: child.pid)


def keep_asking(engine: Engine, end_s: float) -> None:
    while monotonic() < end_s:
        if not engine.has_work:
            for request in shared_prompts(f"{monotonic()} "):
                engine.submit(request)
        engine.step()


def test_two_ranks_answer_as_one_process(folder: Path, tmp_path: Path, expected: Answers) -> None:
    bus = EventBus()
    counters = Counters().attach(bus)
    config = a_config(2, tmp_path)
    with closing(build_engine(folder, config, bus)) as engine:
        assert_same(answers(engine), expected)
        assert counters.preemptions
        assert counters.moved_pages
        assert counters.loaded_pages["host"]
        kill_a_rank(engine, 0.3, victim=1)
    with closing(build_engine(folder, config, bus)) as engine:
        assert_same(asked(engine, shared_prompts("second ")), expected)
        assert counters.loaded_pages["disk"] + counters.prefetched_pages
        kill_a_rank(engine, 0.05, victim=0)


def test_rounded_pages_on_ranks(folder: Path, tmp_path: Path) -> None:
    """Pages are moved, stored and loaded again."""
    found = []
    for num_ranks in (1, 2):
        config = a_config(num_ranks, tmp_path / str(num_ranks))
        config = replace(config, cache=replace(config.cache, kv_dtype=KvDType.FP8))
        bus = EventBus()
        counters = Counters().attach(bus)
        with closing(build_engine(folder, config, bus)) as engine:
            found.append(answers(engine))
        assert counters.preemptions
        assert counters.moved_pages
        assert counters.loaded_pages["host"]
    assert_same(found[1], found[0])


def test_the_error_for_an_impossible_number_of_ranks_names_the_possible_ones(folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(device=Device.CPU, tensor_parallel=5))
    with pytest.raises(ConfigError, match=r"5 ranks: .*possible numbers of ranks: 1, 2"):
        build_engine(folder, config)
    assert not rank_processes()


@pytest.mark.parametrize(
    ("is_one_gpu", "kv_tokens", "words"),
    [
        (False, 64, "tensor_parallel=2 needs 2 GPUs, torch sees 1; ranks_on_one_gpu"),
        (True, None, "set kv_tokens"),
    ],
)
def test_too_few_cards_are_refused_and_one_card_for_all_without_kv_tokens(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_one_gpu: bool,
    kv_tokens: int | None,
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = ModelConfig(tensor_parallel=2, ranks_on_one_gpu=is_one_gpu)
    with pytest.raises(ConfigError, match=words):
        load_ranks(
            folder_origin(folder), EngineConfig(model=model, cache=CacheConfig(kv_tokens=kv_tokens))
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_on_ranks_as_in_one_process(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_checkpoint(FAMILIES[name], folder)
    with closing(build_engine(folder, a_config(1, tmp_path / "alone"))) as engine:
        expected = answers(engine)
    with closing(build_engine(folder, a_config(num_ranks, tmp_path / "ranks"))) as engine:
        assert_same(answers(engine), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq act-order", "fp8 blocks", "fp8 per tensor", "mxfp4"])
def test_quantized_models_answer_on_ranks_as_in_one_process(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if name == "mxfp4":  # three groups of columns: the ranks' parts differ in size
        sizes = WIDE | {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
        write_gpt_oss(GptOssConfig(**sizes, head_dim=16), folder)
    else:
        (case,) = (case for case in CASES if case.name == name)
        write_quantized(LlamaConfig(**WIDE), folder, case)
    with closing(build_engine(folder, a_config(1, tmp_path / "alone"))) as engine:
        expected = answers(engine)
    with closing(build_engine(folder, a_config(2, tmp_path / "ranks"))) as engine:
        assert_same(answers(engine), expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rank_may_be_killed_at_any_moment(
    folder: Path, tmp_path: Path, expected: Answers
) -> None:
    """Also while it loads. 20 engines on one store lose a rank; then one more is not killed."""
    config, moments = a_config(2, tmp_path), random.Random(1)
    load_s = 10.0
    for _ in range(20):
        began_s = monotonic()
        moment_s, victim = moments.uniform(0.1, 1.3) * load_s, moments.choice([0, 1])
        timer = Timer(moment_s, kill_rank, (victim,))
        timer.start()
        with pytest.raises(EngineLost, match=rf"rank {victim} of 2 \(process \d+\) was killed"):
            load_and_ask(folder, config, began_s + moment_s + LIMIT_S)
        assert monotonic() < began_s + moment_s + LIMIT_S
        assert not rank_processes()
    began_s = monotonic()
    with closing(build_engine(folder, config)) as engine:
        assert_same(asked(engine, shared_prompts("second ")), expected)


def kill_rank(victim: int) -> None:
    rank_processes()[victim].kill()


def load_and_ask(folder: Path, config: EngineConfig, end_s: float) -> None:
    with closing(build_engine(folder, config)) as engine:
        keep_asking(engine, end_s)


@pytest.mark.slow
def test_smollm2_on_three_ranks_answers_as_one_process(smollm2_folder: Path) -> None:
    """smollm2 has 9 query heads and 3 KV heads. `tensor_parallel_size` is vLLM's name."""
    prompts = ["The capital of France is", "Water boils at", "The capital of France is not"]
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    texts = []
    for num_ranks in (1, 3):
        with LLM(smollm2_folder, kv_tokens=2048, tensor_parallel_size=num_ranks) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
