"""GpuRunner: a Step in, a StepResult out, on a GPU; launched steps run while the host does other
work.

    launch   plan attention, send the arrays, queue forward pass, sampling and the copy back
    wait     until the copy back is done

Sampled ids stay on the device for the next step. Steps that take longer to launch than to compute
are replayed as CUDA graphs (graphs.py).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mainstem.core.errors import OutOfDeviceMemory
from mainstem.core.request import TokenLogprobs
from mainstem.core.step import Spans, Step, StepResult
from mainstem.core.weights import ModelWeights
from mainstem.kernels.attention.expanded import EXPAND_ROWS, NEVER
from mainstem.kernels.attention.plan import ALL_LAUNCHES, Launches
from mainstem.kernels.host import forget_constants
from mainstem.kernels.memory.copy import copy_slots
from mainstem.kernels.memory.upload import move_words
from mainstem.kernels.recurrent.segments import Segments
from mainstem.kernels.sampling.sample import argmax
from mainstem.models.block import Attention, Gate, OpenGate
from mainstem.models.gpu.decoder import GpuDecoder
from mainstem.models.gpu.linears import Rows
from mainstem.runner.gates import LAYERS_AT_ONCE, Loads
from mainstem.runner.gpu_attention import GpuAttention
from mainstem.runner.gpu_inputs import GpuInputs, InputBuffers, all_sizes, padded_size
from mainstem.runner.gpu_pages import GpuPages
from mainstem.runner.gpu_rounded import OpenPlaces, RoundedGpuPages, Writes
from mainstem.runner.graphs import FEW_TOKENS, Piece, StepGraphs, prompt_sizes
from mainstem.runner.recurrence import DecodeStates, HybridAttention, Recurrence
from mainstem.runner.rounded_weighing import RoundedKeys
from mainstem.runner.sampler import (
    LogprobRows,
    Sampler,
    drawn_logprobs,
    start_logprobs,
    to_host,
)
from mainstem.runner.states import DeviceStates
from mainstem.runner.uploads import Uploads
from mainstem.runner.weighing import WeighingAttention

_LOGIT_ROWS = 1024  # rows of logits held at once by greedy steps
_PROMPT_LOGPROB_ROWS = 64  # likewise for prompt logprobs, which need fp32
_NUM_RESULTS = 3  # host buffers for sampled ids, used in turn; must exceed the steps in flight


class GpuStep:
    """A launched step."""

    def __init__(
        self, finish: Callable[[], StepResult], end: "torch.cuda.Event | None" = None
    ) -> None:
        self._finish = finish
        self._end = end

    def wait(self) -> StepResult:
        return self._finish()

    def has_ended(self) -> bool:
        try:
            return self._end is None or bool(self._end.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the step failed; `wait` says so
            return True


class GpuRunner:
    """Runs steps in launch order on the current stream. Owns weights, pages and sampler."""

    def __init__(
        self,
        decoder: GpuDecoder,
        pages: GpuPages | RoundedGpuPages,
        attention: GpuAttention,
        max_tokens: int,
        device: torch.device,
        gate: Gate | None = None,
        recurrence: Recurrence | None = None,
        open_places: OpenPlaces | None = None,
    ) -> None:
        """`recurrence` runs the recurrent layers, if there are some; `open_places` belong to
        rounded pages."""
        self._open_places = open_places
        self._recurrence = recurrence
        self._decode_states: DecodeStates | None = None
        if recurrence is not None:
            self._decode_states = DecodeStates(
                max_tokens,
                recurrence.states.num_states,
                device,
                is_serial=recurrence.is_deterministic,
            )
        self._decoder = decoder
        self._pages = pages
        self._attention = attention
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._gate = OpenGate() if gate is None else gate
        has_parts = pages.num_parts > 0
        self._inputs = InputBuffers(
            max_tokens,
            device,
            pages.page_size,
            has_parts=has_parts,
            is_rounded=open_places is not None,
        )
        self._uploads = Uploads(device)
        self._previous = torch.empty(0, dtype=torch.int64, device=device)
        rows = min(_LOGIT_ROWS, max_tokens)
        size = (rows, decoder.spec.vocab_size)
        self._logits = torch.empty(size, dtype=decoder.dtype, device=device)
        self._results = [
            torch.empty(max_tokens, dtype=torch.int64, pin_memory=self._is_cuda)
            for _ in range(_NUM_RESULTS)
        ]
        self._num_launched = 0
        self._graphs: StepGraphs | None = None
        self._row_graphs: StepGraphs | None = None  # of decodes with rows (kv/rows.py)
        # of steps with prompts, if the model has recurrent layers; `_graphs` has decodes only then
        self._prompt_graphs: StepGraphs | None = None
        self._prompt_mixer: Attention | None = None  # of the step that these run
        # outputs of graphs without the last layer, by size and whether they are of prompts
        self._before_last: dict[tuple[int, bool], Rows] = {}
        self._loads: Loads | None = None
        self._graph_sizes: tuple[int, ...] = ()
        self.weights: ModelWeights | None = None
        self.sampler = Sampler(device)

    @property
    def can_overlap(self) -> bool:
        return self._is_cuda

    @property
    def pages(self) -> GpuPages | RoundedGpuPages:
        return self._pages

    @property
    def states(self) -> DeviceStates | None:
        """The states of a model with recurrent layers."""
        return None if self._recurrence is None else self._recurrence.states

    def attach(self, loads: Loads) -> None:
        """Steps may name these loads from now on."""
        self._loads = loads

    @torch.inference_mode()
    def warm_up(self, graph_sizes: tuple[int, ...]) -> None:
        """Compile every kernel, allocate what the largest step needs, and capture the graphs."""
        self._graph_sizes = graph_sizes
        if not self._is_cuda:
            return
        self._inputs.clear()
        attention, decoder = self._attention, self._decoder
        max_tokens = len(self._results[0])
        if self._decode_states is not None:
            self._decode_states.clear(max_tokens)
        size = (len(self._logits), decoder.spec.hidden_size)
        hidden_rows = torch.zeros(size, dtype=decoder.dtype, device=self._device)
        for tokens in {max_tokens, min(17, max_tokens), 1}:  # kernels specialise on 1 and 16*n
            inputs = self._inputs.views(tokens)
            ways = {0.0: (ALL_LAUNCHES, *attention.kinds_of_steps)} if attention.expands else {}
            ways[NEVER] = attention.kinds_of_steps  # the last one: graphs are captured with it
            for expand_rows, kinds in ways.items():
                zeros = np.zeros(tokens, np.int32)
                attention.plan(_one_key_each(tokens), zeros, expand_rows=expand_rows)
                for launches in kinds:
                    attention.bind(inputs, launches)
                    mixer = self._decode_mixer(tokens)
                    hidden = decoder.forward(inputs.token_ids, None, mixer, self._gate)
            if self._recurrence is not None:  # recurrent layers have other kernels for prompts
                trash = self._recurrence.states.num_states
                prompts = [self._recurrence.one_prompt(tokens, trash, self._device)]
                if self._recurrence.states.rows:
                    prompts.append(self._recurrence.prompt_with_rows(tokens, self._device))
                for prompt in prompts:
                    mixer = self._hybrid(prompt, prompt.max_tokens)
                    hidden = decoder.forward(inputs.token_ids, None, mixer, self._gate)
            rows = min(tokens, len(self._logits))
            argmax(decoder.logits(hidden[:rows], self._logits[:rows]))
        forget_constants()
        for rows in all_sizes(max_tokens):
            decoder.touch(rows)
            if rows <= len(self._logits):
                decoder.logits(hidden_rows[:rows], self._logits[:rows])
        self._graphs = StepGraphs(
            graph_sizes,
            attention.kinds_of_steps,
            self._pieces,
            decoder.spec.page_layers,
        )
        if self._recurrence is not None and not attention.expands:
            self._prompt_graphs = StepGraphs(
                prompt_sizes(graph_sizes),
                attention.kinds_of_steps[:1],
                self._prompt_pieces,
                decoder.spec.page_layers,
                beside=self._graphs,
            )
        if self.states is not None and self.states.rows:
            self._row_graphs = StepGraphs(
                tuple(size for size in graph_sizes if size <= FEW_TOKENS),
                attention.kinds_of_steps[:1],
                partial(self._pieces, has_rows=True),
                decoder.spec.page_layers,
                beside=self._graphs,
            )
        torch.cuda.synchronize(self._device)

    @property
    def decoder(self) -> GpuDecoder:
        return self._decoder

    @property
    def has_graphs(self) -> bool:
        """Whether graphs are captured; True on devices without graphs."""
        return self._graphs is not None or not self._is_cuda

    def drop_graphs(self) -> None:
        """Forget what has the addresses of weights and pages: they are about to have others. Call
        `capture_again` before the next step."""
        self.drain()
        self._graphs = self._row_graphs = self._prompt_graphs = None
        self._before_last.clear()
        self._attention.forget_addresses()

    def capture_again(self) -> None:
        """Capture the graphs that were dropped."""
        self.warm_up(self._graph_sizes)

    def launch(self, step: Step) -> GpuStep:
        """Queue the step; see Runner in core.step."""
        try:
            with torch.inference_mode():
                return self._launch(step)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def drain(self) -> None:
        """See Runner in core.step."""
        if self._is_cuda:
            with suppress(RuntimeError):  # the error of a failed step is raised here again
                torch.cuda.synchronize(self._device)

    def check(self) -> None:
        """Do nothing: a step raises if the device is lost."""

    def close(self) -> None:
        """Wait for running steps; drop graphs and the latest samples. The rest is freed with the
        runner."""
        self.drain()
        self._graphs = self._row_graphs = self._prompt_graphs = None
        self._before_last.clear()
        self._previous = torch.empty(0, dtype=torch.int64, device=self._device)

    def _launch(self, step: Step) -> GpuStep:
        for started in step.started:
            self.sampler.start(started)
        num_rows = len(step.sample_rows)
        gate = self._gate
        if len(step.load_ids):
            assert self._loads is not None, "a step names loads and no copier is attached"
            gate = self._loads.gate(step.load_ids)
        graphs = self._graphs_for(step)
        size = None if graphs is None else graphs.size_for(step)
        expand_rows = EXPAND_ROWS if size is None else NEVER  # graphs expand no pages
        launches = self._attention.plan(step.spans, step.positions, step.window_parts, expand_rows)
        begin = self._mark()  # after planning: the device may be idle while the host plans
        writes = None if self._open_places is None else self._open_places.assign(step)
        num_padded = size or self._padded(step.num_tokens)
        inputs = self._inputs.send(step, self._previous, num_padded, writes)
        hidden, masses = self._forward(step, inputs, size, launches, gate, writes)
        ids, logprobs = self._sample_hidden(hidden, step)
        prompt_logprobs = self._prompt_logprobs(hidden, step)
        self._previous = ids
        host_ids = self._results[self._num_launched % _NUM_RESULTS][:num_rows]
        self._num_launched += 1
        move_words(host_ids[None], ids[None])
        end = self._mark()

        def finish() -> StepResult:
            device_s = None
            if end is not None:
                assert begin is not None
                end.synchronize()
                device_s = begin.elapsed_time(end) * 1e-3
            records: dict[int, TokenLogprobs] = {}
            if logprobs is not None:
                wanted = np.flatnonzero(step.sampling.wants_logprobs).tolist()
                records = dict(zip(wanted, logprobs.resolve(), strict=True))
            return StepResult(
                token_ids=host_ids.numpy().astype(np.int32),
                logprobs=records,
                prompt_logprobs=tuple(r for rows in prompt_logprobs for r in rows.resolve()),
                device_s=device_s,
                page_masses=tuple(mass.numpy() for mass in masses),
            )

        return GpuStep(finish, end)

    def _mark(self) -> "torch.cuda.Event | None":
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _forward(
        self,
        step: Step,
        inputs: GpuInputs,
        size: int | None,
        launches: Launches,
        gate: Gate,
        writes: Writes | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's output, at least for the rows that are needed, and the attention
        masses of pages (step.weighings), which are being copied to the host."""
        decoder = self._decoder
        if size is None:
            self._attention.bind(inputs, launches)
            token_ids, rows = inputs.token_ids, inputs.hidden_rows
            if not step.weighings:
                return decoder.forward(token_ids, rows, self._mixer(step), gate), []
            keys: GpuPages | RoundedKeys
            if isinstance(self._pages, RoundedGpuPages):
                assert writes is not None
                keys = RoundedKeys(self._pages, step, writes.places_of(step), self._device)
                step = keys.step
            else:
                keys = self._pages
            attention = WeighingAttention(
                self._attention, decoder.spec, keys, decoder.sinks, step, self._device
            )
            hidden = decoder.forward(token_ids, rows, attention, gate)
            masses = attention.masses(decoder.ranks)
            return hidden, [to_host(mass[None])[0] for mass in masses]
        graphs = self._graphs_for(step)
        assert graphs is not None
        is_prompts = graphs is self._prompt_graphs
        mixer: Attention
        if is_prompts:
            mixer = self._prompt_mixer = self._mixer(step)
        else:
            mixer = self._decode_mixer(size)
            if self._decode_states is not None:
                self._decode_states.send(step, size)
        for part, tensor in zip(self._pages.parts, self._pages.tensors, strict=True):
            places = inputs.windowed if part.is_windowed else inputs.places
            if places.copies is not None:
                copy_slots(tensor.flatten(0, 1), *places.copies)
        graphs.replay(size, launches, gate)
        if size > FEW_TOKENS or is_prompts:
            self._attention.bind(inputs.without_copies(), launches)  # these are already copied
            normed, last = self._before_last[size, is_prompts], decoder.spec.num_layers - 1
            return decoder.finish(normed, last, size, inputs.hidden_rows, mixer, gate), []
        hidden = decoder.hidden(self._padded(size))
        return hidden if inputs.hidden_rows is None else hidden[inputs.hidden_rows], []

    def _graphs_for(self, step: Step) -> StepGraphs | None:
        if step.states is None:
            return self._graphs
        if step.num_decodes < step.num_tokens:
            return self._prompt_graphs
        return self._graphs if step.states.rows is None else self._row_graphs

    def _mixer(self, step: Step) -> Attention:
        """What runs attention and recurrent layers of a step."""
        if self._recurrence is None:
            return self._attention
        segments = self._recurrence.step_segments(step, self._device)
        return self._hybrid(segments, step.num_tokens)

    def _decode_mixer(self, size: int, *, has_rows: bool = False) -> Attention:
        """Likewise for a step of `size` decodes, whose slots are in fixed buffers; if `has_rows`,
        some of them may have rows."""
        if self._decode_states is None:
            return self._attention
        return self._hybrid(self._decode_states.segments(size, has_rows=has_rows), size)

    def _hybrid(self, segments: Segments, num_tokens: int) -> Attention:
        assert self._recurrence is not None
        spec, room = self._decoder.spec, self._decoder.mixed_rows
        return HybridAttention(spec, self._attention, self._recurrence, segments, num_tokens, room)

    def _pieces(self, size: int, launches: Launches, *, has_rows: bool = False) -> list[Piece]:
        """What graphs of `size` tokens hold: everything from the ids to the last norm. Large
        graphs leave out the last layer: it would compute all rows there, and few are needed."""
        inputs, decoder = self._inputs.views(size), self._decoder
        if self._decode_states is not None:
            self._decode_states.clear(size)
        mixer = self._decode_mixer(size, has_rows=has_rows)
        end = decoder.spec.num_layers - (size > FEW_TOKENS)
        normed: list[Rows] = []  # passed from piece to piece, at a fixed address

        def run(first: int) -> None:
            self._attention.bind(inputs, launches)
            if first == 0:
                normed[:] = [decoder.begin(inputs.token_ids)]
            layers = (first, min(first + LAYERS_AT_ONCE, end))
            normed.append(decoder.run_layers(normed[-1], size, None, layers, mixer, self._gate))
            if size > FEW_TOKENS:
                self._before_last[size, False] = normed[-1]

        ranges = [
            range(first, min(first + LAYERS_AT_ONCE, end))
            for first in range(0, max(end, 1), LAYERS_AT_ONCE)
        ]
        return [Piece(partial(run, layers.start), layers) for layers in ranges]

    def _prompt_pieces(self, size: int, launches: Launches) -> list[Piece]:
        """Likewise for steps with prompts, if the model has recurrent layers: each recurrence is a
        piece of its own, which is launched in each step. The last layer is left out."""
        assert self._recurrence is not None
        inputs, decoder, spec = self._inputs.views(size), self._decoder, self._decoder.spec
        trash = self._recurrence.states.num_states
        segments = self._recurrence.one_prompt(size, trash, self._device)
        mixer = self._prompt_mixer = self._hybrid(segments, size)
        projected: dict[int, Tensor] = {}  # passed from piece to piece, at fixed addresses

        def run(first: int, last: int) -> None:
            """From after the recurrence of layer `first` up to before that of layer `last`."""
            self._attention.bind(inputs, launches)
            normed = decoder.begin(inputs.token_ids) if first < 0 else decoder.complete(first, size)
            normed = decoder.run_layers(normed, size, None, (first + 1, last), mixer, self._gate)
            if last < end:
                projected[last] = decoder.project(last, normed, size)
            else:
                self._before_last[size, True] = normed

        def recur(layer: int) -> None:
            assert self._prompt_mixer is not None
            self._attention.bind(inputs, launches)  # of layers that have both
            mixed, room = (
                self._prompt_mixer.run(layer, projected[layer]),
                decoder.mixed(layer, size),
            )
            if mixed.data_ptr() != room.data_ptr():
                room.copy_(mixed)

        end = spec.num_layers - 1
        ends = [-1, *(i for i in range(end) if spec.state_layers[i] is not None), end]
        pieces: list[Piece] = []
        for first, last in pairwise(ends):
            pieces.append(Piece(partial(run, first, last), range(first + 1, last)))
            if last < end:
                pieces.append(Piece(partial(recur, last), range(last, last + 1), is_captured=False))
        return pieces

    def _sample_hidden(self, hidden: Tensor, step: Step) -> tuple[Tensor, LogprobRows | None]:
        rows, limit = len(step.sample_rows), len(self._logits)
        if rows == 0:
            return torch.empty(0, dtype=torch.int64, device=self._device), None
        if (padded := self._padded(rows)) <= min(limit, len(hidden)):
            logits = self._decoder.logits(hidden[:padded], self._logits[:padded])
            return self._sample(logits[:rows], step)
        if step.sampling.is_greedy:
            parts = [
                argmax(self._decoder.logits(part, self._logits[: len(part)]))
                for part in torch.split(hidden[:rows], limit)
            ]
            return torch.cat(parts), None
        logits = torch.empty((rows, self._logits.shape[1]), dtype=hidden.dtype, device=self._device)
        return self._sample(self._decoder.logits(hidden[:rows], logits), step)

    def _padded(self, rows: int) -> int:
        return min(padded_size(rows), len(self._results[0]))

    def _sample(self, logits: Tensor, step: Step) -> tuple[Tensor, LogprobRows | None]:
        if step.sampling.is_greedy:
            return argmax(logits), None
        wide = logits.float() if logits.dtype != torch.float32 else logits
        wanted = np.flatnonzero(step.sampling.wants_logprobs)
        raw = None
        if len(wanted):
            # copy the logits first: the sampler edits them in place, and logprobs are of the
            # unedited ones
            rows = self._uploads.send(wanted)
            raw = wide[rows]
        ids = self.sampler.sample(wide, step)
        if raw is None:
            return ids, None
        drawn = drawn_logprobs(wide[rows], ids[rows], step.sampling, wanted)
        return ids, start_logprobs(raw, ids[rows], step.sampling.num_logprobs[wanted], drawn)

    def _prompt_logprobs(self, hidden: Tensor, step: Step) -> list[LogprobRows]:
        num_rows = len(step.prompt_logprob_rows)
        if num_rows == 0:
            return []
        _, places = step.hidden_rows()
        arrays = np.stack((places, step.prompt_logprob_targets)).astype(np.int64)
        at, targets = self._uploads.send(arrays)
        records = []
        most = min(_PROMPT_LOGPROB_ROWS, len(self._logits))
        for first in range(0, num_rows, most):
            rows = slice(first, first + most)
            part = hidden[at[rows]]
            logits = self._decoder.logits(part, self._logits[: len(part)]).float()
            records.append(start_logprobs(logits, targets[rows], step.num_prompt_logprobs[rows]))
        return records


def _one_key_each(tokens: int) -> Spans:
    """A step in which every token reads the first slot of page 0."""
    one_each = np.arange(tokens + 1, dtype=np.int32)
    return Spans(
        query_starts=one_each,
        query_rows=one_each[:-1],
        page_starts=one_each,
        page_ids=np.zeros(tokens, np.int32),
        key_tokens=np.ones(tokens, np.int32),
        is_causal=np.zeros(tokens, np.bool_),
        key_positions=np.zeros(tokens, np.int32),
    )
