"""LLM over FakeRunner: exact answers, no weights."""

from pathlib import Path

import pytest

from mainstem.llm import LLM
from tests.batch.fake_batch import FakeEngines, a_tokenizer


def a_fake_llm(engines: FakeEngines, patch: pytest.MonkeyPatch) -> LLM:
    """An LLM over a fake model."""
    patch.setattr("mainstem.llm.resolve_model", lambda *_: Path("fake"))
    patch.setattr("mainstem.llm.build_engine", lambda _, config, *__, **___: engines(config).engine)
    patch.setattr("mainstem.llm.Tokenizer.load", lambda *_: a_tokenizer())
    return LLM("fake")
