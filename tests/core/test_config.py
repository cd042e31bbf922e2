"""Settings come from defaults, a file and flags; unknown names and bad values are refused."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.core.config import (
    SETTINGS,
    CacheConfig,
    EngineConfig,
    Fetch,
    SchedConfig,
    Share,
    StoreConfig,
    load_config,
    with_arguments,
)
from mainstem.core.environment import cache_dir, keep_freed_memory
from mainstem.core.errors import ConfigError
from mainstem.core.settings import Setting


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return parser.parse_args(argv)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[cache]\npage_size = 64\nkv_tokens = 4096\n[sched]\nshare = "storage"\n')
    config = engine_config(parse(["--config", str(file), "--page-size", "32"]))
    assert config.cache == CacheConfig(page_size=32, kv_tokens=4096)
    assert config.sched.share is Share.STORAGE
    assert config.sched.chunk_tokens == SchedConfig().chunk_tokens


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[cash]\n", r"unknown section \[cash\]. Did you mean cache\? Sections are \[model\], "),
        ("[zzz]\n", r"unknown section \[zzz\]. Sections are \[model\], "),
        ("page_size = 16\n", r"'page_size' is outside a section. .* below a line \[cache\]"),
        ('model = "smollm2"\n', r"'model' is outside a section. Put model below a line \[model\]"),
        ("store_ttl = 5\n", r"'store_ttl' is outside a section. Put ttl_s below .* \[store\]"),
        ("chunk_token = 5\n", r"no setting has that name. Did you mean chunk_tokens\?"),
        (
            "[cache]\npage_sise = 16\n",
            "'page_sise'. Did you mean page_size.* Known: expected_tokens, ",
        ),
        ("[cache]\nzzz = 16\n", "unknown setting 'zzz'. Known: expected_tokens, kv_dtype"),
        ("[cache]\nhost_gb = 16\n", r"'host_gb'. It is called host_gb, in section \[store\]"),
        ("[cache]\ngpu_memory_utilization = 1\n", "It is called memory_share$"),
        ('[cache]\npage_size = "big"\n', "page_size must be int"),
        ("[cache]\npage_size = 12\n", "power of two"),
        ("[cache]\nmemory_share = 1.5\n", "memory_share must be above 0 and at most 1"),
        ('[cache]\nmemory_share = "half"\n', "memory_share must be float"),
        ('[sched]\nshare = "all"\n', "share must be one of"),
        ("[sched]\nchunk_tokens = 0\n", "at least 1"),
        ("[store]\nhost_gb = -1\n", "host_gb must be a number of at least 0"),
        ("[store]\nhost_gb = nan\n", "host_gb must be a number of at least 0"),
        ("[store]\ndisk_gb = inf\n", "disk_gb must be a number above 0"),
        ("[store]\nttl_s = nan\n", "ttl_s must be a number above 0"),
        ("[store]\ndisk_dir = 7\n", "disk_dir must be str"),
        ('[store]\npolicy = "random"\n', "policy must be one of"),
        ('[store]\npreload = "some"\n', "preload must be auto, all or a number"),
        ('[store]\nhost_gb = 0\ndisk_dir = "d"\n', "host_gb must be above 0"),
        ("[sched\n", "not valid TOML"),
    ],
)
def test_the_error_for_a_bad_file_names_what_is_wrong(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_config(file)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(file)


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_every_setting_has_a_help_text_and_a_valid_default(row: Setting) -> None:
    assert row.is_optional == (row.default is None) == bool(row.about.unset)
    assert row.about.help
    assert row.read(row.default, "test") == row.default
    if not row.is_optional:
        with pytest.raises(ConfigError, match=rf"test: {row.name} must be"):
            row.read(None, "test")


def test_arguments_may_be_paths_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    made = with_arguments(EngineConfig(), {"disk_dir": tmp_path, "share": "none"}, "LLM")
    assert made.store.disk_dir == str(tmp_path)
    assert made.sched.share is Share.NONE
    with pytest.raises(ConfigError, match=r"LLM: unknown setting 'ttl_s'"):
        with_arguments(EngineConfig(), {"ttl_s": 1.0}, "LLM")


def test_the_table_of_the_docs_is_made_from_the_settings() -> None:
    script = Path(__file__).parents[2] / "docs" / "settings_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, "docs/settings.md is out of date: python docs/settings_table.py"


def test_kv_memory_can_be_a_share_of_memory() -> None:
    config = engine_config(parse(["--gpu-memory-utilization", "0.9"]))
    assert config.cache.memory_share == 0.9


def test_the_store_is_set_by_flags() -> None:
    argv = ["--host-gb", "2.5", "--disk-dir", "/d", "--disk-gb", "7", "--store-ttl", "60"]
    argv += ["--store-policy", "lru", "--store-fetch", "always", "--preload", "5"]
    argv += ["--remote", "redis://h", "--remote-gb", "3", "--remote-ttl", "9"]
    store = engine_config(parse([*argv, "--remote-secrets", "f"])).store
    assert store == StoreConfig(
        host_gb=2.5,
        disk_dir="/d",
        disk_gb=7.0,
        remote="redis://h",
        remote_gb=3.0,
        remote_ttl_s=9.0,
        remote_secrets="f",
        ttl_s=60.0,
        policy="lru",
        fetch=Fetch.ALWAYS,
        preload="5",
    )
    assert store.host_bytes == 2_500_000_000


@pytest.mark.parametrize(
    ("argv", "refused", "needed"),
    [
        ("--store-fetch always", "store_fetch=always", "set host_gb, disk_dir or remote"),
        ("--preload 5", "preload=5", "set host_gb, disk_dir or remote"),
        ("--preload 5 --host-gb 0", "preload=5", "set host_gb, disk_dir or remote"),
        ("--store-save end", "store_save=end", "set host_gb, disk_dir or remote"),
        ("--store-ttl 9", "store_ttl=9.0", "set host_gb, disk_dir or remote"),
        ("--host-gb 1 --disk-gb 5", "disk_gb=5.0", "set disk_dir"),
        ("--host-gb 1 --remote-gb 5", "remote_gb=5.0", "set remote"),
        ("--disk-dir d --remote-ttl 5", "remote_ttl=5.0", "set remote"),
        ("--remote-secrets f", "remote_secrets=f", "set remote"),
        ("--host-gb 1 --store-fetch never --preload all", "preload=all", "auto or always"),
        ("--share none --host-gb 1", "host_gb=1.0", "set share to storage or reads"),
        ("--share none --disk-dir d", "disk_dir=d", "set share to storage or reads"),
        ("--share none --store-policy lru", "store_policy=lru", "set share to storage or reads"),
        ("--share storage --span-levels 2", "span_levels=2", "set share to reads"),
        ("--kv-tokens 64 --gpu-memory-utilization 0.5", "gpu_memory_utilization=0.5", "kv_tokens"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(argv: str, refused: str, needed: str) -> None:
    config = engine_config(parse(argv.split()))
    with pytest.raises(ConfigError, match=rf"^{refused} would have no effect: .*{needed}"):
        config.check()


def test_a_time_limit_is_refused_where_answers_may_not_depend_on_time() -> None:
    with pytest.raises(ConfigError, match=r"step_ms=50 and deterministic exclude each other"):
        engine_config(parse(["--deterministic", "--step-ms", "50"])).check()
    engine_config(parse(["--deterministic", "--step-ms", "0"])).check()


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--host-gb 0 --store-policy lru",
        "--host-gb 1 --store-fetch always --preload 5 --store-save end --store-ttl 9",
        "--disk-dir d --disk-gb 5 --store-fetch never",
        "--remote redis://h --remote-gb 5 --remote-ttl 5 --remote-secrets f --preload all",
        "--share storage --host-gb 1",
        "--share none --host-gb 0 --span-levels 8",
    ],
)
def test_a_valid_config_stays_valid_with_every_kind_of_sharing(argv: str) -> None:
    config = engine_config(parse(argv.split()))
    for share in Share:
        made = config.sharing(share)
        assert made.sched.share is share
        made.check()
        assert (made.cache, made.model) == (config.cache, config.model)
    assert config.sharing(Share.READS).store == config.store


def test_a_flag_may_turn_on_what_a_setting_of_the_file_needs(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[store]\nfetch = "always"\nsave = "end"\n')
    engine_config(parse(["--config", str(file), "--host-gb", "1"])).check()
    with pytest.raises(ConfigError, match=r"^store_save=end would have no effect"):
        engine_config(parse(["--config", str(file)])).check()


@pytest.mark.parametrize(("name", "value"), [("store_save", "sync"), ("store_policy", "fifo")])
def test_baselines_of_benchmarks_are_no_settings(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one of .*, got {value!r}"):
        with_arguments(EngineConfig(), {name: value}, "LLM")


def test_a_disk_or_remote_tier_turns_the_host_tier_on() -> None:
    assert StoreConfig().host_bytes == 0
    assert StoreConfig(disk_dir="/d").host_bytes == 1_000_000_000
    assert StoreConfig(remote="redis://h").host_bytes == 1_000_000_000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("MAINSTEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/mainstem")


def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    keep_freed_memory()
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "10000"
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "10")
    keep_freed_memory()
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "10"


def test_a_setting_of_names_may_be_repeated_flags_a_list_or_text(tmp_path: Path) -> None:
    wanted = ("a", "b", "c")
    flags = ["--ignore-config-fields", "a, b", "--ignore-config-fields", "c"]
    assert engine_config(parse(flags)).model.ignore_config_fields == wanted
    assert engine_config(parse([])).model.ignore_config_fields is None
    file = tmp_path / "a.toml"
    for text in ('"a,b,c"', '["a", "b,c"]'):
        file.write_text(f"[model]\nignore_config_fields = {text}\n")
        assert load_config(file).model.ignore_config_fields == wanted
    made = with_arguments(EngineConfig(), {"ignore_config_fields": ["a", "b", "c"]}, "LLM")
    assert made.model.ignore_config_fields == wanted
    file.write_text("[model]\nignore_config_fields = 7\n")
    with pytest.raises(ConfigError, match="ignore_config_fields must be names with commas"):
        load_config(file)
