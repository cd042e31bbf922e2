"""Messages between the engine's process and its ranks are unchanged after encoding and decoding."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np

from mainstem.core.request import SamplingParams
from mainstem.core.step import PageWeighing, Step
from mainstem.kv.transfer import LoadId
from mainstem.runner.ranks.protocol import LoadPages, decode, encode
from tests.builders import VOCAB, a_request, an_engine, run_all
from tests.fakes import FakeRunner


def steps() -> Iterator[Step]:
    """Steps with shared prompts, decodes, penalties, prompt logprobs, grammar masks and first
    keys."""
    runner = FakeRunner(64, 4, VOCAB)
    special = SamplingParams(max_tokens=6, logit_bias={3: 1.5}, presence_penalty=0.5, seed=1)
    logprobs = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=3)
    requests = [a_request(list(range(9)), 6), a_request([*range(9), 1], sampling=special)]
    requests.append(a_request([5, 6, 7], sampling=logprobs))
    engine = an_engine(runner=runner)
    run_all(engine, requests)
    yield from runner.steps
    first = runner.steps[0]
    bits = np.arange(26, dtype=np.uint8).reshape(2, 13)
    masked = replace(first.sampling, mask_rows=np.array([0, 2], np.int32), masks=bits)
    spans = replace(first.spans, first_keys=np.arange(7, dtype=np.int32))
    weighed = PageWeighing(3, 4, np.array([7, 1], np.int32))
    loads = np.array([8], np.int32)
    yield replace(first, sampling=masked, spans=spans, load_ids=loads, weighings=(weighed, weighed))


def assert_same(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array_equal(a, b)
        assert b.flags["W"] or not a.flags["W"], "torch needs writable arrays"
        assert b.flags["A"], "an array is not aligned"
    elif is_dataclass(a) and not isinstance(a, SamplingParams):
        for each in fields(a):
            assert_same(getattr(a, each.name), getattr(b, each.name))
    elif isinstance(a, tuple) and a and is_dataclass(a[0]):
        assert isinstance(b, tuple)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def test_a_decoded_step_equals_the_encoded_one() -> None:
    found = list(steps())
    assert any(step.started for step in found)
    assert any(len(step.prompt_logprob_rows) for step in found)
    for step in found:
        assert_same(step, decode(encode(step)))


def test_other_decoded_messages_equal_the_encoded_ones() -> None:
    load = LoadPages(
        3,
        LoadId(7),
        np.arange(4, dtype=np.int32),
        np.arange(4, 8, dtype=np.int32),
        np.arange(2, 6, dtype=np.int32),
        12,
    )
    assert_same(load, decode(encode(load)))
