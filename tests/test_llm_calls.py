"""LLM and `mainstem chat` without a model: who may call when, and files that are of no use."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from mainstem.cli.chat import common_tokens
from mainstem.core.errors import AnswerFailed, ConfigError, InvalidRequest
from mainstem.core.request import SamplingParams
from mainstem.core.step import Step
from mainstem.llm import LLM
from tests.batch.fake_batch import FakeEngines, a_tokenizer
from tests.fake_llm import a_fake_llm

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def llm(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return a_fake_llm(engines, monkeypatch)


def test_closing_ends_a_call_of_another_thread_after_its_step(
    llm: LLM, engines: FakeEngines
) -> None:
    runs, is_closing = Event(), Event()
    num_steps = 0

    def held(_: Step) -> None:
        nonlocal num_steps
        num_steps += 1
        runs.set()
        assert is_closing.wait(10)

    engines.at_launch = held
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(llm.generate, "one", LONG, False)
        assert runs.wait(10)
        closing = threads.submit(llm.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)  # the step has not ended
        is_closing.set()
        with pytest.raises(InvalidRequest, match="LLM: is closed"):
            call.result(10)
        closing.result(10)
    assert num_steps < 4
    with pytest.raises(InvalidRequest, match="LLM: is closed"):
        llm.generate("one", LONG, use_tqdm=False)


def test_a_signal_handler_may_close_it_within_a_call(llm: LLM, engines: FakeEngines) -> None:
    engines.at_launch = lambda _: llm.close()
    with pytest.raises(InvalidRequest, match="LLM: is closed"):
        llm.generate("one", LONG, use_tqdm=False)


def test_a_call_from_within_a_call_is_refused(llm: LLM, engines: FakeEngines) -> None:
    def call_again(_: Step) -> None:
        llm.generate("two", LONG, use_tqdm=False)

    engines.at_launch = call_again
    with pytest.raises(AnswerFailed, match="cannot be called from within"):
        llm.generate("one", LONG, use_tqdm=False)
    engines.at_launch = None
    assert llm.generate("one", LONG, use_tqdm=False)[0].finished


def test_advice_that_is_impossible_is_refused_with_its_file(llm: LLM) -> None:
    llm.tokenizer.sampling_defaults["top_p"] = 7
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p: .*, got 7"):
        llm.generate("one", use_tqdm=False)
    assert llm.generate("one", SamplingParams(), use_tqdm=False)[0].finished


@pytest.mark.parametrize(("template", "common"), [("", 0), ("<{{ messages|length }}>", 3)])
def test_a_template_may_leave_out_what_was_said(template: str, common: int) -> None:
    assert common_tokens(a_tokenizer(template), []) == common
