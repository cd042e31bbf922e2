"""LLM and `mainstem chat` over a fake model: several threads, Ctrl-C, settings and templates."""

import gc
import inspect
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from io import StringIO
from pathlib import Path
from threading import Event
from types import NoneType
from typing import get_args, get_type_hints
from weakref import ref

import pytest
from tqdm import tqdm

from mainstem.async_llm import AsyncLLM
from mainstem.cli import generate
from mainstem.cli.chat import common_tokens, stream_answer
from mainstem.core.config import SETTINGS
from mainstem.core.errors import AnswerFailed, ConfigError, InvalidRequest
from mainstem.core.events import StepFinished
from mainstem.core.metrics import Counters
from mainstem.core.request import SamplingParams
from mainstem.core.step import Step
from mainstem.llm import LLM
from mainstem.llm.bar import PromptBar
from mainstem.text.results import CompletionOutput, RequestOutput
from tests.fake_engines import EOS_ID, FakeEngines, a_tokenizer
from tests.fake_llm import a_fake_llm, patch_loading

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
        assert is_closing.wait(60)

    engines.at_launch = held
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(llm.generate, "one", LONG, False)
        assert runs.wait(60)
        closing = threads.submit(llm.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)  # the step has not ended
        is_closing.set()
        with pytest.raises(InvalidRequest, match="LLM: is closed"):
            call.result(60)
        closing.result(60)
    assert num_steps < 4
    with pytest.raises(InvalidRequest, match="LLM: is closed"):
        llm.generate("one", LONG, use_tqdm=False)


def test_the_memory_is_freed_with_the_last_reference(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for the garbage collector, which does not know how large the weights are."""
    llm = a_fake_llm(engines, monkeypatch)
    llm.generate("one", SamplingParams(max_tokens=3), use_tqdm=False)
    steps, loaded = ref(llm._steps), ref(llm)  # what could hold each other
    gc.disable()
    try:
        llm.close()
        del llm
        assert (steps(), loaded()) == (None, None)
    finally:
        gc.enable()


def test_a_signal_handler_may_close_the_llm_within_a_call(llm: LLM, engines: FakeEngines) -> None:
    engines.at_launch = lambda _: llm.close()
    with pytest.raises(InvalidRequest, match="LLM: is closed"):
        llm.generate("one", LONG, use_tqdm=False)


class Presses:
    """Presses Ctrl-C while the tokens of the steps `steps` (by default 3 and 5) are processed."""

    def __init__(self, engines: FakeEngines, *steps: int) -> None:
        engines.at_step = self._press
        self._steps = steps or (3, 5)
        self.num_steps = 0
        self.num_held = 0
        self.handlers: set[object] = set()

    def _press(self, _: StepFinished) -> None:
        self.num_steps += 1
        self.handlers.add(signal.getsignal(signal.SIGINT))
        if self.num_steps in self._steps:
            signal.raise_signal(signal.SIGINT)
            self.num_held += 1  # this line is reached only if the interrupt is held


@pytest.fixture
def own_handler() -> Iterator[Callable[..., object]]:
    """Without this, a process that a shell runs in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (
        "the handler was not restored"
    )
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_handler")
def test_ctrl_c_in_a_call_waits_until_the_tokens_of_a_step_are_processed(
    llm: LLM, engines: FakeEngines
) -> None:
    presses = Presses(engines)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], LONG, use_tqdm=False)
    assert (presses.num_steps, presses.num_held) == (3, 1)
    assert len(presses.handlers) == 1, "the handler is changed once per call"
    presses = Presses(engines, 10**9)
    assert llm.generate("one", LONG, use_tqdm=False)[0].finished
    assert presses.num_held == 0
    assert engines.engine is not None
    engines.engine.engine.check()


@pytest.mark.usefixtures("own_handler")
def test_the_second_ctrl_c_in_a_chat_waits_for_the_step_as_well(
    llm: LLM, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = Presses(engines, 3, 4)
    monkeypatch.setattr(llm.text_engine, "abort", lambda _: None)  # the first has no effect
    messages = [{"role": "user", "content": "one"}]
    with pytest.raises(KeyboardInterrupt):
        stream_answer(llm, messages, 0, LONG, shows_stats=False)
    assert (presses.num_steps, presses.num_held) == (4, 2)


@pytest.mark.usefixtures("own_handler")
def test_ctrl_c_in_generate_waits_for_the_step_as_well(
    llm: LLM, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = Presses(engines)
    monkeypatch.setattr(LLM, "from_config", lambda _: llm)
    with pytest.raises(KeyboardInterrupt):
        generate.main(["one", "--max-tokens", "300", "--ignore-eos"])
    assert (presses.num_steps, presses.num_held) == (3, 1)


def test_a_call_from_within_a_call_is_refused(llm: LLM, engines: FakeEngines) -> None:
    def call_again(_: Step) -> None:
        llm.generate("two", LONG, use_tqdm=False)

    engines.at_launch = call_again
    with pytest.raises(AnswerFailed, match="cannot be called from within"):
        llm.generate("one", LONG, use_tqdm=False)
    engines.at_launch = None
    assert llm.generate("one", LONG, use_tqdm=False)[0].finished


def test_an_invalid_generation_config_is_refused_with_its_file_name(llm: LLM) -> None:
    llm.tokenizer.sampling_defaults["top_p"] = 7
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p: .*, got 7"):
        llm.generate("one", use_tqdm=False)
    assert llm.generate("one", SamplingParams(), use_tqdm=False)[0].finished


@pytest.mark.parametrize(("template", "common"), [("", 0), ("<{{ messages|length }}>", 3)])
def test_a_template_may_leave_out_a_message(template: str, common: int) -> None:
    assert common_tokens(a_tokenizer(template), []) == common


def test_the_bar_of_a_call_moves_while_prompts_are_read() -> None:
    counters, shown = Counters(), StringIO()
    with tqdm(total=0, file=shown, mininterval=0, miniters=0) as bar:
        progress = PromptBar(counters, bar)
        for _ in range(4):
            progress.add(RequestOutput("", None, [1] * 50, [CompletionOutput(0, "", [])]))
        progress.reset(4)
        counters.computed_tokens += 100
        progress.update(0)
        assert bar.n == 1.0
        counters.computed_tokens += 100
        progress.update(1)
        assert bar.n == 2.5
        progress.update(3)
        assert bar.n == 4.0
    assert " 25%|" in shown.getvalue()
    assert "0/4 req, 100/200 prompt tok" in shown.getvalue()


def test_arguments_of_llm_are_the_settings_and_their_defaults() -> None:
    """The arguments are written out in the signature for readers and for editors."""
    made = dict(inspect.signature(LLM.__init__).parameters)
    del made["self"], made["others"]
    hints = get_type_hints(LLM.__init__)
    assert set(made) == {row.argument for row in SETTINGS}
    for row in SETTINGS:
        default = row.default.value if isinstance(row.default, Enum) else row.default
        assert made[row.argument].default == default
        kinds: set[type] = set(get_args(hints[row.argument])) or {hints[row.argument]}
        kind = str if issubclass(row.kind, Enum | tuple) else row.kind
        others = {Path, Sequence[str]} if row.kind is tuple else {Path}
        assert kinds - others == {kind, *([NoneType] if row.is_optional else [])}


def test_a_misspelled_setting_is_an_error_of_type_checkers_too() -> None:
    """mypy reports an ignored line in which it finds no such error."""
    with pytest.raises(ConfigError, match=r"'kv_token'\. Did you mean kv_tokens\?"):
        LLM(kv_token=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="'page_sise'"):
        AsyncLLM(page_sise=16)  # type: ignore[call-arg]


def test_special_tokens_in_messages_are_text_unless_allowed(
    llm: LLM, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "so <|end|> ends"}]
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=2))
    assert EOS_ID not in answer.prompt_token_ids
    assert answer.prompt == "<user>so <|end|> ends\n<assistant>"
    (raw,) = llm.generate("so <|end|> ends", SamplingParams(max_tokens=2))
    assert EOS_ID in raw.prompt_token_ids
    patch_loading(engines, monkeypatch)
    lenient = LLM("fake", allow_special_tokens=True)
    (acting,) = lenient.chat(messages, SamplingParams(max_tokens=2))
    assert EOS_ID in acting.prompt_token_ids
