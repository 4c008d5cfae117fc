from __future__ import annotations

import gc
import weakref

import torch
from recorded import Recorded

import workers
from workers.embedding.exchange import RowExchange


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
