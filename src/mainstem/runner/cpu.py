"""CpuRunner: runs Steps on a CPU."""

import numpy as np
import torch
from torch import Tensor

from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Step, StepResult
from mainstem.core.weights import ModelWeights
from mainstem.kernels.recurrent import cpu as kernels
from mainstem.models.block import Gate, OpenGate
from mainstem.models.cpu.decoder import Decoder
from mainstem.runner.attention import CpuAttention
from mainstem.runner.gates import Loads
from mainstem.runner.inputs import make_inputs, make_token_ids
from mainstem.runner.pages import DevicePages
from mainstem.runner.recurrence import HybridAttention, Recurrence
from mainstem.runner.rounded_pages import RoundedPages
from mainstem.runner.rounded_weighing import RoundedKeys
from mainstem.runner.sampler import Sampler, drawn_logprobs, start_logprobs
from mainstem.runner.single import SingleTokenPass
from mainstem.runner.states import NO_ROWS, DeviceStates, RowShape
from mainstem.runner.weighing import WeighingAttention

LAYOUT = b"cpu:1:adjacent-pairs"  # layout of K and V in a page; part of the model's identity
_LOGPROB_ROWS = 64  # prompt rows whose full logits are held at once


class Finished:
    """A step that has already run."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result

    def has_ended(self) -> bool:
        return True


class CpuRunner:
    """Runs each step at once. Owns weights, pages and sampler."""

    def __init__(
        self,
        decoder: Decoder,
        pages: DevicePages | RoundedPages,
        max_positions: int,
        gate: Gate | None = None,
        num_states: int = 0,
        rows: RowShape = NO_ROWS,
    ) -> None:
        self._decoder = decoder
        self._pages = pages
        self._gate = OpenGate() if gate is None else gate
        self._attention = CpuAttention(
            decoder.spec, pages, max_positions, decoder.sinks, decoder.query_gains
        )
        self._recurrence: Recurrence | None = None
        self.states: DeviceStates | None = None  # of a model with recurrent layers
        if decoder.recurrent:
            self.states = DeviceStates(
                decoder.spec, num_states, decoder.dtype, torch.device("cpu"), pages.page_bytes, rows
            )
            self._recurrence = Recurrence(decoder.spec, decoder.recurrent, self.states, kernels)
        self._previous = torch.empty(0, dtype=torch.long)
        self._single = self._make_single(decoder)
        self.weights: ModelWeights | None = None
        self._loads: Loads | None = None
        self.sampler = Sampler()

    @property
    def can_overlap(self) -> bool:
        return False

    @property
    def pages(self) -> DevicePages | RoundedPages:
        return self._pages

    def exchange(self, decoder: Decoder | None) -> None:
        """Use other weights of the same recipe from now on; None: free those in use."""
        self._single = None
        self._attention.sinks = () if decoder is None else decoder.sinks
        self._attention.query_gains = () if decoder is None else decoder.query_gains
        self._recurrence = None
        if decoder is None:
            del self._decoder
            return
        self._decoder = decoder
        if decoder.recurrent:
            assert self.states is not None
            self._recurrence = Recurrence(decoder.spec, decoder.recurrent, self.states, kernels)
        self._single = self._make_single(decoder)

    def _make_single(self, decoder: Decoder) -> SingleTokenPass | None:
        """The pass for single tokens; it does not read rounded pages."""
        if isinstance(self._pages, RoundedPages):
            return None
        return SingleTokenPass.make(decoder, self._pages, self._attention.tables)

    def attach(self, loads: Loads) -> None:
        """Set the loads that steps may name from now on."""
        self._loads = loads

    def launch(self, step: Step) -> Finished:
        """Run the step; see Runner in core.step."""
        with torch.inference_mode():
            return Finished(self._run(step))

    def drain(self) -> None:
        """Do nothing: `launch` runs the step."""

    def check(self) -> None:
        """Do nothing: there is no other process."""

    def close(self) -> None:
        """Drop the latest samples; weights and pages are freed with the runner."""
        self._previous = torch.empty(0, dtype=torch.long)

    def _run(self, step: Step) -> StepResult:
        for started in step.started:
            self.sampler.start(started)
        hidden, masses = self._forward(step)
        num_rows = len(step.sample_rows)
        logprobs: dict[int, TokenLogprobs] = {}
        token_ids = torch.empty(0, dtype=torch.long)
        if num_rows:
            token_ids, logprobs = self._sample(hidden[:num_rows], step)
        self._previous = token_ids
        return StepResult(
            token_ids=token_ids.numpy().astype(np.int32),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(hidden, step),
            page_masses=tuple(mass.numpy() for mass in masses),
        )

    def _forward(self, step: Step) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states of the sampled rows, then of the rows with prompt logprobs; and the
        attention masses of pages (step.weighings)."""
        gate = self._gate_for(step)
        has_parts = self._pages.num_parts > 0
        assert not has_parts or step.window_parts is not None, (
            "a step says nothing of windowed parts"
        )
        if self._single is not None and self._single.can_run(step):
            return self._single.run(step, make_token_ids(step, self._previous), gate), []
        inputs = make_inputs(step, self._previous, self._pages.page_size)
        planned = self._attention.plan(inputs, step.spans)
        token_ids, rows, decoder = inputs.token_ids, inputs.hidden_rows, self._decoder
        if self._recurrence is not None:
            segments = self._recurrence.step_segments(step, torch.device("cpu"))
            hybrid = HybridAttention(
                decoder.spec, planned, self._recurrence, segments, step.num_tokens
            )
            return decoder.forward(token_ids, rows, hybrid, gate), []
        if not step.weighings:
            return decoder.forward(token_ids, rows, planned, gate), []
        pages: DevicePages | RoundedKeys
        if isinstance(self._pages, RoundedPages):
            pages = RoundedKeys(self._pages, step, step.seq_slots)
            step = pages.step
        else:
            pages = self._pages
        attention = WeighingAttention(
            planned, decoder.spec, pages, decoder.sinks, step, torch.device("cpu")
        )
        hidden = decoder.forward(token_ids, rows, attention, gate)
        return hidden, attention.masses(decoder.ranks)

    def _gate_for(self, step: Step) -> Gate:
        if len(step.load_ids) == 0:
            return self._gate
        assert self._loads is not None, "a step names loads and no copier is attached"
        return self._loads.gate(step.load_ids)

    def _sample(self, hidden: Tensor, step: Step) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        logits = self._decoder.logits(hidden)
        wanted = np.flatnonzero(step.sampling.wants_logprobs)
        # copy the logits first: the sampler edits them in place, and logprobs are computed without
        # edits
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None
        token_ids = self.sampler.sample(logits, step)
        if raw is None:
            return token_ids, {}
        counts, rows = step.sampling.num_logprobs[wanted], torch.from_numpy(wanted)
        drawn = drawn_logprobs(logits[rows], token_ids[rows], step.sampling, wanted)
        records = start_logprobs(raw, token_ids[rows], counts, drawn).resolve()
        return token_ids, dict(zip(wanted.tolist(), records, strict=True))

    def _prompt_logprobs(self, hidden: Tensor, step: Step) -> tuple[TokenLogprobs, ...]:
        targets = torch.from_numpy(step.prompt_logprob_targets).long()
        places = torch.from_numpy(step.hidden_rows()[1]).long()
        records: list[TokenLogprobs] = []
        for first in range(0, len(places), _LOGPROB_ROWS):
            rows = slice(first, first + _LOGPROB_ROWS)
            logits = self._decoder.logits(hidden[places[rows]])
            counts = step.num_prompt_logprobs[rows]
            records += start_logprobs(logits, targets[rows], counts).resolve()
        return tuple(records)
