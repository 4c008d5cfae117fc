"""Lookups of rows, and what is exchanged for them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import Recorded
from torch.nn import functional

import workers
from kvstore import Ticket, UsageError
from kvstore.table import Table
from workers.embedding.exchange import RowExchange, RowGradients, RowUse, watched
from workers.embedding.lookups import (
    Lookup,
    Sort,
    TableIds,
    as_torch,
    by_position,
    contains,
    fetches_of,
    joined_positions,
    look_up_all,
    sort_for,
)


def look_up(key: Any, table: Table, given: Any, padding: int | None = None) -> Lookup:
    """What ``look_up_all`` returns for one table."""
    (lookup,) = look_up_all([TableIds(key, table, given, padding)])
    return lookup


# ---- lookups


GROWING, FIXED = Table(dim=2), Table(shape=(10, 2))


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@st.composite
def wanted_ids(draw: st.DrawFn) -> TableIds:
    """Ids of a table of either kind: a few of them once or often, or hundreds, as torch sorts these otherwise."""
    dtype = draw(st.sampled_from([torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8]))
    shape = draw(st.sampled_from([(), (0,), (1,), (5,), (3, 2), (2, 0, 3), (4, 1, 2), (300,), (150, 2)]))
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    given = torch.as_tensor(numbers.integers(0, draw(st.integers(1, 10)), shape)).to(dtype)
    if given.dim() > 1 and draw(st.booleans()):
        given = given.transpose(0, 1)  # not contiguous
    table = draw(st.sampled_from([GROWING, FIXED]))
    if table is GROWING and dtype != torch.uint8:
        given = given - 5
    as_given = draw(st.sampled_from([lambda ids: ids, lambda ids: ids.numpy(), lambda ids: ids.tolist()]))
    if not given.numel():
        as_given = torch.Tensor.numpy  # an empty list has no shape
    return TableIds(draw(st.text(max_size=3)), table, as_given(given), draw(st.none() | st.integers(-5, 9)))


@given(st.lists(wanted_ids(), min_size=1, max_size=6))
def test_several_tables_are_looked_up_as_each_alone(wanted: list[TableIds]) -> None:
    together, alone = look_up_all(wanted), [look_up(*each) for each in wanted]
    for one, other in zip(together, alone, strict=True):
        for name in ("given", "ids", "inverse", "padded", "writes"):
            assert equal(getattr(one, name), getattr(other, name)), name
        assert (one.ids.dtype, one.inverse.dtype) == (torch.int64, torch.int64)
    for names in ([*range(len(wanted))], [*reversed(range(len(wanted)))], [0, 0]):
        found, expected = (joined_positions([each[name] for name in names]) for each in (together, alone))
        assert all(map(equal, found, expected))


@given(st.lists(wanted_ids(), min_size=1, max_size=3))
def test_positions_are_sorted_as_torch_sorts_those_of_a_gradient(wanted: list[TableIds]) -> None:
    for lookup in look_up_all(wanted):
        positions = joined_positions([lookup])
        expected, order = torch.sort(torch.as_tensor(lookup.given).reshape(-1).long())
        assert torch.equal(positions.order, order)
        assert positions.starts.tolist() == [
            place for place in range(len(order)) if place == 0 or expected[place] != expected[place - 1]
        ]


def test_positions_that_are_there_already() -> None:
    lookups = look_up_all([TableIds(key, FIXED, [3, 1, 3]) for key in "abc"])
    assert joined_positions(lookups) is lookups[0].positions
    assert lookups[0].positions.order.tolist() == [1, 0, 2, 4, 3, 5, 7, 6, 8]
    assert lookups[0].positions.starts.tolist() == [0, 1, 3, 4, 6, 7]
    some = joined_positions(lookups[1:])
    assert (some.order.tolist(), some.starts.tolist()) == ([1, 0, 2, 4, 3, 5], [0, 1, 3, 4])


def test_a_bad_id_in_one_of_several_tables() -> None:
    def of(*given: Any) -> list[Lookup]:
        return look_up_all([TableIds(key, FIXED, each, 0) for key, each in zip("abc", given, strict=True)])

    with pytest.raises(UsageError, match=r"^id 10 at position 2 is not in table 'b', whose ids are from 0 to 9$"):
        of([1, 2], torch.tensor([[0, 9], [10, 1]], dtype=torch.int32), [3])
    with pytest.raises(UsageError, match=r"^id -1 at position 0 is not in table 'c'"):
        of([1, 2], [], [-1, 11])
    with pytest.raises(UsageError, match=r"^ids of 'b' must be integers, and at position 0 is .*0\.5"):
        of([1, 2], [0.5, 1.0], [-1])


@given(st.lists(st.integers(-5, 5)), st.none() | st.integers(-5, 5))
def test_each_position_finds_its_id(ids: list[int], padding: int | None) -> None:
    found = look_up("t", GROWING, torch.tensor(ids, dtype=torch.int64), padding)
    assert found.ids.tolist() == sorted(set(ids) - {padding})
    assert found.padded == (padding in ids)
    with_padding = [*found.ids.tolist(), padding]
    assert [with_padding[position] for position in found.inverse.tolist()] == ids


def test_the_shape_and_int32_are_kept() -> None:
    found = look_up("t", FIXED, torch.tensor([[3, 1], [3, 9]], dtype=torch.int32))
    assert (found.ids.dtype, found.inverse.tolist()) == (torch.int64, [[1, 0], [1, 2]])


def test_ids_that_are_not_in_the_table() -> None:
    with pytest.raises(UsageError, match=r"id 10 at position 1 is not in table 'item', whose ids are from 0 to 9"):
        look_up("item", FIXED, [[0, 10]])
    with pytest.raises(UsageError, match=r"id -1 at position 2"):
        look_up("item", FIXED, [0, 1, -1])
    with pytest.raises(UsageError, match=r"ids of 'item' must be integers, and at position 0 is .*0\.5"):
        look_up("item", GROWING, torch.tensor([0.5]))


@given(st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)))
def test_contains(ids: set[int], wanted: set[int]) -> None:
    tensors = [torch.tensor(sorted(each), dtype=torch.int64) for each in (ids, wanted)]
    assert contains(*tensors) == (wanted <= ids)


def test_ids_that_are_the_same() -> None:
    given_ids = torch.tensor([[1, 2]])
    found = look_up("t", GROWING, given_ids)
    assert found.matches(given_ids)
    assert found.matches(given_ids.clone())
    assert not found.matches(given_ids[0])
    assert not found.matches(given_ids + 1)
    assert not found.matches(given_ids.int())


def test_ids_that_have_changed() -> None:
    given_ids = torch.tensor([1, 2])
    found = look_up("t", GROWING, given_ids)
    given_ids += 1
    assert not found.matches(given_ids)
    array = np.array([1, 2])
    found = look_up("t", GROWING, array)
    array += 1
    assert not found.matches(torch.from_numpy(array))
    with torch.inference_mode():
        assert look_up("t", GROWING, torch.tensor([3])).matches(torch.tensor([3]))


TABLE = Table(dim=2)


def test_rows_with_one_of_zeros_below_them() -> None:
    lookup = look_up("t", TABLE, [5, 3, 5])
    fetch = fetches_of({"t": TABLE, "other": Table(dim=3)}, {"t": lookup})["t"]
    fetch.ticket = Ticket("pull", ["t"])
    fetch.out.copy_(torch.tensor([[3.0, 3], [5, 5]]))
    assert fetch.take(lookup).tolist() == [[3, 3], [5, 5], [0, 0]]
    part = look_up("t", TABLE, torch.tensor([5]))
    assert fetch.covers(part)
    assert fetch.take(part).tolist() == [[5, 5], [0, 0]]
    assert not fetch.covers(look_up("t", TABLE, [5, 4]))


def test_rows_of_tables_that_are_alike_lie_in_one_tensor() -> None:
    tables = {"a": TABLE, "b": Table(dim=3), "c": TABLE, "d": Table(dim=2, dtype="float64")}
    lookups = {key: look_up(key, tables[key], ids) for key, ids in (("d", [1]), ("a", [4, 2]), ("b", []), ("c", [7]))}
    fetches = fetches_of(tables, lookups)
    assert list(fetches) == list(lookups)
    for key, fetch in fetches.items():
        assert fetch.out.shape == (len(lookups[key].ids), tables[key].width)
        assert str(fetch.out.dtype) == f"torch.{tables[key].dtype}"
        fetch.out.fill_(1)
    assert [fetch.take(fetch.lookup)[-1].sum().item() for fetch in fetches.values()] == [0, 0, 0, 0]
    memory = {key: fetch.out.untyped_storage().data_ptr() for key, fetch in fetches.items()}
    assert memory["a"] == memory["c"] != memory["d"]


LARGE = 2**63 - 1

tables = st.lists(
    st.lists(st.integers(0, 9), max_size=40) | st.lists(st.sampled_from([-3, 0, 7, 2**50, LARGE]), max_size=9),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("sort", [as_torch, by_position])
@given(ids=tables)
def test_each_table_is_sorted_alone(sort: Sort, ids: list[list[int]]) -> None:
    given_ids = [torch.tensor(each, dtype=torch.int64) for each in ids]
    ordered, order = sort(given_ids)
    assert (ordered.dtype, order.dtype) == (torch.int64, torch.int64)
    assert [each.tolist() for each in given_ids] == ids
    for each, values, positions in zip(
        given_ids, ordered.split([*map(len, ids)]), order.split([*map(len, ids)]), strict=True
    ):
        assert values.tolist() == sorted(each.tolist())
        assert torch.equal(each[positions], values)
        expected = torch.sort(each, stable=sort is by_position).indices
        assert torch.equal(positions, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ids_that_leave_just_room_for_a_position(size: int) -> None:
    bits = max(size - 1, 1).bit_length()
    for largest in ((1 << (63 - bits)) - 1, 1 << (63 - bits)):
        ids = torch.tensor([largest] * size)
        ordered, order = by_position([ids])
        assert (ordered.tolist(), order.tolist()) == (ids.tolist(), list(range(size)))


def test_the_order_is_torchs_where_torchs_bits_are_promised() -> None:
    assert sort_for(1) is as_torch
    assert sort_for(2) is by_position
    ids = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(1))  # too many for an insertion sort
    (_, torchs), (_, positions) = as_torch([ids]), by_position([ids])
    assert not torch.equal(torchs, positions)


# ---- exchange


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
