"""Recurrent layers on a CPU agree with the token-by-token reference, and both with transformers."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from mainstem.kernels.recurrent import cpu, reference
from mainstem.kernels.recurrent.segments import Segments, make_segments
from tests.kernels.recurrent import (
    CASES,
    LONG_STEP,
    STEPS,
    Case,
    Part,
    Shape,
    a_convolution,
    a_delta_rule,
    a_gated_norm,
    a_mamba_scan,
    a_step,
    assert_as_reference,
    assert_near,
    assert_same,
)

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16]


def the_step(name: str) -> Segments:
    parts, num_decodes = STEPS[name]
    return a_step(*parts, num_decodes=num_decodes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("name", list(STEPS))
def test_every_step_agrees_with_the_reference(
    name: str, operation: str, dtype: torch.dtype
) -> None:
    assert_as_reference(CASES[operation](the_step(name), dtype), cpu)


@pytest.mark.parametrize("operation", list(CASES))
def test_long_segments_agree_with_the_reference(operation: str) -> None:
    parts, num_decodes = LONG_STEP
    assert_as_reference(CASES[operation](a_step(*parts, num_decodes=num_decodes)), cpu)


@pytest.mark.parametrize("operation", list(CASES))
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_agree_with_the_reference(seed: int, operation: str) -> None:
    random = np.random.default_rng(seed)
    num_decodes, free = int(random.integers(0, 4)), list(range(8, 17))
    parts = [Part((1,), int(random.integers(-1, 8)), (free.pop(),)) for _ in range(num_decodes)]
    while len(free) >= 3:
        lengths = tuple(int(n) for n in random.choice([1, 2, 3, 7, 40], random.integers(1, 4)))
        writes = tuple(free.pop() for _ in lengths)
        read = int(random.choice([-1, *range(8), writes[-1]]))
        parts.append(Part(lengths, read, writes))
    assert_as_reference(CASES[operation](a_step(*parts, num_decodes=num_decodes)), cpu)


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize(("has_bias", "activation"), [(False, True), (True, False)])
def test_convolutions_of_all_kinds(kernel: int, has_bias: bool, activation: bool) -> None:
    for name in STEPS:
        case = a_convolution(
            the_step(name), kernel=kernel, has_bias=has_bias, activation=activation
        )
        assert_as_reference(case, cpu)


def test_the_convolution_keeps_raw_inputs_oldest_first() -> None:
    case = a_convolution(a_step(Part((1,), 8, (9,)), Part((5,), -1, (10,)), Part((2,), 11, (11,))))
    x = case.args["x"]
    assert case.states is not None
    assert isinstance(x, torch.Tensor)
    states = case.run(cpu)[1]
    assert_same(states[9], torch.cat((case.states[8, 1:], x[:1])))
    assert_same(states[10], x[3:6])
    assert_same(states[11], torch.cat((case.states[11, 2:], x[6:8])))


@pytest.mark.parametrize(
    "shape",
    [Shape(1, 1, 16, 16), Shape(3, 3, 8, 40), Shape(2, 6, 24, 16)],
    ids=["one head", "odd dims", "three values a key"],
)
def test_heads_of_all_kinds(shape: Shape) -> None:
    assert_as_reference(a_delta_rule(the_step("mixed"), shape=shape), cpu)
    assert_as_reference(a_mamba_scan(the_step("mixed"), shape=shape), cpu)


@pytest.mark.parametrize("strength", [-4.0, 3.0, 6.0, 12.0])
def test_decays_that_underflow_leave_zeros(strength: float) -> None:
    """With a_log about 6, a token's decay is exp(-100) or less for most tokens, not for all."""
    for name in ("decodes", "mixed"):
        assert_as_reference(a_delta_rule(the_step(name), strength=strength), cpu)
        assert_as_reference(a_mamba_scan(the_step(name), strength=strength), cpu)


def test_the_step_of_a_scan_is_clamped() -> None:
    case = a_mamba_scan(the_step("mixed"), limits=(0.05, 0.2))
    assert_as_reference(case, cpu)
    free = a_mamba_scan(the_step("mixed"))
    assert not torch.allclose(case.run(cpu)[0], free.run(cpu)[0], atol=1e-2)


@pytest.mark.parametrize("operation", list(CASES))
def test_two_steps_give_what_one_step_gives(operation: str) -> None:
    """90 tokens at once; or 37, a decode, and 52 that end a segment after 2."""
    whole = CASES[operation](a_step(Part((90,), 2, (8,))))
    right_out, right_states = whole.run(cpu)
    states, outs = whole.states, []
    for first, step in (
        (0, a_step(Part((37,), 2, (9,)))),
        (37, a_step(Part((1,), 9, (9,)), num_decodes=1)),
        (38, a_step(Part((2, 50), 9, (10, 8)))),
    ):
        part = part_of(whole, first, step, states)
        out, states = part.run(cpu)
        outs.append(out)
    assert states is not None
    assert_near(torch.cat(outs), right_out, 2e-5)
    assert_near(states[8], right_states[8], 2e-5)


def part_of(case: Case, first: int, step: Segments, states: torch.Tensor | None) -> Case:
    """The case of some tokens only."""
    tokens, total = int(step.starts[-1]), case.out_shape[0]
    args = {
        name: value[first : first + tokens]
        if isinstance(value, torch.Tensor) and len(value) == total
        else value
        for name, value in case.args.items()
    }
    args["segments"] = step
    return replace(case, args=args, states=states, out_shape=(tokens, *case.out_shape[1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("group", "gains"), [(24, 24), (24, 96), (96, 96)])
def test_gated_norms_agree_with_the_reference(
    group: int, gains: int, gate_first: bool, dtype: torch.dtype
) -> None:
    assert_as_reference(a_gated_norm(dtype, 96, group, gains, gate_first), cpu)


def test_padding_of_a_graph_writes_only_its_slot() -> None:
    padding = Part((1,), 16, (16,))
    step = a_step(Part((1,), 8, (8,)), Part((1,), 3, (9,)), padding, padding, num_decodes=4)
    for make in CASES.values():
        case = make(step)
        out, states = case.run(cpu)
        right_out, right_states = case.run(reference)
        assert case.states is not None
        assert_near(out[:2], right_out[:2], 2e-5)
        assert_near(states[8:10], right_states[8:10], 2e-5)
        assert_same(states[10:16], case.states[10:16])


def test_tiles_end_where_segments_end() -> None:
    step = a_step(
        Part((1,), 0, (8,)), Part((130, 64), -1, (9, 10)), Part((3,), 1, (11,)), num_decodes=1
    )
    tiles = step.tiles
    assert tiles is not None
    assert tiles.starts.tolist() == [1, 65, 129, 131, 195]
    assert tiles.ends.tolist() == [65, 129, 131, 195, 198]
    assert tiles.writes.tolist() == [-1, -1, 9, 10, 11]
    assert tiles.seq_tiles.tolist() == [0, 4, 5]
    assert sum(part.num_tiles for part in tiles.rounds) == 5
    assert (step.max_tokens, step.num_seqs) == (194, 3)
    assert a_step(Part((1,), 0, (8,)), num_decodes=1).tiles is None


def test_a_step_that_is_not_cut_rightly_is_refused() -> None:
    def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.array(values, dtype=np.int32)

    with pytest.raises(AssertionError, match="empty"):
        make_segments(ints(0, 2, 2), ints(8, 9), ints(0, 2), ints(-1), 0)
    with pytest.raises(AssertionError, match="more than one token"):
        make_segments(ints(0, 2, 3), ints(8, 9), ints(0, 1, 2), ints(-1, 0), 1)
    with pytest.raises(AssertionError, match="one slot a segment"):
        make_segments(ints(0, 2, 3), ints(8), ints(0, 1, 2), ints(-1, 0), 0)


def of_one_sequence(case: Case, name: str) -> torch.Tensor:
    """[tokens, *] -> [1, tokens, *]"""
    value = case.args[name]
    assert isinstance(value, torch.Tensor)
    return value[None]


@pytest.mark.parametrize(
    "which", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_the_delta_rule_is_that_of_transformers(which: str) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = a_delta_rule(a_step(Part((100,), 3, (8,))), shape=Shape(4, 4, 16, 32))
    get = {name: of_one_sequence(case, name) for name in ("q", "k", "v", "a", "b")}
    a_log, dt_bias = case.args["a_log"], case.args["dt_bias"]
    assert isinstance(a_log, torch.Tensor)
    assert isinstance(dt_bias, torch.Tensor)
    assert case.states is not None
    right_out, right_state = getattr(theirs, which)(
        get["q"],
        get["k"],
        get["v"],
        g=-a_log.exp() * torch.nn.functional.softplus(get["a"] + dt_bias),
        beta=get["b"].sigmoid(),
        initial_state=case.states[3:4].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for operations in (cpu, reference):
        out, states = case.run(operations)
        assert_near(out, right_out[0], 2e-5)
        assert_near(states[8], right_state[0], 2e-5)


def test_the_scan_is_that_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    limits = (0.01, 1.0)
    case = a_mamba_scan(a_step(Part((100,), 3, (8,))), limits=limits)
    a_log = case.args["a_log"]
    assert isinstance(a_log, torch.Tensor)
    assert case.states is not None
    right_out, right_state = theirs.mamba2_chunk_scan(
        of_one_sequence(case, "x"),
        of_one_sequence(case, "dt"),
        -a_log.exp(),
        of_one_sequence(case, "b"),
        of_one_sequence(case, "c"),
        chunk_size=32,
        D=case.args["d"],
        dt_bias=case.args["dt_bias"],
        initial_states=case.states[3:4].mT,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    for operations in (cpu, reference):
        out, states = case.run(operations)
        assert_near(out, right_out[0], 2e-5)
        assert_near(states[8], right_state[0].mT, 2e-5)


def test_the_convolution_is_that_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = a_convolution(a_step(Part((9,), 3, (8,))))
    assert case.states is not None
    state = case.states[3:4].mT.clone()
    right = theirs.causal_conv1d_update(
        of_one_sequence(case, "x").mT, state, case.args["weight"], case.args["bias"], "silu"
    )
    for operations in (cpu, reference):
        out, states = case.run(operations)
        assert_near(out, right[0].T, 1e-5)
        assert_same(states[8], state[0].T)


def test_gated_norms_are_those_of_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    granite = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    for case, norm, heads in (
        (a_gated_norm(gains=24), qwen.Qwen3NextRMSNormGated(24, eps=1e-5), 4),
        (a_gated_norm(gains=96, gate_first=True), nemotron.NemotronHRMSNormGated(96, 24, 1e-5), 1),
        (
            a_gated_norm(group=96, gains=96, gate_first=True),
            granite.GraniteMoeHybridRMSNormGated(96, 1e-5),
            1,
        ),
    ):
        norm.weight.data = case.args["gain"]
        x, gate = (of_one_sequence(case, name).reshape(1, 5, heads, -1) for name in ("x", "gate"))
        right = norm(x, gate).reshape(5, 96).detach()
        for operations in (cpu, reference):
            assert_near(case.run(operations)[0], right, 1e-5)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
def test_serial_kernels_are_compiled_once_for_a_model() -> None:
    """Otherwise sums of the same numbers may be in another order; see `OF_SEGMENTS`."""
    pytest.importorskip("triton")
    from mainstem.kernels.recurrent.delta import _delta_serial_kernel  # noqa: PLC0415
    from mainstem.kernels.recurrent.scan import _scan_serial_kernel  # noqa: PLC0415

    of_model = {"a_log_ptr", "dt_bias_ptr", "d_ptr", "matrix_ptr", "stride_slot"}
    for kernel in (_delta_serial_kernel, _scan_serial_kernel):
        special = {
            param.name
            for param in kernel.params
            if not param.is_constexpr and not param.do_not_specialize
        }
        assert special - {"scale", "least", "most"} <= of_model  # floats never are
