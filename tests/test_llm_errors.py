"""A bad prompt among good ones: the error names it, or only its own result has an error. Without a
model."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

import mainstem
from mainstem import SamplingParams
from mainstem.core.errors import AnswerFailed, ConfigError, InvalidRequest
from mainstem.core.step import Step
from mainstem.llm import LLM
from mainstem.text.grammar import StructuredOutputsParams
from tests.builders import BEYOND
from tests.fake_engines import FakeEngines, expected_text
from tests.fake_llm import a_fake_llm

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
BAD: list[Any] = [
    "one",
    [],
    [5, 10**6],
    [1, [2]],
    ["x", 2],
    [1.5],
    [-1],
    [2**40],
    None,
    "\ud800",
    "x" * 1000,
    "two",
]


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def llm(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return a_fake_llm(engines, monkeypatch)


@pytest.mark.parametrize("place", range(1, len(BAD) - 1))
def test_the_error_names_a_bad_prompt_before_anything_runs(
    llm: LLM, engines: FakeEngines, place: int
) -> None:
    launched: list[Step] = []
    engines.at_launch = launched.append
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: ") as caught:
        llm.generate(["one", BAD[place], "two"], SHORT, use_tqdm=False)
    assert caught.value.field == "prompts[1]"
    assert not launched
    assert not llm.text_engine.has_work


def test_bad_prompts_may_get_error_results(llm: LLM) -> None:
    results = llm.generate(BAD, SHORT, use_tqdm=False, errors="return")
    assert len(results) == len(BAD)
    for place, result in enumerate(results):
        assert result.finished
        if place in (0, len(BAD) - 1):
            assert result.error is None
            assert result.outputs[0].text == expected_text(BAD[place], 5)
        else:
            assert result.outputs == []
            assert result.error is not None
            assert result.error.startswith("prompt: ")
    assert "outside the vocabulary" in str(results[2].error)
    llm.text_engine.engine.check()


def test_an_error_in_a_prompts_own_settings_is_reported_too(llm: LLM) -> None:
    bad = SamplingParams(stop_token_ids=[10**6])
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: stop_token_ids: token id 1000000"):
        llm.generate(["one", "two"], [SHORT, bad], use_tqdm=False)
    _, result = llm.generate(["one", "two"], [SHORT, bad], use_tqdm=False, errors="return")
    assert result.error is not None
    assert result.error.startswith("stop_token_ids: ")


def test_a_lone_prompt_is_not_numbered(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: token id 1000000"):
        llm.generate([1, 10**6], SHORT, use_tqdm=False)


def test_bad_conversations_raise_or_get_error_results(llm: LLM) -> None:
    good = [{"role": "user", "content": "one"}]
    bad: list[Any] = [good, [{"role": "user", "content": "\u00e9" * 9}], [5], good]
    with pytest.raises(InvalidRequest, match=r"^messages\[2\]: message 0 must be an object"):
        llm.chat(bad, SHORT, use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: token id \d+ is outside"):
        llm.chat([good, bad[1]], SHORT, use_tqdm=False)
    names = ["a", "b", "c", "d"]
    results = llm.chat(bad, SHORT, use_tqdm=False, sessions=names, errors="return")
    assert [result.error is None for result in results] == [True, False, False, True]
    assert results[0].outputs[0].text == results[3].outputs[0].text
    assert [llm._sessions.find("", name) is not None for name in names] == [
        True,
        False,
        False,
        True,
    ]


def test_if_steps_fail_because_of_a_prompt_only_its_result_has_an_error(
    llm: LLM, engines: FakeEngines
) -> None:
    bad_ids = str(llm.tokenizer.encode("bad")).strip("[]")

    def fail(step: Step) -> None:
        if bad_ids in str(step.token_ids.tolist()):
            raise RuntimeError("no such kernel")

    engines.at_launch = fail
    with pytest.raises(AnswerFailed, match=r"1 of 2 prompts could not be answered; number 1: .*no"):
        llm.generate(["xyz", "bad"], SHORT, use_tqdm=False)
    good, bad = llm.generate(["xyz", "bad"], SHORT, use_tqdm=False, errors="return")
    assert good.error is None
    assert bad.error is not None
    assert "no such kernel" in bad.error
    assert bad.outputs[0].finish_reason == "error"


def test_one_session_name_is_for_one_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "one"}]
    llm.chat(messages, SHORT, use_tqdm=False, sessions="alice")
    assert llm._sessions.find("", "alice") is not None
    with pytest.raises(InvalidRequest, match=r"'alice' is one name for 5 prompts"):
        llm.generate(["one"] * 5, SHORT, use_tqdm=False, sessions="alice")


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_cannot_be_pickled_or_copied(llm: LLM, attempt: Any) -> None:
    with pytest.raises(TypeError, match=r"LLM cannot be pickled or copied: .*in each process"):
        attempt(llm)


def test_arguments_of_vllm_are_accepted_or_refused(
    llm: LLM, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[str, Any] = {"max_num_batched_tokens": 99, "max_num_seqs": 8, "dtype": "half"}
    LLM("fake", tensor_parallel_size=1, **taken).close()
    assert engines.config is not None
    assert engines.config.sched.chunk_tokens == 99
    assert engines.config.model.dtype.value == "float16"
    assert engines.config.sched.max_seqs == 8
    with pytest.raises(ConfigError, match="enforce_eager=True is not supported"):
        LLM("fake", enforce_eager=True)


def test_an_answer_has_its_form_and_the_error_names_a_bad_form(llm: LLM) -> None:
    def forced(**how: Any) -> SamplingParams:
        form = StructuredOutputsParams(**how)
        return SamplingParams(temperature=0, max_tokens=99, structured_outputs=form)

    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]}
    params = [forced(choice=["yes", "no"]), forced(regex="[0-9]{3}"), forced(json=schema)]
    yes, number, json = llm.generate(["one", "two", "three"], params, use_tqdm=False)
    assert yes.outputs[0].text in ("yes", "no")
    assert number.outputs[0].text.isdecimal()
    assert json.outputs[0].text.startswith('{"a": 5')
    bad = forced(regex="(")
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: structured_outputs: "):
        llm.generate(["one", "two"], [SHORT, bad], use_tqdm=False)


def test_a_form_without_its_package_says_what_to_install(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    form = StructuredOutputsParams(choice=["yes", "no"])
    with pytest.raises(InvalidRequest, match=r"structured_outputs: .*mainstem\[server\]"):
        llm.generate("one", SamplingParams(structured_outputs=form), use_tqdm=False)


def test_logprobs_have_the_format_of_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, prompt_logprobs=0)
    (result,) = llm.generate(["one"], params, use_tqdm=False)
    answer = result.outputs[0]
    assert answer.logprobs is not None
    assert [list(place) for place in answer.logprobs] == [[token] for token in answer.token_ids]
    found = answer.logprobs[0][answer.token_ids[0]]
    assert (found.logprob, found.rank, found.decoded_token) == (-1.0, 1, answer.text[0])
    assert answer.cumulative_logprob == -2.0
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert [place and list(place) for place in others] == [
        [token] for token in result.prompt_token_ids[1:]
    ]


def test_get_tokenizer_returns_the_tokenizer(llm: LLM) -> None:
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("one")) == "one"


def test_result_types_are_exported_without_torch() -> None:
    code = (
        "import sys\n"
        "from mainstem import AnswerPiece, CompletionOutput, Logprob, RequestOutput\n"
        "from mainstem import SamplingParams, StructuredOutputsParams, Tokenizer\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(mainstem, name) for name in mainstem.__all__)


def test_an_answer_beyond_the_limits_of_its_form_is_an_error(llm: LLM) -> None:
    form = StructuredOutputsParams(json=BEYOND)
    bound = SamplingParams(temperature=0, max_tokens=100, structured_outputs=form)
    with pytest.raises(AnswerFailed, match="the parser of the form reached its limits"):
        llm.generate(["one", "two"], [SHORT, bound], use_tqdm=False)
    assert llm.generate(["one"], SHORT, use_tqdm=False)[0].finished
