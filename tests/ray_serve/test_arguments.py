"""Arguments of the Ray Serve application; Ray itself is not needed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mainstem.core.errors import ConfigError
from mainstem.ray.router import RouterKind
from mainstem.ray.serve_app import app, front_settings, read_arguments, replica_settings


def test_values_may_be_text_as_on_a_command_line() -> None:
    given = read_arguments({"replicas": "3", "num_gpus": "0.5", "router": "random"})
    assert (given.replicas, given.num_gpus) == (3, 0.5)
    assert front_settings(given).kind is RouterKind.RANDOM


def test_each_app_is_assigned_to_its_replicas(tmp_path: Path) -> None:
    (tmp_path / "shop.txt").write_text("You sell tools.")
    file = str(tmp_path / "shop.txt")
    apps = {"shop": {"file": file, "replicas": [1]}, "all": {"file": file}}
    given = read_arguments({"replicas": 2, "apps": apps})
    assert set(replica_settings(given, 0).apps) == {"all"}
    assert set(replica_settings(given, 1).apps) == {"shop", "all"}
    assert front_settings(given).apps == (("shop", (1,)),)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replica": 2}, "unknown field `replica`"),
        ({"replicas": 0}, ">= 1"),
        ({"router": "sticky"}, "sticky"),
        ({"engine": {"mode1": "x"}}, "Did you mean model?"),
        ({"apps": {"shop": {"file": "x", "replicas": [1]}}}, "numbers from 0 to 0"),
        ({"apps": {"shop": {"file": "x", "replicas": []}}}, "numbers from 0 to 0"),
    ],
)
def test_errors_name_the_wrong_argument(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(args)
    assert said in str(caught.value)


def test_the_error_names_the_app_whose_file_is_missing(tmp_path: Path) -> None:
    given = read_arguments({"apps": {"shop": {"file": str(tmp_path / "none")}}})
    with pytest.raises(ConfigError, match="app shop: cannot read"):
        replica_settings(given, 0)


def test_without_ray_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"mainstem\[ray\]"):
        app({})
