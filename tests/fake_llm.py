"""LLM over FakeRunner: exact answers, no weights."""

from pathlib import Path

import pytest

from mainstem.async_llm import AsyncLLM
from mainstem.checkpoints.progress import Progress
from mainstem.core.config import ModelConfig
from mainstem.llm import LLM
from mainstem.text.tokenizer import Tokenizer
from tests.fake_engines import FakeEngines, a_tokenizer


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

    def fetch(model: ModelConfig, _: Progress) -> tuple[Path, Tokenizer]:
        return Path("fake"), a_tokenizer(allow_special_tokens=model.allow_special_tokens)

    patch.setattr("mainstem.llm.loaded.fetch_model", fetch)
    patch.setattr(
        "mainstem.llm.loaded.build_engine", lambda _, config, *__, **___: engines(config).engine
    )
