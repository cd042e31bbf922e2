"""Embedding and head of a rank that has a part of the vocabulary."""

import torch
from torch import Tensor

from mainstem.models.collectives import Collectives
from mainstem.models.spec import ModelSpec


class VocabularyPart:
    """Rows of tokens [first, first + rows); those past the last token are zeros."""

    def __init__(self, spec: ModelSpec, ranks: Collectives) -> None:
        assert spec.vocab_rows is not None, "the recipe is of a whole model"
        self._ranks = ranks
        self._size = spec.vocab_size
        self._num_rows = spec.vocab_rows
        self._first = ranks.shard.rank * spec.vocab_rows

    def embed(self, token_ids: Tensor, embedding: Tensor, out: Tensor) -> Tensor:
        """Write the embeddings of any tokens, [tokens, hidden], to `out`: each rank looks up its
        own tokens, and the results are summed over ranks. The sum is exact, since all other ranks
        have zeros."""
        at = token_ids - self._first
        is_elsewhere = (at < 0) | (at >= self._num_rows)
        torch.index_select(embedding, 0, at.masked_fill_(is_elsewhere, 0), out=out)
        return self._ranks.sum_(out.masked_fill_(is_elsewhere[:, None], 0.0))

    def join(self, logits: Tensor) -> Tensor:
        """Join each rank's [rows, its part of the vocabulary] to [rows, vocab]."""
        return self._ranks.gather(logits)[:, : self._size]
