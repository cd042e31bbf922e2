"""The estimated begin and end of the step in flight do not depend on how late the host checks."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mainstem.core.config import StoreConfig
from mainstem.core.step import Step, StepId
from mainstem.sched import loading
from mainstem.sched.fetching import CAUTION, Fetching
from mainstem.sched.loading import Loader
from mainstem.sched.step_times import StepTimes

TOKENS = 2000
STEP_S = 0.04


def make_step(step_id: int) -> Step:
    fields = {"step_id": StepId(step_id), "num_tokens": TOKENS, "num_decodes": 0}
    return cast(Step, SimpleNamespace(**fields, load_ids=np.empty(0, np.int32)))


@pytest.mark.parametrize("noticed_s", [0.05, 0.075])
def test_a_late_check_of_a_finished_step_does_not_lengthen_the_next_one(
    monkeypatch: pytest.MonkeyPatch, noticed_s: float
) -> None:
    now_s = 0.0
    monkeypatch.setattr(loading, "perf_counter", lambda: now_s)
    steps = StepTimes(token_s=STEP_S / TOKENS)
    fetching = Fetching(StoreConfig(), cast(Any, None), 16, steps)
    loader = Loader(cast(Any, None), cast(Any, None), fetching)
    first, second = make_step(1), make_step(2)
    now_s = 0.01
    loader.note_start(first.step_id)  # runs from 0.01 to 0.05
    now_s = 0.02
    loader.note_start(second.step_id)  # runs from 0.05 to 0.09
    now_s = noticed_s
    loader.note_end(first, STEP_S)
    assert loader.lead_s(second) == pytest.approx(CAUTION * STEP_S - (noticed_s - 0.05))
