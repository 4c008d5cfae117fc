"""Sparse gradients, as of ``nn.Embedding(sparse=True)``: as rows that a store sums, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvstore import KVStore, RowSparse
from kvstore.spec import Key
from kvstore.ticket import Ticket


class RoundRows(NamedTuple):
    """What one push brings back when ``ticket`` is done: of each parameter the rows that any worker has pushed.

    Not the rows that this worker has pushed: then weights, or sums, would differ between workers.
    """

    ticket: Ticket
    positions: Sequence[int]
    rows: Sequence[RowSparse]


def push_rows(
    store: KVStore, positions: Sequence[int], keys: Sequence[Key], values: Sequence[Any], like: Sequence[torch.Tensor]
) -> RoundRows:
    """Push rows of the parameters at ``positions``, which are shaped as ``like``; return at once."""
    rows = [RowSparse.zeros(tensor.shape, tensor.dtype) for tensor in like]
    ticket = store.pushpull(list(keys), list(values), rows, wait=False, row_ids=["round"] * len(rows))
    return RoundRows(ticket, list(positions), rows)


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None and tensor.grad.layout == torch.sparse_coo


def as_rows(grad: torch.Tensor) -> RowSparse:
    """Return a gradient as rows; all of them, if it is dense."""
    if grad.layout == torch.strided:
        return RowSparse(torch.arange(len(grad), dtype=torch.int64, device="cpu"), grad.detach(), tuple(grad.shape))
    return RowSparse.of(grad)


def as_gradient(rows: RowSparse, like: torch.Tensor) -> torch.Tensor:
    """Return rows with rising ids as a sparse gradient of ``like``."""
    ids = rows.ids.to(like.device)[None]
    values = rows.rows.to(like.device)
    return torch.sparse_coo_tensor(
        ids, values, like.shape, dtype=values.dtype, device=values.device, check_invariants=False, is_coalesced=True
    )


def no_rows(like: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of ``like`` that is all zeros."""
    return as_gradient(RowSparse.zeros(like.shape, like.dtype), like)


def table_key(key: Key) -> Key:
    """Return the key of a parameter's table, beside that of the parameter; keys of a store are of one kind."""
    return f"{key}/rows" if isinstance(key, str) else -1 - key
