"""`mainstem bench policies` replays the same arrivals for each policy and prints a line for it."""

import json
from pathlib import Path

import pytest

from mainstem.core.errors import ConfigError
from mainstem_bench import policies
from mainstem_bench.policies import Turns, made_up

SMALL = ["--model-shape", "tiny", "--device", "cpu", "--store-fetch", "always", "--json"]


def test_a_turn_continues_its_conversation() -> None:
    arrivals = made_up(Turns(3, 3, 20, 5, 4, 10.0), 100)
    assert [arrival.due_s for arrival in arrivals] == sorted(a.due_s for a in arrivals)
    prompts = [arrival.prompt_ids.tolist() for arrival in arrivals]
    assert [len(prompt) for prompt in prompts] == [20] * 3 + [29] * 3 + [38] * 3
    for later in prompts[3:]:
        assert sum(later[: len(before)] == before for before in prompts) in (2, 3)  # with itself


def test_each_policy_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--sessions", "6", "--turns", "3", "--history", "64", "--new", "8", "--output", "4"]
    room = ["--device-sessions", "2", "--host-sessions", "4", "--disk-sessions", "9"]
    argv = [*SMALL, *work, *room, "--rate", "1000", "--policy", "lookahead,lru"]
    assert policies.main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["policy"] for line in lines] == ["lookahead", "lru"]
    ahead, blind = lines
    assert ahead["requests"] == blind["requests"] == 18
    assert ahead["hit_rate"] > 0
    assert ahead["loaded_host"] > 0
    assert blind["prefetched"] == 0
    assert ahead["settings"]["store"]["host_gb"] > 0


def test_recorded_arrivals_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.jsonl"
    rows = [{"at_s": i * 0.01, "prompt_ids": [7] * 40, "max_tokens": 3} for i in range(3)]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert policies.main([str(record), *SMALL, "--policy", "fifo"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["record"], line["requests"]) == ("record.jsonl", 3)
    record.write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        policies.main([str(record), *SMALL])


def test_the_flag_store_policy_is_refused_in_favour_of_policy() -> None:
    with pytest.raises(ConfigError, match="--store-policy: use --policy"):
        policies.main([*SMALL, "--store-policy", "lru"])
