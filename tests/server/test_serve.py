"""`mainstem serve`: errors are reported before a model is loaded; logs are JSON lines."""

import json
import logging
import socket
from pathlib import Path

import pytest
from starlette.middleware.cors import CORSMiddleware

from mainstem.cli.serve import Parts, main
from mainstem.core.config import EngineConfig
from mainstem.core.errors import ConfigError
from mainstem.server.build import STEP_MS
from mainstem.server.http.logs import JsonLines
from mainstem.server.kept.file_store import lock_folder
from mainstem.server.link.kv_events import KvEventsConfig
from tests.fake_engines import FakeEngines
from tests.server.thread_engine import opener


def no_engine(config: EngineConfig, log_level: str, _: KvEventsConfig | None) -> Parts:
    raise AssertionError("the model was loaded")


@pytest.mark.parametrize(
    "flags",
    [
        ["--app", "nofile"],
        ["--app", "x=/no/such/file"],
        ["--api-key-file", "/no/such/file"],
        ["--admin-key-file", "/no/such/file"],
        ["--config", "/no/such/file.toml"],
        ["--host", "256.0.0.1"],
        ["--port", "99999"],
    ],
)
def test_wrong_flags_are_found_before_the_model_is_loaded(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(["--port", "0", *flags], no_engine)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--max-queue", "0"),
        ("--rate-limit", "-1"),
        ("--max-concurrent", "0 many"),
        ("--max-body-mib", "0"),
        ("--max-upload-mib", "-1"),
        ("--max-files", "0"),
        ("--max-sessions", "0"),
        ("--session-ttl-s", "0 nan"),
        ("--shutdown-s", "-1 nan inf"),
        ("--file-ttl-s", "0 nan inf soon"),
        ("--max-stored-gib", "0 nan inf much"),
        ("--allowed-origins", "example.com https://example.com/ ftp://x https://*.x.com"),
        ("--allowed-origins", "https://a.com,https://b.com https://me@a.com null"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_name_of_its_flag(
    flag: str, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values.split():
        with pytest.raises(SystemExit):
            main(["--port", "0", flag, value], no_engine)
        said = capsys.readouterr().err
        assert f"argument {flag}: " in said
        assert value in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--store-fetch", "always"], "store_fetch=always would have no effect"),
        (["--max-files", "5"], "--max-files has no effect without --data-dir"),
        (["--max-upload-mib", "5"], "--max-upload-mib has no effect"),
        (["--max-stored-gib", "5"], "--max-stored-gib has no effect"),
        (["--file-ttl-s", "5", "--disk-dir", "d"], "--file-ttl-s has no effect"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        main(["--port", "0", *flags], no_engine)


@pytest.mark.parametrize(
    "argv",
    ["smollm2 --port 0", "--port 0 smollm2", "--port 0 smollm2 --kv-tokens 64",
     "smollm2 --port 0 --model smollm2"],
)  # fmt: skip
def test_the_model_may_be_given_without_its_flag(argv: str) -> None:
    opened: list[str] = []

    def note(config: EngineConfig, _: str, __: KvEventsConfig | None) -> Parts:
        opened.append(config.model.model)
        raise ConfigError("not loaded")

    with pytest.raises(ConfigError, match="not loaded"):
        main(argv.split(), note)
    assert opened == ["smollm2"]


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' and --model 'b'"):
        main(["a", "--port", "0", "--model", "b"], no_engine)


def test_a_data_folder_in_use_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    with pytest.raises(ConfigError, match="another server is using"):
        main(["--port", "0", "--data-dir", str(tmp_path)], no_engine)
    lock.release()
    lock_folder(tmp_path).release()


def test_a_data_folder_without_write_permission_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    # stands for a folder without permission, since root has every permission
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="cannot write to the folder"):
        main(["--port", "0", "--data-dir", str(tmp_path)], no_engine)


def test_the_error_names_the_flag_of_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flag in ("--disk-dir", "--data-dir"):
        with pytest.raises(ConfigError, match=f"^{flag} .*/file/folder: "):
            main(["--port", "0", flag, str(tmp_path / "file" / "folder")], no_engine)


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen.* in use; use another --port"):
            main(["--port", str(taken.getsockname()[1])], no_engine)


def test_a_config_file_with_an_unknown_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[server]\nport = 1\n")
    with pytest.raises(ConfigError, match="unknown section"):
        main(["--config", str(path)], no_engine)


def test_an_app_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 1000)
    with pytest.raises(ConfigError, match="1000 tokens leave no room"):
        main(["--port", "0", "--app", f"long={tmp_path / 'long.txt'}"], opener(FakeEngines()))


@pytest.mark.parametrize(
    ("flags", "expected"), [([], {"temperature": 0.6}), (["--generation-config", "none"], {})]
)
def test_generation_config_is_used_unless_it_is_turned_off(
    flags: list[str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []
    run = "mainstem.cli.serve.Server.run"
    monkeypatch.setattr(run, lambda server, sockets: served.append(server.gateway.model.sampling))
    main(["--port", "0", *flags], opener(FakeEngines(sampling_defaults={"temperature": 0.6})))
    assert served == [expected]


@pytest.mark.parametrize(
    ("flags", "step_ms"), [("", STEP_MS), ("--step-ms 40", 40.0), ("--deterministic", None)]
)
def test_only_a_server_limits_the_time_of_steps(flags: str, step_ms: float | None) -> None:
    def look(config: EngineConfig, log_level: str, _: KvEventsConfig | None) -> Parts:
        assert config.sched.step_ms == step_ms
        raise ConfigError("seen")

    assert EngineConfig().sched.step_ms is None
    with pytest.raises(ConfigError, match="seen"):
        main(["--port", "0", *flags.split()], look)


def test_loading_a_model_is_logged_before_it_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Seen(Exception):
        pass

    def loading(config: EngineConfig, log_level: str, _: KvEventsConfig | None) -> Parts:
        assert '"event": "loading", "model": "smollm2"' in capsys.readouterr().err
        raise Seen

    with pytest.raises(Seen):
        main(["--port", "0"], loading)


def test_allowed_sites_are_passed_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[object] = []
    run = "mainstem.cli.serve.Server.run"
    monkeypatch.setattr(run, lambda server, sockets: apps.append(server.config.app))
    main(
        ["--port", "0", "--allowed-origins", "https://A.com:443", "http://b:8080"],
        opener(FakeEngines()),
    )
    (app,) = apps
    assert isinstance(app, CORSMiddleware)
    assert app.allow_origins == ["https://a.com", "http://b:8080"]


def test_a_log_line_is_a_json_object() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, 'said "%s"\n', ("hé",), None)
    record.facts = {"status": 200, "path": Path("/x")}
    line = JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["event"] == 'said "hé"\n'
    assert found["level"] == "info"
    assert found["status"] == 200
    assert found["time"].endswith("Z")


def test_a_port_is_in_use_while_a_server_loads_its_model() -> None:
    """Clients can connect, and a second server cannot start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    class Seen(Exception):
        pass

    def never(config: EngineConfig, log_level: str, _: KvEventsConfig | None) -> Parts:
        raise AssertionError("the second server has loaded its model")

    def loading(config: EngineConfig, log_level: str, _: KvEventsConfig | None) -> Parts:
        socket.create_connection(("127.0.0.1", port), timeout=300).close()
        with pytest.raises(ConfigError, match="cannot listen"):
            main(["--port", str(port)], never)
        raise Seen

    with pytest.raises(Seen):
        main(["--port", str(port)], loading)
