"""The decoder on a GPU: a recipe compiled into fused kernels over fixed buffers.

    per layer   QKV product | norms of heads + rope + append, span attention | out product |
                add + norm | MLP: product, activation, product | add + norm of the next layer

On a GPU every pass over memory costs time, and CUDA graphs need fixed addresses. Weights keep the
checkpoint's order (rotary pairs are i and i + half). Norms apply their gains themselves: the gains
are not multiplied into the next weights, which would save no pass over memory.

With several ranks (models/shard.py), each has some heads and some columns of every MLP, and the
joins (models/gpu/joins.py) sum the outputs over all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.core.errors import ConfigError, UnsupportedModel
from mainstem.kernels.dense.activations import Act
from mainstem.kernels.dense.head_norms import HeadNorms, joint_norm_, joint_squares, norm_heads_
from mainstem.kernels.dense.logits import scale_logits_
from mainstem.kernels.dense.norms import Norm
from mainstem.models.block import Attention, Gate
from mainstem.models.collectives import ALONE, Alone, Collectives, ProcessGroup
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.gpu.experts import GpuExperts
from mainstem.models.gpu.joins import InputReader, Joins, make_joins, make_norm
from mainstem.models.gpu.layer_inputs import GpuLayerEnd, GpuLayerInputBlock, GpuLayerInputs
from mainstem.models.gpu.linears import Linear, LinearMaker, Rows
from mainstem.models.gpu.mlp import BranchNorms, DenseMlp, ExpertsMlp, GpuMlp, NormedExpertsMlp
from mainstem.models.gpu.packed import DenseRoom
from mainstem.models.gpu.workspace import Workspace, only_experts, shared_mlp
from mainstem.models.head_layer_norm import HeadLayerNorm
from mainstem.models.pour import pour, tensors_in
from mainstem.models.recurrent_tensors import RecurrentTensors
from mainstem.models.spec import ExpertsSpec, ModelSpec, QkNorm, Residual
from mainstem.models.tensors import (
    BranchTensors,
    LayerTensors,
    MlpTensors,
    ModelInputTensors,
    NormTensors,
    Product,
    TensorReader,
)
from mainstem.models.vocabulary import VocabularyPart
from mainstem.models.weights import Checkpoint, WeightSource

EarlyNorm = Callable[[Tensor], None]  # norms some heads of qkv in place, before attention


@dataclass(frozen=True, slots=True)
class GpuMixer:
    """The products before and after attention and recurrence."""

    qkv: Linear
    qkv_width: int
    head_norms: HeadNorms | None
    early_norm: EarlyNorm | None
    out: Linear
    out_width: int  # columns of the input of `out`


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """What a layer does not have is None."""

    reads: InputReader  # the input of its first product
    mixer: GpuMixer | None
    recurrent: RecurrentTensors | None
    mlp: GpuMlp | None
    joins: Joins
    end: GpuLayerEnd | None  # after the MLP; then `following` is read
    following: InputReader  # the input of the next layer


class _Views(NamedTuple):
    """The buffers of a pass over some tokens."""

    residual: Tensor
    answer: Tensor
    inputs: Tensor | None  # of the layers


class GpuDecoder:
    """Weights and the forward pass, which works in the buffers of a workspace."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor,
        layers: list[GpuLayer],
        head: Linear,
        space: Workspace,
        sinks: Sequence[Tensor | None],
        ranks: Collectives,
    ) -> None:
        self.spec = spec  # the recipe of the rank's part
        self.ranks = ranks
        self._vocabulary = None if ranks.shard.is_whole else VocabularyPart(spec, ranks)
        self.dtype = embedding.dtype
        # of layers with attention, which applies them
        self.head_norms = tuple(
            layer.mixer.head_norms
            for layer, of in zip(layers, spec.layers, strict=True)
            if layer.mixer is not None and of.attention is not None
        )
        self.sinks = tuple(sinks)  # of layers with attention: [heads] of each that has them
        self.recurrent = tuple(layer.recurrent for layer in layers if layer.recurrent is not None)
        self._page_layers = spec.page_layers
        self.embedding = embedding
        self.inputs: GpuLayerInputs | None = None  # if layers have inputs of their own
        # of layers with attention: gains of rotated queries, [dim]
        self.query_gains: Sequence[Tensor | None] = [None] * len(sinks)
        self.change: DecoderChange | None = None
        self._layers = layers
        self.head = head
        self._space = space
        # the scale is rounded to the same dtype as the numbers it multiplies
        self._embedding_scale = float(torch.tensor(spec.embedding_scale).to(self.dtype))

    def forward(
        self, token_ids: Tensor, rows: Tensor | None, attention: Attention, gate: Gate
    ) -> Tensor:
        """Like Decoder.forward on a CPU; the result stays in the workspace until the next pass."""
        return self.finish(self.begin(token_ids), 0, len(token_ids), rows, attention, gate)

    def begin(self, token_ids: Tensor) -> Rows:
        """Return the input of the first layer, and put the residual into the workspace."""
        out = self._space.residual[: len(token_ids)]
        if self._vocabulary is None:
            torch.index_select(self.embedding, 0, token_ids, out=out)
        else:
            self._vocabulary.embed(token_ids, self.embedding, out)
        if self._embedding_scale != 1.0:
            out.mul_(self._embedding_scale)
        if self.inputs is not None:
            self.inputs.make(token_ids, out, self._space.layer_inputs[: len(token_ids)])
        return self._layers[0].reads.read(out)

    def run_layers(
        self,
        normed: Rows,
        tokens: int,
        rows: Tensor | None,
        layers: tuple[int, int],
        attention: Attention,
        gate: Gate,
    ) -> Rows:
        """Run layers [first, end). `normed` is the input of layer `first`; returns the input of
        layer `end`."""
        space = self._views(tokens)
        last = len(self._layers) - 1
        for index in range(*layers):
            if self._layers[index].mixer is not None:
                qkv = self.project(index, normed, tokens)
                if (number := self._page_layers[index]) is not None:
                    gate.before(number)
                normed = attention.run(index, qkv)
            normed = self._complete(index, normed, space, rows if index == last else None)
        return normed

    def project(self, index: int, normed: Rows, tokens: int) -> Tensor:
        """The output of a layer's first product, which attention and recurrence read."""
        mixer = self._layers[index].mixer
        assert mixer is not None, "a layer without attention and recurrence"
        qkv = mixer.qkv(normed, self._space.qkv_rows(tokens, mixer.qkv_width))
        if mixer.early_norm is not None:
            mixer.early_norm(qkv)
        return qkv

    def complete(self, index: int, tokens: int) -> Rows:
        """Run the rest of a layer whose attention or recurrence is done (`mixed`); returns the
        input of the next layer."""
        return self._complete(index, self.mixed(index, tokens), self._views(tokens), None)

    def mixed(self, index: int, tokens: int) -> Tensor:
        """Where `complete` reads the output of a layer's attention or recurrence."""
        mixer = self._layers[index].mixer
        assert mixer is not None, "a layer without attention and recurrence"
        return self.mixed_rows(tokens, mixer.out_width)

    def mixed_rows(self, tokens: int, width: int) -> Tensor:
        """Room for the output of attention or recurrence."""
        return self._space.mixed_rows(tokens, width)

    def _views(self, tokens: int) -> "_Views":
        space = self._space
        inputs = None if self.inputs is None else space.layer_inputs[:tokens]
        return _Views(space.residual[:tokens], space.answer[:tokens], inputs)

    def _complete(self, index: int, mixed: Rows, space: "_Views", wanted: Tensor | None) -> Rows:
        """Run what follows a layer's attention or recurrence. If it has neither, `mixed` is its
        input. If not all rows are `wanted`, these are computed."""
        layer, (x, room, inputs) = self._layers[index], space
        if wanted is not None:
            x, room = x[wanted], room[: len(wanted)]
            if len(wanted) == 0:
                return x
            inputs = None if inputs is None else inputs[wanted]
        normed = mixed
        if layer.mixer is not None:
            assert isinstance(mixed, Tensor)
            answer = layer.mixer.out(mixed if wanted is None else mixed[wanted], room)
            normed = layer.joins.between(answer, x)
        elif wanted is not None:
            normed = layer.reads.read(x)
        if layer.mlp is not None:
            normed = layer.joins.after(layer.mlp(normed), x)
        if layer.end is not None:
            layer.end(x, None if inputs is None else self._own_input(inputs, index))
            normed = layer.following.read(x)
        return normed

    def _own_input(self, inputs: Tensor, index: int) -> Tensor:
        """One layer's part of the inputs of all layers."""
        size = inputs.shape[1] // len(self._layers)
        return inputs[:, index * size : (index + 1) * size]

    def finish(
        self,
        normed: Rows,
        first: int,
        tokens: int,
        rows: Tensor | None,
        attention: Attention,
        gate: Gate,
    ) -> Tensor:
        """Run the layers from `first` on, and return what `forward` returns."""
        layers = (first, len(self._layers))
        hidden = self.run_layers(normed, tokens, rows, layers, attention, gate)
        assert isinstance(hidden, Tensor)
        return hidden

    def hidden(self, tokens: int) -> Tensor:
        """All rows of the last layer's output, normed, in order."""
        return self._space.normed[:tokens]

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[rows, vocab] in the model's dtype, into `out`."""
        if self._vocabulary is None:
            logits = self.head(hidden, out)
        else:
            part = hidden.new_empty(len(hidden), len(self.embedding))
            logits = out.copy_(self._vocabulary.join(self.head(hidden, part)))
        scale_logits_(logits, self.spec.logit_scale, self.spec.logit_softcap)
        return logits

    def touch(self, tokens: int) -> None:
        """Run the products of each kind of layer over this number of rows: the vendor's library
        loads its kernel for a shape at the first call, during which the device would be idle."""
        space = self._space
        x = space.residual[:tokens]
        different = {
            (spec.attention, spec.recurrent, spec.mlp, spec.kv_layer is None): index
            for index, spec in enumerate(self.spec.layers)
        }
        for layer in (self._layers[index] for index in different.values()):
            normed = layer.reads.read(x)
            if (mixer := layer.mixer) is not None:
                mixer.qkv(normed, space.qkv_rows(tokens, mixer.qkv_width))
                mixed = x.new_zeros(tokens, mixer.out_width)
                normed = layer.joins.between(mixer.out(mixed, space.answer[:tokens]), x)
            if layer.mlp is not None:
                layer.joins.after(layer.mlp(normed), x)
            if layer.end is not None:
                inputs = None if self.inputs is None else space.layer_inputs[:tokens]
                layer.end(x, None if inputs is None else self._own_input(inputs, 0))


def load_gpu_decoder(
    source: WeightSource,
    spec: ModelSpec,
    space: Workspace,
    *,
    quantize: Quantize,
    is_deterministic: bool,
    ranks: Collectives = ALONE,
) -> GpuDecoder:
    """Take the weights, or a rank's part of them, from `source`, which puts them on the device.
    `spec` describes the whole model; `space` is sized for the rank's part."""
    if space.experts is not None and quantize is not Quantize.NONE:
        raise ConfigError(f"quantize={quantize.value}: mixtures of experts are not quantized yet")
    linears = LinearMaker(quantize, is_deterministic, source.dtype, space.normed.device)
    reader = TensorReader(source, spec, ranks.shard)
    spec = reader.part
    compiler = _Compiler(spec, space, linears, is_deterministic, ranks)
    embedding = reader.embedding()
    inputs = compiler.inputs(reader.inputs())
    pieces, sinks, query_gains = [], [], []
    for index in range(spec.num_layers):
        tensors = reader.layer(index)
        pieces.append(compiler.pieces(tensors, index))
        if spec.layers[index].attention is not None:
            sinks.append(tensors.sinks)
            query_gains.append(tensors.query_gain)
    ends = reader.ends(embedding)
    last = InputReader(make_norm(ends.norm, spec), fp8_per=None, room=space.normed)
    following = [piece.reads for piece in pieces[1:]] + [last]
    layers = [
        piece.join(spec, after, ranks) for piece, after in zip(pieces, following, strict=True)
    ]
    head = linears.head(ends.head)
    linears.finish()
    decoder = GpuDecoder(spec, embedding, layers, head, space, sinks, ranks)
    decoder.inputs, decoder.query_gains = inputs, query_gains
    has_own_head = isinstance(ends.head.weight, Tensor) and ends.head.weight is not embedding
    decoder.change = DecoderChange(decoder, compiler, pieces, last, has_own_head)
    return decoder


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A layer before it is joined to the next layer, whose input this layer's last join writes."""

    reads: InputReader  # the input of its first product
    mixer: GpuMixer | None
    recurrent: RecurrentTensors | None
    mlp_reads: InputReader | None
    mlp: GpuMlp | None
    tails: tuple[Norm | None, Norm | None]
    end: GpuLayerEnd | None

    def join(self, spec: ModelSpec, following: InputReader, ranks: Collectives) -> GpuLayer:
        after = following
        if self.end is not None:  # the next layer reads what the end of this one leaves
            after = following._replace(norm=None)
        joins = make_joins(spec, self.mlp_reads or after, after, self.tails, ranks)
        return GpuLayer(
            self.reads, self.mixer, self.recurrent, self.mlp, joins, self.end, following
        )


@dataclass(frozen=True, slots=True)
class DecoderChange:
    """Puts other weights into a decoder, at the same addresses: it makes a layer anew, and copies
    its tensors over the old ones."""

    decoder: GpuDecoder
    compiler: "_Compiler"
    pieces: "list[_Pieces]"
    last: InputReader
    has_own_head: bool

    def plan(
        self, source: Checkpoint, spec: ModelSpec, names: frozenset[str] | None
    ) -> "ChangePlan":
        """Find the parts that the tensors with these names (None: all) are in, and check that the
        `source` has what they need; `spec` describes the whole model. Raises UnsupportedModel."""
        prefixes = [spec.names.layer.format(index) + "." for index in range(spec.num_layers)]
        every = range(spec.num_layers)
        layers, has_ends = list(every), True
        if names is not None:
            layers = [i for i in every if any(name.startswith(prefixes[i]) for name in names)]
            has_ends = any(not name.startswith(tuple(prefixes)) for name in names)
        source.check_given(spec.names)
        source.forget(tuple(prefixes[i] for i in every if i not in layers))
        source.check_lost(None if has_ends else tuple(prefixes[i] for i in layers))
        if has_ends:
            self._check_head(source, spec)
        return ChangePlan(source, spec, layers, has_ends)

    def run(self, plan: "ChangePlan") -> None:
        """Change the parts. If this raises, some are changed and others are not."""
        compiler = replace(self.compiler, linears=self.compiler.linears.again())
        reader = TensorReader(plan.source, plan.spec, compiler.ranks.shard)
        embedding = reader.embedding() if plan.has_ends else None
        inputs = compiler.inputs(reader.inputs()) if plan.has_ends else None
        for index in plan.layers:
            self._change_layer(compiler, reader.layer(index), index)
        if embedding is not None:
            ends = reader.ends(embedding)
            self._pour(self.decoder.embedding, embedding)
            self._pour(self.last.norm, make_norm(ends.norm, compiler.spec))
            self._pour(self.decoder.head, compiler.linears.head(ends.head))
            self._pour(self.decoder.inputs, inputs)

    def _change_layer(self, compiler: "_Compiler", tensors: LayerTensors, index: int) -> None:
        spec = compiler.spec
        self._pour(self.pieces[index], compiler.pieces(tensors, index))
        if spec.layers[index].attention is not None:
            number = sum(layer.attention is not None for layer in spec.layers[:index])
            self._pour(self.decoder.sinks[number], tensors.sinks)
            self._pour(self.decoder.query_gains[number], tensors.query_gain)

    def _check_head(self, source: Checkpoint, spec: ModelSpec) -> None:
        """Refuse to tie a head, or to untie it: the head would need memory, or its users another
        address."""
        is_tied = spec.has_tied_embeddings
        if is_tied and source.has_other(spec.names.head, spec.names.embedding) != self.has_own_head:
            raise UnsupportedModel(
                f"{spec.names.head}.weight and {spec.names.embedding}.weight must "
                f"{'differ' if self.has_own_head else 'be equal'}, as when the model was loaded"
            )

    def tensors(self) -> list[Tensor]:
        """All weights."""
        decoder = self.decoder
        ends = (decoder.embedding, decoder.head, decoder.inputs, self.last.norm)
        parts = (ends, decoder.sinks, decoder.query_gains, self.pieces)
        return tensors_in(parts, SHARED)

    @staticmethod
    def _pour(old: object, new: object) -> None:
        pour(old, new, SHARED)


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What a DecoderChange changes."""

    source: Checkpoint
    spec: ModelSpec
    layers: list[int]
    has_ends: bool  # whether what is not in a layer changes: embedding, head, last norm


# of the whole model: buffers, memory to dequantize in, and what sums over ranks
SHARED: tuple[type, ...] = (Workspace, DenseRoom, Alone, ProcessGroup, ModelSpec, LinearMaker)


@dataclass(frozen=True, slots=True)
class _Compiler:
    spec: ModelSpec
    space: Workspace
    linears: LinearMaker
    is_deterministic: bool
    ranks: Collectives

    def pieces(self, tensors: LayerTensors, index: int) -> _Pieces:
        spec, room = self.spec, self.space.normed
        mixer, mlp = self._mixer(tensors, index), self._mlp(tensors, index)
        norm = make_norm(tensors.attention_norm, spec)
        is_shared = spec.residual is Residual.PARALLEL  # the MLP reads the same norm as attention
        mlp_norm = norm if is_shared else make_norm(tensors.mlp_norm, spec)
        mlp_reads = None if mlp is None else InputReader(mlp_norm, mlp.fp8_per, room)
        reads = mlp_reads if mixer is None else InputReader(norm, mixer.qkv.fp8_per, room)
        assert reads is not None, "a layer has one of them"
        return _Pieces(
            reads=reads,
            mixer=mixer,
            recurrent=tensors.recurrent,
            mlp_reads=mlp_reads,
            mlp=mlp,
            tails=(
                make_norm(tensors.after_attention_norm, spec),
                make_norm(tensors.after_mlp_norm, spec),
            ),
            end=self._end(tensors),
        )

    def inputs(self, tensors: ModelInputTensors | None) -> GpuLayerInputs | None:
        """What makes the layers' own inputs. Its products are never quantized to fp8."""
        if tensors is None:
            return None
        product = self.linears.head(tensors.product)
        return GpuLayerInputs(tensors.embedding, product, self._norm(tensors.norm))

    def _end(self, tensors: LayerTensors) -> GpuLayerEnd | None:
        scale = 1.0 if tensors.scale is None else float(tensors.scale)
        found, block, spec = tensors.layer_input, None, self.spec.layer_inputs
        if found is not None and spec is not None:
            block = GpuLayerInputBlock(
                self.linears.head(found.gate),
                Act(spec.activation.value),
                self.linears.head(found.out),
                self._norm(found.norm),
                (self.space.layer_input, self.space.answer),
            )
        return None if block is None and scale == 1.0 else GpuLayerEnd(scale, block)

    def _mixer(self, tensors: LayerTensors, index: int) -> GpuMixer | None:
        if tensors.qkv is None or tensors.out is None:
            return None
        head_norms, early_norm = self._query_norms(tensors, index)
        return GpuMixer(
            qkv=self.linears.layer(tensors.qkv),
            qkv_width=tensors.qkv.weight.shape[0],
            head_norms=head_norms,
            early_norm=early_norm,
            out=self.linears.layer(tensors.out),
            out_width=tensors.out.weight.shape[1],
        )

    def _mlp(self, tensors: LayerTensors, index: int) -> GpuMlp | None:
        spec, found, space = self.spec.layers[index].mlp, tensors.mlp, self.space
        if spec is None:
            return None
        if isinstance(spec, ExpertsSpec):
            assert isinstance(found, ExpertTensors)
            assert space.experts is not None
            is_apart = tensors.branch_norms is not None
            experts = GpuExperts(
                replace(found, shared_gate_up=None, shared_down=None) if is_apart else found,
                only_experts(spec),
                space.experts,
                lambda weight, bias: self.linears.layer(Product(weight, bias)),
                is_deterministic=self.is_deterministic,
            )
            if experts.unpacked is not None:
                self.linears.note_experts(experts.unpacked)
            if tensors.branch_norms is not None:
                return self._normed_experts(tensors.branch_norms, found, spec, experts)
            return ExpertsMlp(experts, space)
        assert isinstance(found, MlpTensors)
        return DenseMlp(
            self.linears.layer(found.first), spec, self.linears.layer(found.down), space
        )

    def _normed_experts(
        self, norms: BranchTensors, found: ExpertTensors, spec: ExpertsSpec, experts: GpuExperts
    ) -> GpuMlp:
        assert found.shared_gate_up is not None
        assert found.shared_down is not None
        first = self.linears.layer(Product(found.shared_gate_up))
        down = self.linears.layer(Product(found.shared_down))
        mlp = DenseMlp(first, shared_mlp(spec), down, self.space)
        read = InputReader(self._norm(norms.shared), first.fp8_per, self.space.normed)
        made = BranchNorms(
            read,
            self._norm(norms.experts),
            self._norm(norms.router),
            self._norm(norms.after_shared),
            self._norm(norms.after_experts),
        )
        return NormedExpertsMlp(mlp, experts, made, self.space)

    def _norm(self, tensors: NormTensors) -> Norm:
        norm = make_norm(tensors, self.spec)
        assert norm is not None, "only a missing norm is None"
        return norm

    def _query_norms(
        self, tensors: LayerTensors, index: int
    ) -> tuple[HeadNorms | None, EarlyNorm | None]:
        """Return the norms of single heads, which attention applies, and norms that are applied
        before attention: of all heads together, LayerNorms, of values, or of queries without
        keys."""
        if (found := tensors.head_norm) is not None:
            return None, HeadLayerNorm(found.gain, found.bias, self.spec.norm.eps)
        if tensors.q_norm is None:
            return None, None
        spec, ranks = self.spec, self.ranks
        q_norm, eps = Norm(tensors.q_norm, spec.norm.eps), spec.norm.eps
        if tensors.k_norm is None:
            dim = len(tensors.q_norm)
            return None, lambda qkv: norm_heads_(qkv.view(len(qkv), -1, dim), q_norm)
        k_norm = Norm(tensors.k_norm, eps)
        if spec.has_value_norm:
            new = spec.new_kv(spec.layers[index])
            plain = Norm(torch.ones(new.dim, device=tensors.k_norm.device), eps)
            first = spec.num_heads + new.heads

            def norm_values(qkv: Tensor) -> None:
                norm_heads_(qkv.view(len(qkv), -1, new.dim)[:, first:], plain)

            return HeadNorms(q_norm, k_norm), norm_values
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm is not QkNorm.ROWS:
            return HeadNorms(q_norm, k_norm), None
        if ranks.shard.is_whole:
            return None, lambda qkv: joint_norm_(qkv, q_norm, k_norm, *heads)
        room = torch.empty((len(self.space.qkv), 2), device=self.space.qkv.device)

        def run(qkv: Tensor) -> None:
            squares = joint_squares(qkv, *heads, ranks.shard.of, room[: len(qkv)])
            joint_norm_(qkv, q_norm, k_norm, *heads, ranks.sum_(squares))

        return None, run
