"""If steps fail in jobs and scripts, other prompts are answered and the error names the bad one."""

import json
from pathlib import Path

import numpy as np
import pytest

from mainstem.cli.batch import main
from mainstem.core.errors import AnswerFailed, EngineLost
from mainstem.core.request import SamplingParams
from mainstem.core.step import Step
from tests.fake_engines import FakeEngines, expected_text
from tests.fake_llm import a_fake_llm

POISON = "longer than whatever any of the others has to say"


def fails_over_poison(step: Step) -> None:
    if len(POISON) in np.diff(step.seq_starts):
        raise RuntimeError("poison")


def always_fails(_: Step) -> None:
    raise RuntimeError("no device")


def a_job(folder: Path) -> list[str]:
    rows = [{"custom_id": f"r{n}", "prompt": f"row {n}", "max_tokens": 5} for n in range(8)]
    rows.insert(3, {"custom_id": "bad", "prompt": POISON, "max_tokens": 5})
    rows.insert(6, {"custom_id": "copy of bad", "prompt": POISON, "max_tokens": 5})
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--no-progress"]


def test_a_poisonous_row_of_a_job_is_an_error_row(tmp_path: Path) -> None:
    engines = FakeEngines()
    engines.at_launch = fails_over_poison
    assert main(a_job(tmp_path), engines) == 1
    said = (tmp_path / "out.jsonl").read_text()
    rows = {row["custom_id"]: row for row in map(json.loads, said.splitlines())}
    assert len(rows) == 10
    for number in range(8):
        text = rows[f"r{number}"]["response"]["body"]["choices"][0]["text"]
        assert text == expected_text(f"row {number}", 5)
    for name in ("bad", "copy of bad"):
        assert rows[name]["error"]["code"] == "engine_failed"
        assert "RuntimeError: poison" in rows[name]["error"]["message"]


def test_a_job_whose_engine_is_lost_reports_it_and_can_be_resumed(tmp_path: Path) -> None:
    engines = FakeEngines()
    engines.at_launch = always_fails
    with pytest.raises(EngineLost, match="no device"):
        main(a_job(tmp_path), engines)
    engines.at_launch = None
    main([*a_job(tmp_path), "--resume"], engines)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 10


def test_the_error_of_a_script_has_the_answers_to_the_other_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = FakeEngines()
    engines.at_launch = fails_over_poison
    llm = a_fake_llm(engines, monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    with pytest.raises(
        AnswerFailed, match=r"1 of 3 prompts .* number 1: RuntimeError: poison"
    ) as e:
        llm.generate(["one", POISON, "three"], greedy, use_tqdm=False)
    first, failed, last = e.value.results
    assert first.outputs[0].text == expected_text("one", 5)  # type: ignore[attr-defined]
    assert failed.outputs[0].finish_reason == "error"  # type: ignore[attr-defined]
    assert last.outputs[0].text == expected_text("three", 5)  # type: ignore[attr-defined]
    assert llm.generate("one", greedy, use_tqdm=False)[0].outputs[0].finish_reason is not None
