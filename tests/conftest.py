"""Fixtures that several test packages use."""

from pathlib import Path

import pytest

from mainstem.checkpoints.hub import resolve_model


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The embedded model as a Hugging Face folder; fetched and converted once per user cache."""
    return resolve_model("smollm2")
