"""Modules whose rows a store has: embedding tables that no worker holds whole."""

from workers.embedding.modules import Embedding, EmbeddingBag
from workers.embedding.prefetching import lookahead

__all__ = ["Embedding", "EmbeddingBag", "lookahead"]
