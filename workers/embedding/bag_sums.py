"""Rows, and sums of bags of rows, whose gradient is handed on in backward.

torch makes a sparse tensor of the gradient of a bag's rows, with a row and a row's number for each position. The
look-up knows the numbers already, and making the tensor takes a quarter of the time that bags take, forward and back.
So sums of bags have a function of their own, whose gradient comes as one row for each bag.

The module's ``weight`` is an input that gets no gradient. It makes backward come here, and it shows others that find a
model's parameters in the graph, such as torch's DistributedDataParallel, that this one is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kvstore.dynamo import outside_graphs

Arrive = Callable[[torch.Tensor], None]


def watched(rows: torch.Tensor, weight: torch.Tensor, arrive: Arrive) -> torch.Tensor:
    """Return ``rows``; in each backward pass ``arrive`` is called with their gradient, dense or sparse.

    Args:
        rows: of shape (rows, width).
        weight: requires a gradient, and gets none.
        arrive: takes the gradient. It is called as long as the graph lives, in backward's thread.
    """
    leaf: torch.Tensor = _Watched.apply(weight, rows.detach(), arrive)  # type: ignore[no-untyped-call]
    return leaf


def bag_sums(
    rows: torch.Tensor, places: torch.Tensor, arrive: Arrive, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sums of bags of rows; in each backward pass ``arrive`` is called with their gradient.

    Args:
        rows: of shape (rows, width); they get no gradient.
        places: of shape (bags, ids of each): which rows each bag has.
        arrive: takes a tensor of the shape of the sums; see ``watched``.
        weight: see ``watched``; None for a tensor that nobody knows.
    """
    if weight is None:
        weight = rows.detach().requires_grad_()
    sums: torch.Tensor = _BagSums.apply(weight, rows.detach(), places, arrive)  # type: ignore[no-untyped-call]
    return sums


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _weight: torch.Tensor, rows: torch.Tensor, arrive: Arrive) -> Any:
        ctx.arrive = arrive
        ctx.set_materialize_grads(False)
        return rows.detach()

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is not None:
            ctx.arrive(grad)
        return None, None, None


class _BagSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _weight: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, arrive: Arrive) -> Any:
        ctx.arrive = arrive
        ctx.set_materialize_grads(False)
        return functional.embedding_bag(places, rows, mode="sum")

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is not None:
            ctx.arrive(grad)
        return None, None, None, None
