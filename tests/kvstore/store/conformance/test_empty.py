"""Arrays that ``KVStore.empty`` makes, on every store, and stored values that are a caller's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from every_store import ALL, ASSIGNING, Kind, Run

import kvstore as kv
from kvstore.values import as_dtype


@pytest.mark.parametrize("run", ASSIGNING, indirect=True, ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float16, "int32", np.float64])
def test_arrays_from_the_store_are_like_any(run: Run, dtype: Any) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@pytest.mark.parametrize("run", ALL, indirect=True, ids=str)
def test_arrays_may_become_the_value(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@pytest.mark.parametrize("run", [Kind("local"), Kind("dist_sync", 1, 1)], indirect=True, ids=str)
def test_a_dtype_that_cannot_be_stored_is_no_dtype_of_an_array(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        for wrong in (torch.complex64, "complex64", "nonsense", object()):
            with pytest.raises(kv.UsageError, match="cannot be stored"):
                store.empty((2,), wrong)

    run(work)
