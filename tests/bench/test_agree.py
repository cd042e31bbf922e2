"""`mainstem bench agree` asks the turns of a trace in real time, and compares with the simulator.

Times of an engine are not compared here: that needs a quiet machine. Those of its scheduler in
virtual time are.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench import agree

TURNS = [[[40, 6], [30, 5], [20, 4]], [[50, 4], [25, 6]], [[33, 3]]]
FLAGS = ["--device", "cpu", "--pace", "1000", "--rate", "50", "--max-seqs", "2", "--json"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in TURNS))
    return str(path)


def test_each_way_gets_a_line(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl.gz"
    assert agree.main([trace, *FLAGS, "--log", str(log)]) == 0
    with gzip.open(log, "rt") as file:
        kinds = Counter(json.loads(line)["kind"] for line in file)
    assert kinds["turn"] == kinds["SequenceAdmitted"] == 12, "of both ways, without the warm-up"
    assert kinds["StepFinished"] > 12
    store, recompute = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (store["way"], recompute["way"]) == ("store", "recompute")
    assert store["turns"] == recompute["turns"] == 6
    # prompts of 40, 76, 101, 50, 79 and 33 tokens; of the later ones, whole pages of 16 before them
    assert store["in_engine"]["prefill_tokens"] == 379 - (32 + 80 + 48)
    assert recompute["in_engine"]["prefill_tokens"] == 379
    assert (recompute["hit_rate"], recompute["hit_points"]) == (0.0, 0.0)
    for line in (store, recompute):
        assert line["in_engine"]["ttft_s"] > 0
        assert line["in_simulator"]["prefill_tokens"] > 0
        assert line["served"]["speeds"]["weights_s"] > 0


def test_histories_come_from_host_memory_if_the_device_is_small(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    room = ["--kv-tokens", "160", "--host-gb", "0.01", "--store-fetch", "always", "--way", "store"]
    assert agree.main([trace, *FLAGS, *room]) == 0
    (line,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert 0 < line["hit_rate"] <= (32 + 80 + 48) / 379 + 1e-9
    assert line["served"]["host_gb_per_s"] > 0


def test_an_engine_that_loads_nothing_is_refused(trace: str) -> None:
    with pytest.raises(ConfigError, match="set --store-fetch always"):
        agree.main([trace, *FLAGS, "--host-gb", "0.01", "--store-fetch", "never"])


@pytest.mark.parametrize(
    ("rate", "kv_tokens"),
    [
        pytest.param("1", "100000", id="first tokens wait for steps", marks=pytest.mark.slow),
        pytest.param("4", "100000", id="and in a queue", marks=pytest.mark.slow),
        pytest.param("4", "20000", id="and for memory"),
    ],
)
def test_the_simulator_agrees_with_the_scheduler_in_virtual_time(
    rate: str, kv_tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within what is asked of it on a device: 2 points, 15 % and 10 %."""
    load = ["--turns", "120", "--rate", rate, "--pace", "20", "--context-tokens", "4096"]
    room = ["--kv-tokens", kv_tokens, "--max-seqs", "24"]
    assert agree.main(["--virtual", "--model-shape", "llama2-13b", *load, *room, "--json"]) == 0
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        assert abs(line["hit_points"]) < 2
        assert 0.85 < line["ttft_ratio"] < 1.15
        assert 0.9 < line["device_ratio"] < 1.1


def test_stored_lines_are_simulated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--virtual", "--model-shape", "llama2-13b", "--turns", "20", "--way", "store", "--json"]
    assert agree.main(argv) == 0
    text = capsys.readouterr().out
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    assert agree.main(["--again", str(path), "--json"]) == 0
    first, again = json.loads(text), json.loads(capsys.readouterr().out)
    assert again.pop("engine_on")["torch"] == first["torch"]
    assert again == first


def test_a_virtual_engine_has_no_lower_tiers(trace: str) -> None:
    with pytest.raises(ConfigError, match="--virtual has no lower tiers"):
        agree.main([trace, *FLAGS, "--virtual", "--host-gb", "1"])
