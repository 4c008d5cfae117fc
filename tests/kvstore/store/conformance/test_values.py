"""What a push assigns without an optimizer, on every store: sums of values, of every kind and shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_store import all_of, assigning, each_of, everywhere, mine, pulled
from foreign import Foreign
from small_jobs import BOUND
from store_kinds import Kind

import kvstore as kv
from kvstore.spec import ITEMSIZE
from kvstore.ticket import claim
from kvstore.values import as_dtype


@assigning
def test_a_push_that_waits_has_taken_effect_when_it_returns(store: kv.KVStore) -> None:
    store.init("w", torch.zeros(100))
    value = torch.full((100,), float(mine(store)))
    ticket = store.push("w", value, wait=True)
    assert claim(ticket).open == set()
    assert store.statistics().outstanding == 0
    assert (pulled(store, "w", value) == all_of(store)).all()


@assigning
def test_a_push_assigns_the_sum(store: kv.KVStore) -> None:
    store.init("w", torch.full((2, 3), 9.0))
    for factor in (1, 10):
        store.push("w", torch.full((2, 3), float(factor * mine(store))))
        assert (pulled(store, "w", (2, 3)) == factor * all_of(store)).all()


@assigning
def test_the_values_of_several_devices_are_summed(store: kv.KVStore) -> None:
    store.init("w", [torch.zeros(3), torch.zeros(3)])
    store.push("w", [torch.full((3,), float(device * mine(store))) for device in (1, 2, 3, 4)])
    outs = [torch.empty(3) for _ in range(4)]
    store.pull("w", outs)
    assert all((out == 10 * all_of(store)).all() for out in outs)


@assigning
def test_lists_of_keys_and_lists_of_lists(store: kv.KVStore) -> None:
    keys = [5, 7, 11]
    store.init(keys, [torch.zeros(2, 2)] * 3)
    store.push(keys, [torch.full((2, 2), float(key * mine(store))) for key in keys])
    outs: list[Any] = [torch.empty(2, 2) for _ in keys]
    store.pull(keys, outs)
    assert [out[0, 0].item() for out in outs] == [key * all_of(store) for key in keys]
    values = [[torch.full((2, 2), float(key)), torch.ones(2, 2)] for key in keys]
    outs = [[torch.empty(2, 2), torch.empty(2, 2)] for _ in keys]
    store.pushpull(keys, values, outs)
    for key, its in zip(keys, outs, strict=True):
        assert all((out == (key + 1) * store.num_workers).all() for out in its)


@assigning
def test_a_key_listed_twice_has_both_values(store: kv.KVStore) -> None:
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    outs = [torch.empty(2) for _ in range(3)]
    store.pushpull(["a", "b", "a"], [torch.full((2,), float(n)) for n in (1, 2, 4)], outs)
    assert [out[0].item() for out in outs] == [n * store.num_workers for n in (5, 2, 5)]


@pytest.mark.parametrize("keys", [[3, -(2**63), 2**63, 2**64 - 1], ["w", "layer.0/重み"]])
@assigning
def test_int_and_str_keys(store: kv.KVStore, keys: list[Any]) -> None:
    for key in keys:
        store.init(key, np.zeros(2))
        out = np.empty(2)
        store.pushpull(key, np.full(2, mine(store), float), out)
        assert (out == all_of(store)).all(), key


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6.0).reshape(2, 3),
        lambda: torch.arange(6, dtype=torch.float64).view(2, 3),
        lambda: torch.nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3)),
        lambda: Foreign(torch.arange(6, dtype=torch.float64).view(2, 3)),
        lambda: np.arange(6.0).reshape(3, 2, order="F").reshape(2, 3),
        lambda: np.arange(6.0).reshape(3, 2).T.copy().T.T.reshape(2, 3),
        lambda: np.stack([np.arange(6.0)] * 2, axis=1)[:, 0].reshape(2, 3),
        lambda: torch.arange(6, dtype=torch.float64).view(2, 3).t().contiguous().t(),
    ],
)
@assigning
def test_arrays_of_every_kind(store: kv.KVStore, make: Callable[[], Any]) -> None:
    store.init("w", make())
    out = make()
    store.pushpull("w", make(), out)
    tensor = out.tensor if isinstance(out, Foreign) else torch.as_tensor(out).detach()
    expected = torch.as_tensor(
        np.asarray(make().tensor if isinstance(out, Foreign) else torch.as_tensor(make()).detach())
    )
    assert torch.equal(tensor, expected * store.num_workers)


@assigning
def test_values_that_can_only_be_read(store: kv.KVStore) -> None:
    value = np.arange(6.0)[::-1]
    fixed = np.broadcast_to(np.float64(2), (6,))
    store.init("w", value)
    assert pulled(store, "w", torch.empty(6, dtype=torch.float64)).tolist() == [5, 4, 3, 2, 1, 0]
    store.push("w", [value, fixed, np.arange(6, dtype=">f8")])
    assert (pulled(store, "w", torch.empty(6, dtype=torch.float64)) == 7 * store.num_workers).all()


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4", ">i8"])
@assigning
def test_arrays_of_foreign_byte_order_are_values_but_cannot_be_written_to(store: kv.KVStore, dtype: str) -> None:
    value = np.arange(6, dtype=dtype).reshape(2, 3)
    native = value.astype(value.dtype.newbyteorder("="))
    out = np.empty_like(native)
    store.init("w", value)
    store.pull("w", out)
    assert (out == native).all()
    store.push("w", [value, value])
    store.pull("w", out)
    assert (out == 2 * native * store.num_workers).all()
    refused = pytest.raises(kv.UsageError, match=rf"foreign byte order \({dtype}\).* out as an array of {native.dtype}")
    with refused:
        store.pull("w", np.empty_like(value))
    with refused:
        store.pushpull("w", value)  # which would write to it
    with refused:
        store.pushpull("w", native, np.empty_like(value))
    store.pull("w", out)
    assert (out == 2 * native * store.num_workers).all()  # what is refused has not been pushed
    store.pushpull("w", value, out)
    assert (out == native * store.num_workers).all()


SIZES: list[tuple[int, ...]] = [(), (0,), (5,), (BOUND - 1,), (7, 11), (3, BOUND, 2)]


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
@assigning
def test_dtypes_and_shapes(store: kv.KVStore, name: str) -> None:
    for key, shape in enumerate(SIZES):
        value = (torch.arange(int(np.prod(shape))) % 7).to(getattr(torch, name)).view(shape)
        store.init(key, value)
        out = torch.zeros_like(value)
        store.pull(key, out)
        assert torch.equal(out, value), shape
        store.push(key, value * mine(store))
        store.pull(key, out)
        assert torch.equal(out, value * all_of(store)), shape


@assigning
def test_outs_that_are_not_contiguous(store: kv.KVStore) -> None:
    value = torch.arange(2.0 * BOUND).view(2, BOUND)
    small = torch.arange(6.0).view(2, 3)
    store.init(["big", "small"], [value, small])
    outs = [torch.zeros(BOUND, 2).t(), torch.zeros(2, 6)[:, ::2]]
    plain = torch.zeros(2, BOUND)
    store.pull(["big", "small", "big"], [*outs, plain])
    assert torch.equal(outs[0], value)
    assert torch.equal(outs[1], small)
    assert torch.equal(plain, value)


@assigning
def test_pushpull_in_place(store: kv.KVStore) -> None:
    store.init(["a", "b"], [torch.zeros(3), np.zeros(BOUND)])
    one, two, three = torch.ones(3), torch.ones(3), np.full(BOUND, float(mine(store)))
    store.pushpull(["a", "b"], [[one, two], three])
    assert one.tolist() == two.tolist() == [2 * store.num_workers] * 3
    assert (three == all_of(store)).all()


@pytest.mark.parametrize("size", [3, BOUND, 50_000])
@assigning
def test_a_pushed_array_is_the_callers_again_at_once(store: kv.KVStore, size: int) -> None:
    store.init("w", torch.zeros(size))
    grad = torch.ones(size)
    store.push("w", grad)
    grad.fill_(99)
    assert (pulled(store, "w", (size,)) == store.num_workers).all()


@assigning
def test_stored_values_are_nobodys_memory(store: kv.KVStore) -> None:
    first, out = torch.ones(3), torch.empty(3)
    store.init("w", first)
    first.fill_(5)
    store.pull("w", out)
    out.fill_(6)
    assert pulled(store, "w", (3,)).tolist() == [1, 1, 1]
    store.pushpull("w", torch.ones(3), out)
    store.barrier()
    out.fill_(7)
    assert pulled(store, "w", (3,)).tolist() == [store.num_workers] * 3


@assigning
def test_tickets(store: kv.KVStore) -> None:
    store.init("w", torch.zeros(3))
    push = store.push("w", torch.ones(3))
    out, both = torch.empty(3), torch.ones(3)
    pull = store.pull("w", out, wait=False)
    pushpull = store.pushpull("w", both, wait=False)
    for ticket in (pushpull, pull, push):
        ticket.wait()
        assert ticket.done()
    assert out.tolist() == both.tolist() == [store.num_workers] * 3
    assert store.statistics().outstanding == 0


@assigning
def test_many_rounds_in_flight(store: kv.KVStore) -> None:
    store.init("w", torch.zeros(2))
    outs = [torch.empty(2) for _ in range(20)]
    tickets = [
        store.pushpull("w", torch.full((2,), float(n * mine(store))), out, wait=False) for n, out in enumerate(outs)
    ]
    for ticket in tickets:
        ticket.wait()
    assert [out[0].item() for out in outs][-1] == 19 * all_of(store)
    assert pulled(store, "w", (2,)).tolist() == [19 * all_of(store)] * 2


@assigning
def test_half_precision_is_summed_in_float32(store: kv.KVStore) -> None:
    store.init("w", torch.zeros(2, dtype=torch.bfloat16))
    values = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, *[0.5] * 8)]
    store.push("w", values)
    expected = 260.0 * store.num_workers
    assert pulled(store, "w", torch.empty(2, dtype=torch.bfloat16)).tolist() == [expected] * 2


@assigning
@pytest.mark.parametrize("inside", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_calls_may_be_made_in_inference_mode_and_outside_of_it(store: kv.KVStore, inside: tuple[int, ...]) -> None:
    with torch.inference_mode(False):
        keys, outs = ["w", "b"], [torch.empty(BOUND + 7), torch.empty(3)]
    for call in range(3):
        with torch.inference_mode(call in inside):
            values = [torch.full_like(out, float(call + 1)) for out in outs]
            if not call:
                store.init(keys, values)
            store.pushpull(keys, values, out=outs)
            store.push("w", values[0])
            store.pull("w", out=outs[0])
        assert all((out == store.num_workers * (call + 1)).all() for out in outs)


@assigning
def test_a_factor_of_sums_gives_means_that_half_precision_has(store: kv.KVStore) -> None:
    store.init(
        ["w", "h", "n"], [torch.zeros(2), torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.int32)]
    )
    store.set_hyperparameters(rescale_grad=1 / (2 * store.num_workers))
    big = torch.full((2,), 40_000.0)
    store.push(["w", "h", "n"], [[big, big], [big.half(), big.half()], [torch.ones(2, dtype=torch.int32)] * 2])
    for key, dtype in (("w", torch.float32), ("h", torch.float16)):
        assert pulled(store, key, torch.empty(2, dtype=dtype)).tolist() == [40_000] * 2
    assert pulled(store, "n", torch.empty(2, dtype=torch.int32)).tolist() == [2 * store.num_workers] * 2


@assigning
@pytest.mark.parametrize("dtype", [None, torch.float16, "int32", np.float64])
def test_arrays_from_the_store_are_like_any(store: kv.KVStore, dtype: Any) -> None:
    shapes = {"small": (3,), "cut": (7, 11), "number": (), "none": (0, 2)}
    ours = {key: store.empty(shape, dtype) for key, shape in shapes.items()}
    assert {value.dtype for value in ours.values()} == {torch.float32 if dtype is None else as_dtype(dtype)}
    assert {key: tuple(value.shape) for key, value in ours.items()} == shapes
    store.init(list(ours), [torch.zeros_like(value) for value in ours.values()])
    for turn in (1, 2):
        for value in ours.values():
            value.fill_(turn)
        outs = {key: torch.empty_like(value) for key, value in ours.items()}
        store.pushpull(list(ours), list(ours.values()), list(outs.values()))
        assert all((out == turn * store.num_workers).all() for out in outs.values())
    base = store.empty(6, dtype)
    base.copy_(torch.arange(6))
    outs = {key: torch.empty(2, dtype=base.dtype) for key in ("first", "last")}
    store.init(list(outs), [torch.zeros_like(out) for out in outs.values()])
    store.pushpull(list(outs), [base[:2], base[4:]], list(outs.values()))  # what lies between is not sent
    assert outs["first"].tolist() == [0, store.num_workers]
    assert outs["last"].tolist() == [4 * store.num_workers, 5 * store.num_workers]
    one = store.empty(np.int64(5))  # a number is a shape too
    assert tuple(one.shape) == (5,)


@everywhere
def test_arrays_may_become_the_value(store: kv.KVStore) -> None:
    if "async" in store.type:
        store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=-1.0)
    keys, shapes = ["small", "cut"], [(2, 3), (9, 9)]
    outs = [torch.empty(shape) for shape in shapes]
    store.init(keys, [torch.zeros(shape) for shape in shapes])
    store.barrier()
    store.push(keys, [torch.ones(shape) for shape in shapes]).wait()
    store.barrier()
    store.pull(keys, outs, copy=False)
    assert all((out == store.num_workers).all() for out in outs)
    assert [tuple(out.shape) for out in outs] == shapes
    kept = [out.detach() for out in outs]  # over the same memory
    store.barrier()
    store.pushpull(keys, [torch.ones(shape) for shape in shapes], [torch.empty(shape) for shape in shapes])
    store.barrier()
    assert all((value == store.num_workers).all() for value in kept), "it stays as it is when the server goes on"
    store.pull(keys, outs, copy=False)
    now = store.num_workers if "async" not in store.type else 2 * store.num_workers
    assert all((out == now).all() for out in outs)


@each_of([Kind("local"), Kind("dist_sync", 1, 1)])
def test_a_dtype_that_cannot_be_stored_is_no_dtype_of_an_array(store: kv.KVStore) -> None:
    for wrong in (torch.complex64, "complex64", "nonsense", object()):
        with pytest.raises(kv.UsageError, match="cannot be stored"):
            store.empty((2,), wrong)
