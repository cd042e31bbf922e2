"""The decoder on a GPU: a recipe compiled into fused kernels over buffers that stay.

    per layer   QKV product | rope + append, span attention | out product | add + norm |
                MLP: product, activation, product | add + norm of the next layer

A GPU pays per pass over memory, and per address that changes. Weights keep the checkpoint's order
(rotary pairs are i and i + half), and gains stay in the norms: the norm is a pass over memory that
the gain does not lengthen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.core.config import Quantize
from mainstem.kernels.dense.fused import head_norm_
from mainstem.models.block import Attention, Gate
from mainstem.models.gpu.joins import AddNorm, FirstNorm, Join
from mainstem.models.gpu.linears import Linear, MakeLinear, Rows, choose_linear
from mainstem.models.gpu.mlp import Mlp
from mainstem.models.gpu.workspace import Workspace
from mainstem.models.spec import MlpSpec, ModelSpec
from mainstem.models.tensors import LayerTensors, NormTensors, TensorReader
from mainstem.models.weights import WeightSource

HeadNorm = Callable[[Tensor], None]  # norms queries and keys of qkv in place


@dataclass(frozen=True, slots=True)
class GpuLayer:
    qkv: Linear
    head_norm: HeadNorm | None
    out: Linear
    between: Join  # adds what attention answers; what the MLP reads
    mlp: Mlp
    after: Join  # adds what the MLP answers; what the next layer reads


class GpuDecoder:
    """Weights and the forward pass; a pass allocates nothing but the rows it hands out."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor,
        first_norm: FirstNorm,
        layers: list[GpuLayer],
        head: Linear,
        space: Workspace,
        sinks: Sequence[Tensor | None],
    ) -> None:
        self.spec = spec
        self.dtype = embedding.dtype
        self.sinks = tuple(sinks)  # [heads] of each layer that has them
        self._embedding = embedding
        self._first_norm = first_norm
        self._layers = layers
        self._head = head
        self._space = space

    def forward(
        self, token_ids: Tensor, rows: Tensor | None, attention: Attention, gate: Gate
    ) -> Tensor:
        """As Decoder.forward on a CPU; the answer lies in the workspace until the next pass."""
        normed = self.begin(token_ids)
        end = len(self._layers)
        normed = self.run_layers(normed, len(token_ids), rows, (0, end), attention, gate)
        assert isinstance(normed, Tensor)
        return normed

    def begin(self, token_ids: Tensor) -> Rows:
        """What the first layer takes; the residual lies in the workspace from here on."""
        out = self._space.residual[: len(token_ids)]
        torch.index_select(self._embedding, 0, token_ids, out=out)
        return self._first_norm(out)

    def run_layers(
        self,
        normed: Rows,
        tokens: int,
        rows: Tensor | None,
        layers: tuple[int, int],
        attention: Attention,
        gate: Gate,
    ) -> Rows:
        """Layers [first, end): from what the first takes to what the one behind them does."""
        space = self._space
        x = space.residual[:tokens]
        last = len(self._layers) - 1
        for index in range(*layers):
            layer = self._layers[index]
            qkv = layer.qkv(normed, space.qkv[:tokens])
            if layer.head_norm is not None:
                layer.head_norm(qkv)
            gate.before(index)
            mixed = attention.run(index, qkv)
            if index == last and rows is not None:
                mixed, x, tokens = mixed[rows], x[rows], len(rows)
                if tokens == 0:
                    return x
            delta = layer.out(mixed, space.delta[:tokens])
            delta = layer.mlp(layer.between(delta, x))
            normed = layer.after(delta, x)
        return normed

    def hidden(self, tokens: int) -> Tensor:
        """Where the last layer has left its rows, all of them in order."""
        return self._space.normed[:tokens]

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[rows, vocab] in the model's dtype, into `out`."""
        return self._head(hidden, out)

    def touch(self, tokens: int) -> None:
        """Run a layer's products over this number of rows: the vendor's library loads the kernel it
        chooses for a shape when it is first asked for, and the device stands still meanwhile."""
        space, layer = self._space, self._layers[0]
        x = space.residual[:tokens]
        layer.qkv(self._first_norm(x), space.qkv[:tokens])
        delta = layer.out(space.mixed[:tokens], space.delta[:tokens])
        layer.mlp(layer.between(delta, x))


def load_gpu_decoder(
    source: WeightSource,
    spec: ModelSpec,
    space: Workspace,
    *,
    quantize: Quantize,
    is_deterministic: bool,
) -> GpuDecoder:
    """Take the weights of `source`, which puts them on the device."""
    make, make_head = choose_linear(quantize, is_deterministic)
    reader = TensorReader(source, spec)
    embedding = reader.embedding()
    layers, sinks, norms = [], [], []
    for index in range(spec.num_layers):
        tensors = reader.layer(index)
        norms.append(tensors.attention_norm)
        sinks.append(tensors.sinks)
        layers.append(_Pieces.make(tensors, spec, index, make, space))
    ends = reader.ends(embedding)
    # a norm stands before each layer's attention and after the last layer
    norms.append(ends.norm)
    is_fp8 = [pieces.qkv.is_fp8 for pieces in layers] + [False]
    return GpuDecoder(
        spec,
        embedding,
        FirstNorm(norms[0], spec, space, is_fp8[0]),
        [
            pieces.joined(spec, space, norms[i + 1], is_fp8[i + 1])
            for i, pieces in enumerate(layers)
        ],
        make_head(ends.head),
        space,
        sinks,
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A layer before it knows what its successor reads."""

    qkv: Linear
    head_norm: HeadNorm | None
    out: Linear
    mlp_norm: NormTensors | None
    after_attention_norm: NormTensors | None
    mlp: Mlp
    after_mlp_norm: NormTensors | None

    @classmethod
    def make(
        cls,
        tensors: LayerTensors,
        spec: ModelSpec,
        index: int,
        make: MakeLinear,
        space: Workspace,
    ) -> "_Pieces":
        mlp = spec.layers[index].mlp
        assert isinstance(mlp, MlpSpec)
        return cls(
            qkv=make(tensors.qkv),
            head_norm=_head_norm(tensors, spec),
            out=make(tensors.out),
            mlp_norm=tensors.mlp_norm,
            after_attention_norm=tensors.after_attention_norm,
            mlp=Mlp(make(tensors.mlp.first), mlp, make(tensors.mlp.down), space),
            after_mlp_norm=tensors.after_mlp_norm,
        )

    def joined(
        self, spec: ModelSpec, space: Workspace, next_norm: NormTensors | None, is_fp8: bool
    ) -> GpuLayer:
        return GpuLayer(
            qkv=self.qkv,
            head_norm=self.head_norm,
            out=self.out,
            between=AddNorm(self.mlp_norm, spec, space, self.mlp.is_fp8),
            mlp=self.mlp,
            after=AddNorm(next_norm, spec, space, is_fp8),
        )


def _head_norm(tensors: LayerTensors, spec: ModelSpec) -> HeadNorm | None:
    q_gain, k_gain = tensors.q_norm, tensors.k_norm
    if q_gain is None or k_gain is None:
        return None
    heads, kv_heads, dim, eps = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.norm.eps

    def run(qkv: Tensor) -> None:
        head_norm_(qkv, q_gain, k_gain, eps, heads, kv_heads, dim)

    return run
