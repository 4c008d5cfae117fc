"""Lists of arrays of all kinds: thousands at once or one by one, a store gives the same bits and the same errors."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import lent, parameter, plain, read_only, strided, strided_tensor, swapped, tensor
from placed import entries_for
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.client.calls import distinct, new_arrays
from kvstore.errors import AlreadyInitialized, KVStoreError, Mismatch, UsageError
from kvstore.spec import Spec
from kvstore.values import as_tensor, tensors_of
from kvstore.values.lists import FEW

SHAPES = [(2,), (3, 2), (), (0, 4), (5,), (130,)]
DTYPES = ["float32", "float32", "float32", "float64", "int64"]
COUNTS = [1, FEW + 4]  # more than FEW are moved at once


@pytest.fixture(params=["memory", "sockets"], scope="module")
def job(request: pytest.FixtureRequest) -> Iterator[ThreadedJob]:
    with tempfile.TemporaryDirectory() as name:
        where = Path(name) if request.param == "sockets" else None
        with ThreadedJob(2, 2, bigarray_bound=100, piece_bytes=256, directory=where) as made:
            yield made


Make = Callable[[np.ndarray[Any, Any]], Any]
OUTS: list[list[Make]] = [
    [tensor],
    [plain],
    [tensor, parameter],
    [plain, tensor],
    [plain, strided],
    [lent],
    [plain, tensor, lent, parameter, strided, strided_tensor],
]
VALUES = [*OUTS, [plain, read_only, swapped], [plain, tensor, parameter, strided, strided_tensor, read_only]]
# Each way to pass values with the same way to receive them, and with another.
PAIRS = [(ways, OUTS[(at + more) % len(OUTS)]) for at, ways in enumerate(VALUES) for more in (0, 1)]


def one_by_one(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """An array, and another that adds nothing: lists for several devices are not on the fast path."""
    return [array, np.full_like(array, -0.0)]


def made(dice: random.Random, ways: Sequence[Make], arrays: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    return [dice.choice(ways)(array) for array in arrays]


def bits(arrays: Sequence[Any]) -> list[bytes]:
    return [as_tensor(array).contiguous().numpy().tobytes() for array in arrays]


def numbers(dice: np.random.Generator, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(100 * dice.standard_normal(like.shape)).astype(like.dtype)


@pytest.mark.parametrize("optimizer", [None, "sgd"])
@pytest.mark.parametrize("count", COUNTS)
def test_lists_of_all_kinds_give_the_same_bits(job: ThreadedJob, count: int, optimizer: str | None) -> None:
    dice = random.Random(count)
    dtypes = [dtype for dtype in DTYPES if optimizer is None or dtype != "int64"]
    first = [np.ones(dice.choice(SHAPES), dice.choice(dtypes)) for _ in range(count)]
    one, other = [list(range(start, start + count)) for start in (0, count)]

    def work(store: DistStore) -> None:
        own = random.Random(7)  # what a worker passes is nobody else's matter
        its = np.random.default_rng(store.rank)
        if optimizer is not None:
            store.set_optimizer(optimizer, learning_rate=0.1, momentum=0.9)
        store.init(one, made(own, own.choice(VALUES), first))
        store.init(other, list(map(one_by_one, first)))
        for ways, kinds in PAIRS:
            arrays = [numbers(its, array) for array in first]
            given, outs = made(own, ways, arrays), made(own, kinds, first)
            expected = [array.copy() for array in first]
            store.pushpull(one, given, out=outs, wait=own.random() < 0.5).wait()
            outs_of_other = [[out, out.copy()] for out in expected]
            store.pushpull(other, list(map(one_by_one, arrays)), out=outs_of_other)
            assert bits(given) == bits(arrays)
            assert bits(outs) == bits(expected)
            outs = made(own, kinds, first)
            store.pull(one, outs)
            assert bits(outs) == bits(expected)
        for kinds in OUTS:
            arrays = [numbers(its, array) for array in first]
            inplace, expected = made(own, kinds, arrays), [array.copy() for array in arrays]
            store.pushpull(one, inplace)
            store.pushpull(other, list(map(one_by_one, expected)))
            assert bits(inplace) == bits(expected)

    job.run(work)


def replaced(arrays: Sequence[Any], place: int, array: Any) -> list[Any]:
    return [*arrays[:place], array, *arrays[place + 1 :]]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", [plain, tensor], ids=["numpy", "torch"])
def test_what_is_wrong_is_the_same_error_and_nothing_is_pushed(job: ThreadedJob, make: Make, count: int) -> None:
    place = count // 2
    arrays = [np.full(2, float(number), np.float32) for number in range(count)]
    known = rf"key {place} is float32\[2\], but this call has"
    wrong = {
        "shape": (make(np.zeros(3, np.float32)), Mismatch, rf"{known} float32\[3\]"),
        "dtype": (make(np.zeros(2)), Mismatch, rf"{known} float64\[2\]"),
        "kind": ("an array", UsageError, "str"),
        "devices": ([], UsageError, rf"the list of values for key {place} is empty"),
    }
    unwritable = {
        "read-only": (read_only(arrays[place]), UsageError, "read-only"),
        "swapped": (arrays[place].astype(">f4"), UsageError, "foreign byte order"),
        "expanded": (torch.zeros(1).expand(2), UsageError, "share memory"),
    }

    def work(store: DistStore) -> None:
        keys = list(range(count))
        good = [make(array) for array in arrays]
        store.init(keys, good)
        for bad, error, text in wrong.values():
            for call in (
                lambda bad=bad: store.push(keys, replaced(good, place, bad)),
                lambda bad=bad: store.pushpull(keys, good, out=replaced(good, place, bad)),
                lambda bad=bad: store.pull(keys, replaced(good, place, bad)),
            ):
                raises(call, error, text)
        for bad, error, text in unwritable.values():
            raises(lambda bad=bad: store.pull(keys, replaced(good, place, bad)), error, text)
            raises(lambda bad=bad: store.pushpull(keys, good, out=replaced(good, place, bad)), error, text)
        store.pushpull(keys, good)
        assert bits(good) == bits([2 * array for array in arrays]), "it is the first push"

    job.run(work)


def raises(call: Callable[[], Any], error: type[KVStoreError], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("make", [plain, tensor], ids=["numpy", "torch"])
def test_arrays_may_be_the_memory_of_others(job: ThreadedJob, make: Make) -> None:
    """Outputs that are other keys' values, and views of one array."""
    keys = list(range(40))

    def work(store: DistStore) -> None:
        store.init(keys, [make(np.zeros(2, np.float32)) for _ in keys])
        block = make(np.arange(80, dtype=np.float32).reshape(40, 2))
        rows = [block[number] for number in range(40)]
        store.pushpull(keys, rows, out=[*rows[1:], rows[0]])
        expected = 2 * np.arange(80, dtype=np.float32).reshape(40, 2)
        assert np.array_equal(np.asarray(block), np.roll(expected, 1, axis=0))

    job.run(work)


@pytest.mark.parametrize("moved", [torch.zeros(2), torch.zeros(1)], ids=["alike", "smaller"])
def test_an_output_that_gets_other_memory_is_written_there_or_not_at_all(job: ThreadedJob, moved: torch.Tensor) -> None:
    keys = list(range(40))

    def work(store: DistStore) -> None:
        store.init(keys, [torch.zeros(2) for _ in keys])
        outs = [torch.zeros(2) for _ in keys]
        ticket = store.pushpull(keys, [torch.ones(2) for _ in keys], out=outs, wait=False)
        outs[3].data = moved.clone()
        if len(moved) == 2:
            ticket.wait()
            assert bits(outs) == bits([torch.full((2,), 2.0)] * 40)
        else:
            raises(ticket.wait, UsageError, "an array in out has another shape")
            assert outs[3].tolist() == [0]

    job.run(work)


KNOWN = entries_for({"old": Spec((3,), "float32")}, 1, 100)


@pytest.mark.parametrize(
    ("key", "value", "arrays"),
    [("w", 1.0, [[1.0]]), (["w", "v"], [1.0, [2.0, 3.0]], [[1.0], [2.0, 3.0]]), (("w",), [1.0], [1.0])],
)
def test_each_new_key_has_its_arrays(key: Any, value: Any, arrays: list[list[float]]) -> None:
    keys, values, kind = new_arrays(key, value, KNOWN, str)
    assert keys == [*key]
    assert kind is str
    assert values == arrays


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (["w", "old"], AlreadyInitialized, "'old' is already initialized"),
        (["w", "w"], UsageError, "given a key twice"),
        ([3, 4], UsageError, "key"),
    ],
)
def test_keys_that_cannot_be_new(key: list[Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        new_arrays(key, [torch.zeros(3)] * 2, KNOWN, str)


def test_arrays_of_one_spec_share_it_and_are_contiguous() -> None:
    columns = torch.arange(6.0).reshape(2, 3).t()
    numbers, specs, values = distinct([torch.zeros(2), [columns, torch.ones(3, 2)], torch.ones(2)])
    assert numbers == [0, 1, 0]
    assert specs == [Spec((2,), "float32"), Spec((3, 2), "float32")]
    tensors = tensors_of(values)
    assert torch.equal(tensors[1], columns)
    assert all(tensor.is_contiguous() for tensor in tensors)
