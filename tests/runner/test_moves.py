"""Pages that a truncation keeps: their keys are rotated to other positions, on real (tiny)
models."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import HunYuanDenseV1Config

from mainstem.core.config import CacheConfig, EngineConfig
from mainstem.core.step import Step
from mainstem.kernels.memory.cpu import move_pages
from mainstem.models.rope import turns_by
from mainstem.models.spec import RopeSpec
from mainstem.runner.cpu import CpuRunner
from mainstem.runner.cpu_load import load_cpu_runner
from mainstem.runner.origin import folder_origin
from tests.models.checkpoints import CONFIGS, SMALL, VOCAB, make_checkpoint, write_checkpoint
from tests.runner.steps import Seq, Work, a_step, pages_of, run

pytestmark = pytest.mark.torch

PAGE = 4
KINDS = ["llama", "llama3 rope", "linear rope", "yarn rope", "qwen3"]


def a_runner(folder: Path) -> CpuRunner:
    cache = CacheConfig(page_size=PAGE, kv_tokens=64 * PAGE)
    runner, _ = load_cpu_runner(folder_origin(folder), EngineConfig(cache=cache))
    for layer in range(3):
        pages_of(runner).joint(layer).fill_(float("nan"))
    return runner


def filled(runner: CpuRunner, token_ids: list[int], pages: list[int]) -> Seq:
    seq = Seq(slot=0, token_ids=token_ids, pages=pages)
    works = [Work(seq, len(token_ids), has_sample=False)]
    run(runner, a_step(works, PAGE, VOCAB), works)
    return seq


def moving(step: Step, source: list[int], target: list[int], by: list[int]) -> Step:
    arrays = [np.array(values, np.int32) for values in (source, target, by)]
    return replace(step, move_from=arrays[0], move_to=arrays[1], move_by=arrays[2])


@pytest.mark.parametrize("name", KINDS)
def test_moved_keys_equal_keys_computed_at_the_new_position(name: str, tmp_path: Path) -> None:
    assert name in CONFIGS
    make_checkpoint(name, tmp_path)
    check_moved_keys(tmp_path)


def test_moved_keys_are_right_where_heads_are_normed_after_rotation(tmp_path: Path) -> None:
    """A gain after rotation differs from dim to dim. A key with such a gain cannot be rotated."""
    write_checkpoint(HunYuanDenseV1Config(**SMALL, head_dim=16), tmp_path)
    check_moved_keys(tmp_path)


def check_moved_keys(folder: Path) -> None:
    """Keys and values of the first layer depend on token and position alone, so a moved page must
    equal a page that is computed at its new position."""
    runner = a_runner(folder)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, 64)]
    filled(runner, ids, list(range(16)))
    again = filled(runner, ids[48:56], [40, 41])  # the same tokens at positions 0 to 7
    one = Seq(slot=1, token_ids=[5], pages=[30])
    step = a_step([Work(one, 1)], PAGE, VOCAB)
    runner.launch(moving(step, [12, 13], [20, 21], [-48, -48])).wait()
    assert again.pages == [40, 41]
    for read in (pages_of(runner).keys, pages_of(runner).values):
        first = read(0)
        assert torch.allclose(first[[20, 21]], first[[40, 41]], atol=2e-5)
    for layer in range(3):
        keys, values = pages_of(runner).keys(layer), pages_of(runner).values(layer)
        assert torch.equal(values[[20, 21]], values[12:14])
        assert not torch.allclose(keys[20], keys[12])
        assert keys[22].isnan().all(), "another page was written"


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_pages_in_16_bits_and_with_partly_rotated_heads_are_moved(rotary_dim: int) -> None:
    """bf16 holds 8 bits: a rotated key is within half a unit of the last place of the exact one."""
    torch.manual_seed(0)
    pages = torch.randn(2, 6, 2, PAGE, 16).to(torch.bfloat16)
    wide, before = pages.float(), pages.clone()
    rope = RopeSpec(theta=10000.0, rotary_dim=rotary_dim)
    turns = turns_by(rope, torch.tensor([-8, 4]))[:, None, None]
    source, target = torch.tensor([0, 1]), torch.tensor([4, 5])
    move_pages(pages, source, target, turns)
    move_pages(wide, source, target, turns)
    assert torch.equal(pages, wide.to(torch.bfloat16))
    assert torch.equal(pages[:, :4], before[:, :4])
    assert torch.equal(pages[0, 4:, ..., rotary_dim:], before[0, :2, ..., rotary_dim:])
    assert torch.equal(pages[1, 4:], before[1, :2])


def test_moving_a_page_away_and_back_restores_its_keys(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    runner = a_runner(tmp_path)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 16)]
    filled(runner, ids, [0, 1, 2, 3])
    for source, target, by in ((3, 20, -12), (20, 21, 12)):
        one = Seq(slot=1, token_ids=[5], pages=[30])
        step = a_step([Work(one, 1)], PAGE, VOCAB)
        runner.launch(moving(step, [source], [target], [by])).wait()
    for layer in range(3):
        keys = pages_of(runner).keys(layer)
        assert torch.allclose(keys[21], keys[3], atol=1e-5)


def test_a_step_reads_the_pages_that_it_moves(tmp_path: Path) -> None:
    """In every layer, the step writes a page, moves it and reads it."""
    make_checkpoint("llama", tmp_path)
    ids = [int(i) for i in np.random.default_rng(2).integers(3, VOCAB, 8)]
    answers = []
    for at_once in (True, False):
        runner = a_runner(tmp_path)
        writer, reader = Seq(0, ids[:PAGE], [0]), Seq(1, [*ids[:PAGE], 7], [20, 21], num_done=PAGE)
        if at_once:
            works = [Work(writer, PAGE, has_sample=False), Work(reader, 1)]
            step = moving(a_step(works, PAGE, VOCAB), [0], [20], [0])
            answers.append(run(runner, step, works).token_ids.tolist())
        else:
            filled(runner, ids[:PAGE], [20])
            works = [Work(reader, 1)]
            answers.append(run(runner, a_step(works, PAGE, VOCAB), works).token_ids.tolist())
    assert answers[0] == answers[1]
