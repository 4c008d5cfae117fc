from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from recorded import Recorded

import workers
from kvstore import Ticket
from workers.embedding.exchange import RowExchange
from workers.embedding.lookups import Sort, as_torch, by_position


def test_one_for_each_store_as_long_as_a_module_lives() -> None:
    store = Recorded()
    module = workers.Embedding(5, 2, store=store, key="t")
    assert RowExchange.of(store) is module.exchange
    assert RowExchange.of(Recorded()) is not module.exchange
    gone = weakref.ref(store)
    del module, store
    gc.collect()
    assert gone() is None


def test_a_step_pushes_what_has_not_been_pushed_in_it() -> None:
    store = Recorded()
    module = workers.Embedding(5, 2, store=store, key="t")
    exchange = module.exchange
    module([1]).sum().backward()
    exchange.step_over()
    assert store.names() == ["pull", "push"]
    exchange.step_over()
    assert store.calls == [("push", {"t": 0}, {})]
    store.calls.clear()
    with module.no_sync():
        module([1]).sum().backward()
    exchange.step_over()
    assert store.calls[1:] == [("push", {"t": 1}, {})]


def test_rows_that_have_been_replaced_are_pulled_again() -> None:
    store = Recorded()
    module = workers.Embedding(5, 2, store=store, key="t")
    for batch in workers.lookahead([torch.tensor([1])], {module: lambda batch: batch}):
        module.load_state_dict({"weight": torch.ones(5, 2)})
        assert module(batch).tolist() == [[1, 1]]


class Pushed(Recorded):
    """Keeps the rows of the last push, as one of so many workers."""

    def __init__(self, members: int) -> None:
        self._members = members
        super().__init__()

    @property
    def num_workers(self) -> int:
        return self._members

    def push(self, key: Any, value: Any, priority: int = 0, *, wait: bool = False) -> Ticket:
        self.rows = value[0].rows
        return super().push(key, value, priority, wait=wait)


@pytest.mark.parametrize(("members", "sort"), [(1, as_torch), (2, by_position)])
def test_gradients_of_an_id_are_summed_in_the_order_that_the_number_of_workers_says(members: int, sort: Sort) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 3, (200,), generator=generator)
    grads = torch.randn((200, 2), generator=generator)
    store = Pushed(members)
    module = workers.Embedding(3, 2, store=store, key="t")
    (module(ids) * grads).sum().backward()
    expected = torch.zeros(3, 2)
    for place in sort([ids])[1]:
        expected[ids[place]] += grads[place]
    assert torch.equal(store.rows, expected)
