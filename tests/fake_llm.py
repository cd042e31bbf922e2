"""LLM over FakeRunner: exact answers, no weights."""

from pathlib import Path

import pytest

from mainstem.async_llm import AsyncLLM
from mainstem.llm import LLM
from tests.batch.fake_batch import FakeEngines, a_tokenizer


def a_fake_llm(engines: FakeEngines, patch: pytest.MonkeyPatch) -> LLM:
    """An LLM over a fake model."""
    patch_loading(engines, patch)
    return LLM("fake")


def a_fake_async_llm(engines: FakeEngines, patch: pytest.MonkeyPatch) -> AsyncLLM:
    """An AsyncLLM over a fake model."""
    patch_loading(engines, patch)
    return AsyncLLM("fake")


def patch_loading(engines: FakeEngines, patch: pytest.MonkeyPatch) -> None:
    """LLM and AsyncLLM load nothing, whatever model is named."""
    patch.setattr("mainstem.llm.resolve_model", lambda *_: Path("fake"))
    patch.setattr("mainstem.llm.build_engine", lambda _, config, *__, **___: engines(config).engine)
    patch.setattr(
        "mainstem.llm.Tokenizer.load",
        lambda _, __, allows_special: a_tokenizer(allow_special_tokens=allows_special),
    )
