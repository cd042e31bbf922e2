"""The offline benchmark: when it submits prompts, what it checks and what it reports."""

import json
from pathlib import Path

import numpy as np
import pytest

from mainstem.batch.supply import LOOK_AHEAD, Supply
from mainstem.core.config import EngineConfig, ModelConfig, SchedConfig
from mainstem.core.errors import ConfigError
from mainstem.core.plan import Prompts
from mainstem.core.step import InFlight, Step
from mainstem.engine import engine as engine_module
from mainstem.engine.build import build_random_engine
from mainstem.engine.engine import Engine
from mainstem.models.spec import ModelSpec
from mainstem.sched import scheduler as scheduler_module
from mainstem_bench import offline
from mainstem_bench.feed import Feed, Order, StepLog, run_job
from mainstem_bench.offline import check_sharing, main
from mainstem_bench.settings import check_room, settings
from mainstem_bench.workloads import OfflineJob, shared, shuffled
from tests.bench.rounded import printed
from tests.builders import VOCAB, an_engine
from tests.fakes import FakeRunner, fake_answer

SMALL = [
    "--workload", "relay-64", "--model-shape", "tiny", "--requests", "6", "--output", "4",
    "--kv-tokens", "4096", "--chunk-tokens", "100", "--json",
]  # fmt: skip


def some_prompts(groups: int = 6, degree: int = 3) -> Prompts:
    return Prompts.from_lists(shuffled(shared(groups, degree, 24, 5, vocab=VOCAB)))


# --- feeding --------------------------------------------------------------------------------------


def test_new_tokens_are_those_the_prompt_before_does_not_share() -> None:
    prompts = some_prompts()
    order = Order.planned(prompts, np.full(len(prompts), 4))
    new = order.new_tokens(prompts)
    assert sorted(new.tolist()) == [5] * 12 + [29] * 6
    assert Order.as_given(prompts).new_tokens(prompts).tolist() == [16] * 18  # not known: a guess


def test_feed_keeps_only_the_prompts_that_the_next_steps_need() -> None:
    prompts, outputs = some_prompts(groups=60), np.full(180, 4)
    engine = an_engine(num_pages=2048, config=SchedConfig(chunk_tokens=40))
    feed = Feed(engine, prompts, Order.planned(prompts, outputs), outputs)
    feed.top_up()
    assert engine.num_waiting == 4  # 29 + 5 + 5 + 29: a group's prefix counts once
    feed.top_up()
    assert engine.num_waiting == LOOK_AHEAD
    feed.top_up()
    assert engine.num_waiting == LOOK_AHEAD
    assert not feed.is_empty


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("can_overlap", [True, False])
def test_a_job_gives_every_prompt_its_answer(is_planned: bool, can_overlap: bool) -> None:
    prompts = some_prompts()
    engine = an_engine(num_pages=256, can_overlap=can_overlap)
    run = run_job(engine, prompts, 4, is_planned)
    for index, tokens in run.answers.items():
        assert list(tokens) == fake_answer(prompts[index].tolist(), 4, VOCAB)
    assert len(run.answers) == run.counters.requests == 18
    engine.check()


def test_a_plan_saves_tokens_if_memory_is_short() -> None:
    """With room for two groups in shuffled order, a prefix is evicted before it is used again."""
    prompts = some_prompts(groups=12, degree=4)
    saved = {}
    for is_planned in (True, False):
        engine = an_engine(num_pages=24, config=SchedConfig(chunk_tokens=64))
        saved[is_planned] = run_job(engine, prompts, 4, is_planned).counters.saving_ratio
    assert saved[True] == pytest.approx(3 / 4 * 24 / 29, abs=0.02)
    assert saved[False] < 0.6 * saved[True]  # not 0: eviction looks ahead over the queue


@pytest.mark.parametrize("is_planned", [True, False])
def test_steps_are_never_short_of_waiting_prompts(
    is_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are submitted shortly before they run fill the same steps as prompts that are
    submitted all at once. They are sorted, so that most of a prompt is cached even without a plan.
    """
    prompts = Prompts.from_lists(shared(20, 4, 96, 17, vocab=VOCAB))

    def num_steps() -> int:
        engine = an_engine(num_pages=1024, config=SchedConfig(chunk_tokens=64), can_overlap=True)
        return run_job(engine, prompts, 4, is_planned).steps.num_steps

    fed = num_steps()
    monkeypatch.setattr(Supply, "has_room", lambda *_: True)
    assert fed == num_steps()


@pytest.mark.parametrize("can_overlap", [True, False])
def test_host_time_includes_launching_if_steps_overlap(
    can_overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If steps do not overlap, launching includes running the step and counts as device time."""
    launch, launch_s, now_s = FakeRunner.launch, 0.5, 0.0

    def slow_launch(runner: FakeRunner, step: Step) -> InFlight:
        nonlocal now_s
        now_s += launch_s  # nothing else takes time
        return launch(runner, step)

    monkeypatch.setattr(FakeRunner, "launch", slow_launch)
    for module in (engine_module, scheduler_module):
        monkeypatch.setattr(module, "perf_counter", lambda: now_s)
    engine = an_engine(num_pages=256, can_overlap=can_overlap)
    steps = run_job(engine, some_prompts(1), 4, True).steps
    assert steps.host_s == (steps.num_steps * launch_s if can_overlap else 0.0)
    assert steps.device_s >= steps.num_steps * launch_s


# --- checks and reports ---------------------------------------------------------------------------


def test_busy_is_device_time_divided_by_the_time_to_the_last_step() -> None:
    log = StepLog(began_s=10.0, ended_s=14.0, device_s=3.0)
    assert log.busy == 0.75
    assert StepLog().busy == 0.0


def test_the_check_of_sharing_fails_if_answers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    job = OfflineJob("few", "tiny", 4096, 2, 4, 40, 8, 8)
    config = EngineConfig(model=ModelConfig(model="tiny"))
    check_sharing(job, config)
    seeds = iter((1, 2))

    def other_weights(shape: ModelSpec, config: EngineConfig) -> Engine:
        return build_random_engine(shape, config, seed=next(seeds))

    monkeypatch.setattr(offline, "build_random_engine", other_weights)
    with pytest.raises(AssertionError, match="sharing changed an answer"):
        check_sharing(job, config)


def test_one_line_has_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["workload"] == "relay-64"
    assert (result["requests"], result["groups"]) == (6, 1)
    seconds, rate = printed(result["seconds"], 3), printed(result["requests_per_s"], 3)
    assert (seconds * rate).may_be(6)
    assert (seconds * printed(result["tokens_per_s"], 1)).may_be(6 * (128 + 4))
    assert result["saving_ratio"] == pytest.approx(5 * 64 / (6 * 128), abs=1e-3)
    processed = 64 + 6 * (64 + 3)
    assert (printed(result["us_per_token"], 3) * (processed / 1e6)).may_be(seconds)
    at_the_limit = printed(result["limit_requests_per_s"], 2)
    assert (at_the_limit * printed(result["share_of_limit"], 4)).may_be(rate)
    assert 0 < result["gpu_busy"] <= 1
    assert result["host_ms_per_step"] > 0
    assert result["peak_gb"] > 0
    assert result["steps"] > 4
    assert result["settings"]["cache"]["kv_tokens"] == 4096
    assert result["settings"]["sched"]["chunk_tokens"] == 100
    assert result["planned"] is True


def test_the_order_of_prompts_and_the_planner_can_be_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--order", "sorted", "--no-plan", "--share", "none"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["order"], result["planned"], result["saving_ratio"]) == ("sorted", False, 0)


def test_arrivals_give_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--arrivals", "50"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 6
    assert 0 < result["ttft_ms_p50"] <= result["ttft_ms_p99"] <= result["e2e_ms_p99"]
    assert result["planned"] is False


def test_a_profile_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main([*SMALL, "--profile", str(trace), "--profile-steps", "2"]) == 0
    printed = capsys.readouterr()
    shares = json.loads(printed.out)["profile"]
    assert shares["gemm"] > 0
    assert shares["attention"] > 0
    assert "of the time" in printed.err
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "smollm2"], "--model-shape"),
        (["--arrivals", "0"], "--arrivals"),
        (["--profile", "/nowhere/at/all/trace.json"], "/nowhere/at/all"),
    ],
)
def test_wrong_calls_are_refused(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        main([*SMALL, *flags])


def test_a_shape_that_exceeds_memory_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="llama31-8b with 450,000 tokens of KV takes 150 GB"):
        check_room("llama31-8b", 450_000, 24 * 10**9, "--model-shape tiny")
    check_room("tiny", 450_000, 24 * 10**9, "--model-shape tiny")


def test_settings_are_plain_json() -> None:
    plain = json.loads(json.dumps(settings(EngineConfig())))
    assert plain["sched"]["share"] == "reads"
    assert plain["model"]["device"] == "auto"


def test_a_short_answer_is_an_error() -> None:
    """The context window is full before the answer has 4 tokens, so the answer ends there."""
    prompts = Prompts.from_lists([np.arange(1, 13).tolist()])
    engine = an_engine(num_pages=4, page_size=4, max_model_len=14)
    with pytest.raises(AssertionError, match="short"):
        run_job(engine, prompts, 4, False)
