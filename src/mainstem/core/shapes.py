"""Shapes of well-known models: what speed depends on when the weights are random."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder without biases, embeddings not tied."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    max_positions: int = 131_072

    @property
    def layer_params(self) -> int:
        """Weights of the products in all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama31-8b", 4096, 14336, 32, 32, 8, 128, 128_256, 500_000.0),
        ModelShape("llama32-1b", 2048, 8192, 16, 32, 8, 64, 128_256, 500_000.0),
        ModelShape("llama2-7b", 4096, 11008, 32, 32, 32, 128, 32_000, 10_000.0),
        ModelShape("tiny", 128, 256, 2, 4, 2, 64, 512, 10_000.0, 4096),
    )
}
