"""The examples of docs/python.md and of the README run without changes."""

import re
from pathlib import Path

import pytest

from tests.fake_engines import FakeEngines
from tests.fake_llm import patch_loading

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["docs/python.md", "README.md"]


def run_examples(page: str) -> None:
    """Run all Python blocks of a page in order."""
    names: dict[str, object] = {"__name__": "example"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page} block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run_with_a_fake_model(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch_loading(FakeEngines(), monkeypatch)
    run_examples(page)
    shown = capsys.readouterr().out
    if page == "docs/python.md":
        assert "prompts[1]: token id 1000000000 is outside the vocabulary" in shown
        assert re.search(r'\{"city": "(Paris|Rome)"\}', shown)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.usefixtures("smollm2_folder")
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run_with_the_embedded_model(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_examples(page)
    shown = capsys.readouterr().out
    if page == "docs/python.md":
        assert "The capital of France is Paris" in re.sub(r"\s+", " ", shown)
        assert '{"city": "Paris"}' in shown
