"""The model that tests of a GPU compare answers with is small and runs on a CPU."""

import json
from pathlib import Path

import pytest

from mainstem.text.tokenizer import Tokenizer
from tests.gpu.make_expected import read_prompts, write_answers, write_part


@pytest.mark.torch
def test_a_part_of_smollm2_answers(smollm2_folder: Path, tmp_path: Path) -> None:
    prompts = read_prompts(Tokenizer.load(smollm2_folder))
    part = write_part(smollm2_folder, tmp_path / "part", prompts, layers=(0, 29))
    assert sum(file.stat().st_size for file in (tmp_path / "part").iterdir()) < 30_000_000
    assert {name: len(ids) for name, ids in part.items()} == {n: len(i) for n, i in prompts.items()}
    few = dict(sorted(part.items(), key=lambda item: len(item[1]))[:3])
    write_answers(tmp_path / "part", few, tmp_path / "expected.json", new_tokens=4)
    rows = json.loads((tmp_path / "expected.json").read_text())
    assert [(row["prompt_ids"], len(row["answer_ids"])) for row in rows] == [
        (ids, 4) for ids in few.values()
    ]
    assert all(margin >= 0.0 for row in rows for margin in row["margins"])
