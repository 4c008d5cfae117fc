"""Modules whose rows a store has: embedding tables that no worker holds whole.

modules      ``Embedding`` and ``EmbeddingBag``, in the place of torch's; whole tables for ``state_dict``
prefetching  ``lookahead``: asks for the next batch's rows while this one is trained
exchange     what the modules of one store push and pull together; the gradients of a step, until they are pushed
lookups      which rows a batch needs, in which order gradients of one id are summed, and rows that were asked for
"""

from workers.embedding.modules import Embedding, EmbeddingBag
from workers.embedding.prefetching import lookahead

__all__ = ["Embedding", "EmbeddingBag", "lookahead"]
