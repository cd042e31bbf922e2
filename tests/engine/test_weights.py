"""Weights change between steps, and nothing of the old ones is used for the new ones.

Answers are compared with those of an engine that was started with the weights: both run the same
code on the same numbers, so tokens are equal.
"""

import gc
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor

from mainstem.core.config import CacheConfig, EngineConfig, ModelConfig, StoreConfig
from mainstem.core.errors import EngineAsleep, InvalidRequest, UnsupportedModel, WeightsLost
from mainstem.core.events import EventBus, PagesCleared
from mainstem.core.request import FinishReason, Output
from mainstem.core.weights import FolderUpdate, Tag, TensorUpdate, Update, UpdateMode
from mainstem.engine.build import build_engine
from mainstem.engine.engine import Engine
from mainstem.models.weights import WeightDigest
from tests.builders import a_request, run_all
from tests.models.checkpoints import make_checkpoint

PROMPTS = [list(range(1, 40)), [*range(1, 20), *range(50, 70)], [7, 8, 9]]
CONFIG = EngineConfig(model=ModelConfig(model="tiny"), cache=CacheConfig(kv_tokens=512))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model, tied."""
    root = tmp_path_factory.mktemp("weights")
    make_checkpoint("llama", root / "a", tie_word_embeddings=True)
    varied(make_checkpoint("llama", root / "b", tie_word_embeddings=True), root / "b")
    return root / "a", root / "b"


def varied(model: torch.nn.Module, folder: Path, seed: int = 9) -> None:
    """Save other weights of a model to the folder."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)  # type: ignore[operator]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file  # noqa: PLC0415

    return load_file(folder / "model.safetensors")


def change(engine: Engine, update: Update, mode: UpdateMode = UpdateMode.FINISH) -> str:
    future = engine.update_weights(update, mode)
    while not future.done():
        engine.step()
    return future.result()


def answers(engine: Engine) -> list[list[int]]:
    requests = [a_request(prompt, 10) for prompt in PROMPTS]
    found = run_all(engine, requests)
    return [found.tokens[request.request_id, 0] for request in requests]


def fresh_answers(folder: Path, config: EngineConfig = CONFIG) -> list[list[int]]:
    engine = build_engine(folder, config)
    try:
        return answers(engine)
    finally:
        engine.close()


def test_a_closed_engine_is_freed_with_its_last_reference(folders: tuple[Path, Path]) -> None:
    """Without waiting for the garbage collector, which does not know how large the weights are."""
    engine = build_engine(folders[0], CONFIG)
    answers(engine)
    change(engine, FolderUpdate(folders[1]))
    decoder = ref(engine._runner._decoder)  # type: ignore[attr-defined]
    gc.disable()
    try:
        engine.close()
        del engine
        assert decoder() is None
    finally:
        gc.enable()


@pytest.fixture
def engine(folders: tuple[Path, Path]) -> Iterator[Engine]:
    made = build_engine(folders[0], CONFIG)
    yield made
    made.close()


def test_a_folder_has_the_version_of_an_engine_that_starts_with_it(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    old = answers(engine)
    first = engine.weights_version
    other = build_engine(folders[1], CONFIG)
    assert change(engine, FolderUpdate(folders[1])) == other.weights_version
    assert answers(engine) == answers(other)
    other.close()
    assert answers(engine) != old
    assert change(engine, FolderUpdate(folders[0])) == first
    assert answers(engine) == old


def test_tensors_have_a_new_version_each_time(engine: Engine, folders: tuple[Path, Path]) -> None:
    versions = {engine.weights_version}
    for _ in range(2):
        versions.add(change(engine, TensorUpdate(tensors_of(folders[1]).items())))
        assert answers(engine) == fresh_answers(folders[1])
    assert len(versions) == 3


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"],
)
def test_a_part_changes_alone(
    engine: Engine, folders: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """A gain that is folded into a product, and a part of a fused product; before and after all
    other tensors were given by an iterator."""
    tensor = tensors_of(folders[1])[name]
    save(tmp_path / "c", folders[0], tensors_of(folders[0]) | {name: tensor})
    change(engine, TensorUpdate([(name, tensor)]))
    assert answers(engine) == fresh_answers(tmp_path / "c")
    change(engine, TensorUpdate(tensors_of(folders[0]).items()))
    change(engine, TensorUpdate([(name, tensor)]))
    assert answers(engine) == fresh_answers(tmp_path / "c")


def save(folder: Path, like: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((like / "config.json").read_text())


def test_a_folder_without_config_holds_a_part(
    engine: Engine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    name = "model.norm.weight"
    save(tmp_path / "c", folders[0], tensors_of(folders[0]) | {name: tensors_of(folders[1])[name]})
    save(tmp_path / "part", folders[0], {name: tensors_of(folders[1])[name]})
    (tmp_path / "part" / "config.json").unlink()
    first = change(engine, FolderUpdate(tmp_path / "part"))
    assert answers(engine) == fresh_answers(tmp_path / "c")
    change(engine, FolderUpdate(folders[0]))
    assert change(engine, FolderUpdate(tmp_path / "part")) == first


def test_a_tied_head_follows_the_embedding(engine: Engine, folders: tuple[Path, Path]) -> None:
    """As transformers gives them: with the head, which is the same tensor, or without."""
    tensors = tensors_of(folders[1])
    embedding = tensors["model.embed_tokens.weight"]
    change(engine, TensorUpdate([*tensors.items(), ("lm_head.weight", embedding)]))
    assert answers(engine) == fresh_answers(folders[1])


def test_an_iterator_that_raises_changes_nothing(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    old, version = answers(engine), engine.weights_version

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors_of(folders[1]).items())[:7]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError, match="trainer"):
        change(engine, TensorUpdate(broken()))
    assert engine.weights_version == version
    assert answers(engine) == old


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("model.layers.0.nothing.weight", torch.zeros(3))], "unexpected tensors model.layers.0"),
        ([("model.norm.weight", torch.zeros(3))], "model.norm.weight has shape"),
        ([("model.norm.weight", "zeros")], "model.norm.weight is a str"),
        ([("model.norm.weight", torch.zeros(64, dtype=torch.int8))], "model.norm.weight has dtype"),
        ([], "no tensors"),
    ],
)
def test_a_refused_update_names_the_tensor(
    engine: Engine, tensors: list[tuple[str, object]], message: str
) -> None:
    old = answers(engine)
    with pytest.raises(InvalidRequest, match=message):
        change(engine, TensorUpdate(tensors))
    assert answers(engine) == old


def test_memory_that_the_iterator_reuses_is_noticed(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    buffer = torch.empty_like(tensors_of(folders[1])["model.layers.0.self_attn.q_proj.weight"])

    def reusing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors_of(folders[1]).items():
            if tensor.shape == buffer.shape:
                yield name, buffer.copy_(tensor)

    with pytest.raises(InvalidRequest, match="reuses its memory"):
        change(engine, TensorUpdate(reusing()))


def test_tensors_may_change_after_the_update(engine: Engine, folders: tuple[Path, Path]) -> None:
    """Those that were given, and the files of a folder, which trainers write again."""
    tensors = tensors_of(folders[1])
    change(engine, TensorUpdate(tensors.items()))
    for tensor in tensors.values():
        tensor.zero_()
    name = "model.layers.0.input_layernorm.weight"
    change(engine, TensorUpdate([(name, tensors_of(folders[1])[name])]))
    assert answers(engine) == fresh_answers(folders[1])


def test_a_folder_of_another_model_is_refused(
    engine: Engine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path / "other", intermediate_size=96)
    with pytest.raises(InvalidRequest, match="another model; these differ:"):
        change(engine, FolderUpdate(tmp_path / "other"))
    assert answers(engine) == fresh_answers(folders[0])


def test_no_page_of_old_weights_is_found_on_any_tier(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    bus, cleared = EventBus(), list[PagesCleared]()
    bus.subscribe(PagesCleared, cleared.append)
    store = StoreConfig(host_gb=0.004, disk_dir=str(tmp_path / "kv"), disk_gb=0.02)
    config = EngineConfig(model=CONFIG.model, cache=CONFIG.cache, store=store)
    engine = build_engine(folders[0], config, bus)
    old = answers(engine)
    engine.flush()
    change(engine, FolderUpdate(folders[1]))
    assert len(cleared) == 1
    assert answers(engine) == fresh_answers(folders[1])
    change(engine, FolderUpdate(folders[0]))
    found = run_all(engine, [a_request(PROMPTS[0], 10, name="again")])
    assert found.tokens["again", 0] == old[0]
    assert found.outputs[-1].num_cached_tokens == 32  # what the tiers kept is valid again
    engine.check()
    engine.close()


def test_running_requests_finish_and_new_ones_wait(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    version = engine.weights_version
    engine.submit(a_request(PROMPTS[0], 20, name="before"))
    for _ in range(5):
        outputs = engine.step()
    future = engine.update_weights(FolderUpdate(folders[1]))
    engine.submit(a_request(PROMPTS[0], 10, name="after"))
    last: dict[str, Output] = {}
    while engine.has_work:
        outputs = engine.step()
        last |= {output.request_id: output for output in outputs}
    assert last["before"].weights == (version,)
    assert last["after"].weights == (future.result(),)
    assert last["before"].finish_reason is FinishReason.LENGTH


def test_running_requests_are_aborted(engine: Engine, folders: tuple[Path, Path]) -> None:
    version = engine.weights_version
    engine.submit(a_request(PROMPTS[0], 200, name="before"))
    for _ in range(5):
        engine.step()
    future = engine.update_weights(FolderUpdate(folders[1]), UpdateMode.ABORT)
    engine.submit(a_request(PROMPTS[1], 200, name="held"))
    engine.abort(a_request(PROMPTS[1], name="held").request_id)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert future.done()
    reasons = {o.request_id: (o.finish_reason, o.weights) for o in outputs if o.finish_reason}
    assert reasons == {
        "before": (FinishReason.ABORT, (version,)),
        "held": (FinishReason.ABORT, ()),
    }
    assert answers(engine) == fresh_answers(folders[1])


def test_requests_continue_with_both_versions(engine: Engine, folders: tuple[Path, Path]) -> None:
    """Their pages have no name: the same prompt is computed again, and as a fresh engine does."""
    first = engine.weights_version
    engine.submit(a_request(PROMPTS[0], 30, name="before"))
    for _ in range(5):
        engine.step()
    second = change(engine, FolderUpdate(folders[1]), UpdateMode.CONTINUE)
    found = run_all(engine, [a_request(PROMPTS[0], 10, name="after")])
    weights = {o.request_id: o.weights for o in found.outputs if o.finish_reason is not None}
    assert weights == {"before": (first, second), "after": (second,)}
    assert found.tokens["after", 0] == fresh_answers(folders[1])[0]
    assert answers(engine) == fresh_answers(folders[1])
    engine.check()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(engine: Engine, folders: tuple[Path, Path], level: int) -> None:
    old = answers(engine)
    change(engine, FolderUpdate(folders[1]))
    settle(engine, engine.sleep(level))
    with pytest.raises(EngineAsleep, match="wake_up"):
        engine.submit(a_request(PROMPTS[0]))
    settle(engine, engine.wake(frozenset({Tag.WEIGHTS})))
    with pytest.raises(EngineAsleep):
        engine.submit(a_request(PROMPTS[0]))
    settle(engine, engine.wake(frozenset({Tag.KV_CACHE})))
    assert answers(engine) == fresh_answers(folders[1]) != old


def test_dropped_tensors_must_come_again(engine: Engine, folders: tuple[Path, Path]) -> None:
    tensors = tensors_of(folders[1])
    change(engine, TensorUpdate(tensors.items()))
    settle(engine, engine.sleep(2))
    settle(engine, engine.wake())
    with pytest.raises(WeightsLost, match="update all of them"):
        engine.submit(a_request(PROMPTS[0]))
    name = "model.norm.weight"
    with pytest.raises(InvalidRequest, match="lacks"):
        change(engine, TensorUpdate([(name, tensors[name])]))
    with pytest.raises(WeightsLost):
        engine.submit(a_request(PROMPTS[0]))
    change(engine, TensorUpdate(tensors.items()))
    assert answers(engine) == fresh_answers(folders[1])


def test_two_updates_at_once_are_made_in_order(engine: Engine, folders: tuple[Path, Path]) -> None:
    engine.submit(a_request(PROMPTS[0], 20, name="before"))
    engine.step()
    first = engine.update_weights(FolderUpdate(folders[1]))
    broken = engine.update_weights(TensorUpdate([("model.norm.weight", torch.zeros(3))]))
    engine.submit(a_request(PROMPTS[0], 10, name="after"))
    last = engine.update_weights(TensorUpdate(tensors_of(folders[1]).items()))
    found = run_all(engine, [])
    assert first.result() != last.result() == engine.weights_version
    with pytest.raises(InvalidRequest, match="has shape"):
        broken.result()
    assert found.outputs[-1].weights == (last.result(),)
    assert found.tokens["after", 0] == fresh_answers(folders[1])[0]
    engine.check()


def test_lost_weights_end_requests_that_would_go_on(
    engine: Engine, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder changes after its tensors were read: nobody knows which weights these are."""
    engine.submit(a_request(PROMPTS[0], 200, name="before"))
    engine.step()
    wait, num_calls = WeightDigest.wait, count(1)

    def changed(digest: WeightDigest) -> bytes:
        if next(num_calls) > 1:
            raise UnsupportedModel("model.safetensors changed")
        return wait(digest)

    monkeypatch.setattr(WeightDigest, "wait", changed)
    future = engine.update_weights(FolderUpdate(folders[1]), UpdateMode.CONTINUE)
    outputs = run_all(engine, []).outputs
    with pytest.raises(WeightsLost, match="changed"):
        future.result()
    assert outputs[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(WeightsLost):
        engine.submit(a_request(PROMPTS[0]))
    with pytest.raises(InvalidRequest, match="none to go on with"):
        engine.resume_weights()
    monkeypatch.undo()
    change(engine, FolderUpdate(folders[0]))
    assert answers(engine) == fresh_answers(folders[0])
    engine.check()


def test_sleep_waits_for_requests_and_ends_those_that_come_meanwhile(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    engine.submit(a_request(PROMPTS[0], 10, name="before"))
    engine.step()
    asleep = engine.sleep(1)
    engine.submit(a_request(PROMPTS[0], 10, name="late"))
    found = run_all(engine, [])
    assert asleep.done()
    (late,) = (o for o in found.outputs if o.request_id == "late")
    assert found.tokens["before", 0] == fresh_answers(folders[0])[0][1:]
    assert late.finish_reason is FinishReason.ERROR
    assert "wake_up" in str(late.fault)
    again = engine.sleep(1)
    with pytest.raises(InvalidRequest, match="sleeps already"):
        settle(engine, again)
    settle(engine, engine.wake())
    settle(engine, engine.wake())  # twice
    assert answers(engine) == fresh_answers(folders[0])
    engine.check()


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_while_asleep_wakes_the_weights(
    engine: Engine, folders: tuple[Path, Path], level: int
) -> None:
    """Also with a part of them: the others are read from their folder again."""
    name = "model.norm.weight"
    settle(engine, engine.sleep(level))
    with pytest.raises(InvalidRequest, match="has shape"):
        change(engine, TensorUpdate([(name, torch.zeros(3))]))
    change(engine, TensorUpdate([(name, tensors_of(folders[0])[name])]))
    with pytest.raises(EngineAsleep):
        engine.submit(a_request(PROMPTS[0]))
    settle(engine, engine.wake(frozenset({Tag.KV_CACHE})))
    assert answers(engine) == fresh_answers(folders[0])


def test_an_engine_that_lost_its_weights_sleeps_and_goes_on(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    for is_awake in (False, True):
        engine.lose_weights()
        with pytest.raises(InvalidRequest, match="lacks"):  # changes nothing
            change(engine, TensorUpdate([("model.norm.weight", torch.ones(48))]))
        settle(engine, engine.sleep(2))
        if is_awake:
            settle(engine, engine.wake())
            with pytest.raises(WeightsLost):
                engine.submit(a_request(PROMPTS[0]))
        engine.resume_weights()
        if not is_awake:
            with pytest.raises(EngineAsleep):
                engine.submit(a_request(PROMPTS[0]))
            settle(engine, engine.wake(frozenset({Tag.KV_CACHE})))
        assert answers(engine) == fresh_answers(folders[0])


def test_the_folder_of_the_model_may_have_changed(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """All tensors are taken, since nothing is read from it; a part is refused."""
    shutil.copytree(folders[0], tmp_path / "c")
    engine = build_engine(tmp_path / "c", CONFIG)
    shutil.copy(folders[1] / "model.safetensors", tmp_path / "new")
    (tmp_path / "new").replace(tmp_path / "c" / "model.safetensors")
    tensors = tensors_of(folders[1])
    part = {"model.norm.weight": tensors["model.norm.weight"]}
    with pytest.raises(InvalidRequest, match="lacks"):
        change(engine, TensorUpdate(part.items()))
    assert answers(engine) == fresh_answers(folders[0])
    change(engine, TensorUpdate(tensors.items()))
    change(engine, TensorUpdate(part.items()))
    assert answers(engine) == fresh_answers(folders[1])
    engine.close()


def settle(engine: Engine, future: "object") -> None:
    while not future.done():  # type: ignore[attr-defined]
        engine.step()
    future.result()  # type: ignore[attr-defined]
