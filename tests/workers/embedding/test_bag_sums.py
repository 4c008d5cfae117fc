from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional

from workers.embedding.exchange import watched

ROWS = torch.ones(3, 1, requires_grad=True)
PLACES = torch.tensor([[0, 2], [2, 2], [1, 0]])


@pytest.mark.parametrize("places", [PLACES, PLACES[:, :1], PLACES[:0]])
def test_the_gradient_of_sums_arrives(places: torch.Tensor) -> None:
    arrived: list[torch.Tensor] = []
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    sums = watched(rows, ROWS, arrived.append, places)
    assert torch.equal(sums, functional.embedding_bag(places, rows, mode="sum"))
    factor = torch.arange(4.0 * len(places)).view(len(places), 4)
    (sums * factor).sum().backward(retain_graph=True)
    (sums * 2).sum().backward()
    assert torch.equal(arrived[0], factor)
    assert torch.equal(arrived[1], torch.full_like(factor, 2))
    assert rows.grad is None
    assert ROWS.grad is None


def test_nothing_arrives_where_the_loss_does_not_depend_on_it() -> None:
    arrived: list[torch.Tensor] = []
    weight = torch.ones(1, requires_grad=True)
    sums = watched(ROWS, ROWS, arrived.append, PLACES)
    torch.autograd.grad((sums * weight).sum(), weight)
    weight.sum().backward()
    assert not arrived


def test_what_takes_the_gradient_lives_as_long_as_the_graph() -> None:
    arrived: list[torch.Tensor] = []

    def arrive(grad: torch.Tensor) -> None:
        arrived.append(grad)

    there = weakref.ref(arrive)
    sums = watched(ROWS, ROWS, arrive, PLACES)
    del arrive
    gc.collect()
    assert there() is not None
    del sums
    gc.collect()
    assert there() is None
