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
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.core.errors import ConfigError
from mainstem.kernels.dense.head_norms import HeadNorms, joint_norm_, joint_squares
from mainstem.kernels.dense.logits import scale_logits_
from mainstem.kernels.dense.norms import Norm
from mainstem.models.block import Attention, Gate
from mainstem.models.collectives import ALONE, Collectives
from mainstem.models.expert_tensors import ExpertTensors
from mainstem.models.gpu.experts import GpuExperts
from mainstem.models.gpu.joins import InputReader, Joins, make_joins, make_norm
from mainstem.models.gpu.linears import Linear, LinearMaker, Rows
from mainstem.models.gpu.mlp import DenseMlp, ExpertsMlp, GpuMlp
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.recurrent_tensors import RecurrentTensors
from mainstem.models.spec import ExpertsSpec, ModelSpec, QkNorm, Residual
from mainstem.models.tensors import LayerTensors, MlpTensors, Product, TensorReader
from mainstem.models.vocabulary import VocabularyPart
from mainstem.models.weights import WeightSource

JointNorm = Callable[[Tensor], None]  # norms queries and keys of qkv in place


@dataclass(frozen=True, slots=True)
class GpuMixer:
    """The products before and after attention and recurrence."""

    qkv: Linear
    qkv_width: int
    head_norms: HeadNorms | None
    joint_norm: JointNorm | None
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
            for layer, number in zip(layers, spec.page_layers, strict=True)
            if layer.mixer is not None and number is not None
        )
        self.sinks = tuple(sinks)  # of layers with attention: [heads] of each that has them
        self.recurrent = tuple(layer.recurrent for layer in layers if layer.recurrent is not None)
        self._page_layers = spec.page_layers
        self._embedding = embedding
        self._layers = layers
        self._head = head
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
            torch.index_select(self._embedding, 0, token_ids, out=out)
        else:
            self._vocabulary.embed(token_ids, self._embedding, out)
        if self._embedding_scale != 1.0:
            out.mul_(self._embedding_scale)
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
        space = self._space
        x, room = space.residual[:tokens], space.answer[:tokens]
        last = len(self._layers) - 1
        for index in range(*layers):
            layer = self._layers[index]
            wanted = rows if index == last else None
            if (mixer := layer.mixer) is not None:
                qkv = mixer.qkv(normed, space.qkv_rows(tokens, mixer.qkv_width))
                if mixer.joint_norm is not None:
                    mixer.joint_norm(qkv)
                if (number := self._page_layers[index]) is not None:
                    gate.before(number)
                mixed = attention.run(index, qkv)
            if wanted is not None:
                x, room = x[wanted], room[: len(wanted)]
                if len(wanted) == 0:
                    return x
            if mixer is not None:
                answer = mixer.out(mixed if wanted is None else mixed[wanted], room)
                normed = layer.joins.between(answer, x)
            elif wanted is not None:
                normed = layer.reads.read(x)
            if layer.mlp is not None:
                normed = layer.joins.after(layer.mlp(normed), x)
        return normed

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
            logits = self._head(hidden, out)
        else:
            part = hidden.new_empty(len(hidden), len(self._embedding))
            logits = out.copy_(self._vocabulary.join(self._head(hidden, part)))
        scale_logits_(logits, self.spec.logit_scale, self.spec.logit_softcap)
        return logits

    def touch(self, tokens: int) -> None:
        """Run the products of each kind of layer over this number of rows: the vendor's library
        loads its kernel for a shape at the first call, during which the device would be idle."""
        space = self._space
        x = space.residual[:tokens]
        different = {
            (spec.attention is None, spec.recurrent, spec.mlp): index
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
    pieces, sinks = [], []
    for index in range(spec.num_layers):
        tensors = reader.layer(index)
        pieces.append(compiler.pieces(tensors, index))
        if spec.layers[index].attention is not None:
            sinks.append(tensors.sinks)
    ends = reader.ends(embedding)
    last = InputReader(make_norm(ends.norm, spec), fp8_per=None, room=space.normed)
    following = [piece.reads for piece in pieces[1:]] + [last]
    layers = [
        piece.join(spec, after, ranks) for piece, after in zip(pieces, following, strict=True)
    ]
    head = linears.head(ends.head)
    linears.finish()
    return GpuDecoder(spec, embedding, layers, head, space, sinks, ranks)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A layer before it is joined to the next layer, whose input this layer's last join writes."""

    reads: InputReader  # the input of its first product
    mixer: GpuMixer | None
    recurrent: RecurrentTensors | None
    mlp_reads: InputReader | None
    mlp: GpuMlp | None
    tails: tuple[Norm | None, Norm | None]

    def join(self, spec: ModelSpec, following: InputReader, ranks: Collectives) -> GpuLayer:
        joins = make_joins(spec, self.mlp_reads or following, following, self.tails, ranks)
        return GpuLayer(self.reads, self.mixer, self.recurrent, self.mlp, joins)


@dataclass(frozen=True, slots=True)
class _Compiler:
    spec: ModelSpec
    space: Workspace
    linears: LinearMaker
    is_deterministic: bool
    ranks: Collectives

    def pieces(self, tensors: LayerTensors, index: int) -> _Pieces:
        spec, room = self.spec, self.space.normed
        mixer, mlp = self._mixer(tensors), self._mlp(tensors, index)
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
        )

    def _mixer(self, tensors: LayerTensors) -> GpuMixer | None:
        if tensors.qkv is None or tensors.out is None:
            return None
        head_norms, joint_norm = self._query_norms(tensors)
        return GpuMixer(
            qkv=self.linears.layer(tensors.qkv),
            qkv_width=tensors.qkv.weight.shape[0],
            head_norms=head_norms,
            joint_norm=joint_norm,
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
            experts = GpuExperts(
                found,
                spec,
                space.experts,
                lambda weight, bias: self.linears.layer(Product(weight, bias)),
                is_deterministic=self.is_deterministic,
            )
            if experts.unpacked is not None:
                self.linears.note_experts(experts.unpacked)
            return ExpertsMlp(experts, space)
        assert isinstance(found, MlpTensors)
        return DenseMlp(
            self.linears.layer(found.first), spec, self.linears.layer(found.down), space
        )

    def _query_norms(self, tensors: LayerTensors) -> tuple[HeadNorms | None, JointNorm | None]:
        """Return the norms of single heads, which attention applies, and the norm of all heads
        together, which is applied before attention."""
        if tensors.q_norm is None or tensors.k_norm is None:
            return None, None
        spec, ranks = self.spec, self.ranks
        q_norm, k_norm = Norm(tensors.q_norm, spec.norm.eps), Norm(tensors.k_norm, spec.norm.eps)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm is QkNorm.HEADS:
            return HeadNorms(q_norm, k_norm), None
        if ranks.shard.is_whole:
            return None, lambda qkv: joint_norm_(qkv, q_norm, k_norm, *heads)
        room = torch.empty((len(self.space.qkv), 2), device=self.space.qkv.device)

        def run(qkv: Tensor) -> None:
            squares = joint_squares(qkv, *heads, ranks.shard.of, room[: len(qkv)])
            joint_norm_(qkv, q_norm, k_norm, *heads, ranks.sum_(squares))

        return None, run
