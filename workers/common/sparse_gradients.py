"""Sparse gradients, as of ``nn.Embedding(sparse=True)``: as rows that a store sums, and back."""

from __future__ import annotations

import torch

from kvstore import RowSparse
from kvstore.spec import Key


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
