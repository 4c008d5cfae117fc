from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from looked_up import look_up
from recorded import Recorded
from torch.nn import functional

import workers
from kvstore import Table, Ticket
from workers.embedding.exchange import RowExchange, RowGradients, RowUse, watched
from workers.embedding.lookups import Sort, TableIds, as_torch, by_position, look_up_all


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


TABLES = {"a": Table(dim=2), "b": Table(dim=3, dtype="float64")}


def use(ids: list[int]) -> RowUse:
    return RowUse("a", look_up("a", TABLES["a"], ids))


def test_what_is_taken_is_each_tables_gradient() -> None:
    gradients = RowGradients()
    assert not gradients
    one = use([7, 3])
    gradients.awaited.add(one)
    gradients.add(one, torch.tensor([[1.0, 1], [2, 2], [9, 9]]))  # the last row is the padding's
    gradients.add(use([3]), torch.sparse_coo_tensor([[0, 0]], [[1.0, 2], [3, 4]], (2, 2), check_invariants=True))
    assert gradients
    assert not gradients.awaited
    a, b = gradients.take(TABLES)
    assert (a.ids.tolist(), a.rows.tolist()) == ([3, 7, 3], [[1, 1], [2, 2], [4, 6]])
    assert (len(b), b.rows.shape, b.rows.dtype) == (0, (0, 3), torch.float64)
    assert not gradients
    assert [len(each) for each in gradients.take(TABLES)] == [0, 0]


@pytest.mark.parametrize("each", [1, 3])
def test_gradients_of_bags_have_the_sums_of_the_sparse_tensors_that_torch_makes(each: int) -> None:
    generator = torch.Generator().manual_seed(each)
    lookup = look_up("a", TABLES["a"], torch.randint(0, 9, (50, each), generator=generator))
    grad = torch.randn(50, 2, generator=generator)
    weight = torch.zeros(len(lookup.ids), 2, requires_grad=True)
    torch.nn.functional.embedding_bag(lookup.inverse, weight, mode="sum", sparse=True).backward(grad)
    gradients, one = RowGradients(), RowUse("a", lookup)
    gradients.awaited.add(one)
    gradients.add_bags(one, grad)
    assert not gradients.awaited
    grad.zero_()  # whose memory others may have
    (taken, _) = gradients.take(TABLES)
    assert torch.equal(taken.ids, lookup.ids)
    assert torch.equal(taken.rows, weight.grad.coalesce().values())  # type: ignore[union-attr]


def test_rows_without_a_gradient_are_left_out() -> None:
    gradients = RowGradients()
    gradients.add(use([5, 6, 7]), torch.sparse_coo_tensor([[2]], [[1.0, 2]], (4, 2), check_invariants=True))
    assert gradients.take(TABLES)[0].ids.tolist() == [7]


def test_a_failed_backward_pass_is_forgotten_and_a_finished_one_is_not() -> None:
    gradients = RowGradients()
    row = torch.ones(2, 2)
    assert gradients.begin(4)
    assert not gradients.begin(4)
    gradients.add(use([1]), row)
    gradients.end()
    gradients.forget_unfinished()
    gradients.begin(5)
    gradients.add(use([2]), row)
    assert gradients.begin(6)
    gradients.add(use([3]), row)
    assert gradients.take(TABLES)[0].ids.tolist() == [1, 3]


def test_a_use_is_awaited_while_its_graph_lives() -> None:
    gradients = RowGradients()
    one = use([1])
    gradients.awaited.add(one)
    assert len(gradients.awaited) == 1
    del one
    assert not gradients.awaited


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64")])
def test_positions_of_several_tables_are_summed_as_torch_does(together: bool, dtypes: tuple[str, str]) -> None:
    """To the bit, with hundreds of positions of one id: torch's own order of these is not the rising one."""
    generator = torch.Generator().manual_seed(0)
    tables = {key: Table(dim=2, dtype=dtype) for key, dtype in zip("abcd", dtypes * 2, strict=True)}
    given = [torch.randint(0, most, (700 if most > 1 else 0,), generator=generator) for most in (5, 40, 3000, 1)]
    wanted = [TableIds(key, table, ids) for (key, table), ids in zip(tables.items(), given, strict=True)]
    gradients = RowGradients()
    expected: list[tuple[RowUse, torch.Tensor]] = []
    lookups = look_up_all(wanted) if together else [look_up(*each) for each in wanted]
    for each, lookup in zip(wanted, lookups, strict=True):
        rows = torch.randn(lookup.inverse.numel(), 2, generator=generator, dtype=getattr(torch, each.table.dtype))
        grad = torch.sparse_coo_tensor(lookup.inverse[None], rows, (len(lookup.ids) + 1, 2), check_invariants=True)
        expected.append((RowUse(each.key, lookup), grad))
    for use, grad in reversed(expected):  # as backward comes to them
        gradients.add(use, grad)
    for taken, (use, grad) in zip(gradients.take(tables), expected, strict=True):
        assert torch.equal(taken.ids, use.lookup.ids)
        assert torch.equal(taken.rows, grad.coalesce().values())


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
