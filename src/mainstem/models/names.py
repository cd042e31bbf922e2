"""Names of the tensors in a family's checkpoints; the defaults are Llama's.

Names of linear layers and norms have no ".weight" or ".bias" at the end. Inside a layer they
follow the layer's prefix.
"""

from dataclasses import dataclass
from enum import Enum


class QkvOrder(Enum):
    """Rows of a fused query, key and value product."""

    PARTS = "parts"  # all query heads, all key heads, all value heads
    GROUPS = "groups"  # for each KV head: its query heads, its key, its value (Falcon 40B)


class RecurrentOrder(Enum):
    """Rows of the product before a recurrence, in the checkpoint."""

    PARTS = "parts"  # as recurrence.py has them: convolution, gate, numbers of the heads
    GATE_FIRST = "gate first"  # gate, convolution, numbers of the heads (Mamba)
    # for each key head: query, key, values, gates; then, for each key head, b and a (Qwen3-Next)
    KEY_HEADS = "key heads"


class ExpertLayout(Enum):
    """The layout of a layer's experts in the checkpoint."""

    SEPARATE = "separate"  # each expert has its own tensors for gate, up and down, [out, in]
    STACKED = "stacked"  # two tensors [experts, out, in]; gate, then up (Granite)
    INTERLEAVED = "interleaved"  # two tensors [experts, in, out]; gate and up alternate (gpt-oss)


@dataclass(frozen=True, slots=True)
class Names:
    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    # norms of a layer; only those that the family has are read
    attention_norm: str = "input_layernorm"  # before attention
    mlp_norm: str = "post_attention_layernorm"  # before the MLP
    after_attention_norm: str = "post_attention_layernorm"
    after_mlp_norm: str = "post_feedforward_layernorm"
    # attention
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_order: QkvOrder = QkvOrder.PARTS
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    # recurrence: the tensors of its first product, one on top of the other
    recurrent: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    recurrent_order: RecurrentOrder = RecurrentOrder.PARTS
    conv: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    skip: str = "linear_attn.D"
    recurrent_norm: str = "linear_attn.norm"
    recurrent_out: str = "linear_attn.out_proj"
    # MLP. One name in `gate_up` is a tensor with both parts, or with `up` if there is no gate.
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    # experts
    router: str = "mlp.gate"
    expert_layout: ExpertLayout = ExpertLayout.SEPARATE
    expert_gate: str = "mlp.experts.{}.gate_proj"  # STACKED, INTERLEAVED: both, all experts
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    # SEPARATE: some files hold the same experts stacked, under these names
    stacked_experts: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    shared_gate_up: tuple[str, ...] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    )
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    # if shared MLP, experts and router have norms of their own (the norm before the shared MLP is
    # `mlp_norm`); the gain of the router's norm has no ".weight" at its end
    expert_norm: str = "pre_feedforward_layernorm_2"
    after_shared_norm: str = "post_feedforward_layernorm_1"
    after_expert_norm: str = "post_feedforward_layernorm_2"
    router_gain: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    # the end of a layer: its own input (LayerInputSpec), and its scale
    layer_input_embedding: str = "model.embed_tokens_per_layer"
    layer_input_product: str = "model.per_layer_model_projection"
    layer_input_norm: str = "model.per_layer_projection_norm"
    layer_input_gate: str = "per_layer_input_gate"
    layer_input_out: str = "per_layer_projection"
    after_layer_input_norm: str = "post_per_layer_input_norm"
    layer_scale: str = "layer_scalar"
    # endings and beginnings of the names of tensors that are not needed: they follow from the
    # config (old Llama checkpoints hold the rotary frequencies), or belong to parts that are left
    # out
    ignored_endings: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ignored_beginnings: tuple[str, ...] = ()
    # prefixes of names in some checkpoints, and what they are replaced with
    renamed_beginnings: tuple[tuple[str, str], ...] = ()

    def is_ignored(self, found: str) -> bool:
        """Whether the tensor with this name is not needed."""
        return found.endswith(self.ignored_endings) or found.startswith(self.ignored_beginnings)

    def canonical(self, found: str) -> str:
        """The name that families use for a tensor of the checkpoint. A decoder saved without its
        head has names without the first part: "norm.weight" for "model.norm.weight"."""
        for beginning, meant in self.renamed_beginnings:
            if found.startswith(beginning):
                return meant + found.removeprefix(beginning)
        for usual in (self.embedding, self.layer, self.final_norm):
            first, part = usual.split(".")[:2]
            if found.startswith(f"{part}."):
                return f"{first}.{found}"
        return found
