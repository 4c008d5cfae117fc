"""Modules whose rows a store has: embedding tables that no worker holds whole.

modules      ``Embedding`` and ``EmbeddingBag``, in the place of torch's
prefetching  ``lookahead``: asks for the next batch's rows while this one is trained
exchange     what the modules of one store push and pull together
gradients    the gradients of a step, until they are pushed
fetches      rows that have been asked for
lookups      which rows a batch needs. Pure
id_order     in which order gradients of one id are summed. Pure
whole        whole tables, chunk by chunk, for ``state_dict``
"""

from workers.embedding.modules import Embedding, EmbeddingBag
from workers.embedding.prefetching import lookahead

__all__ = ["Embedding", "EmbeddingBag", "lookahead"]
