"""Some rows of arrays, on every store: what is pushed of them is row-sparse, what is pulled is all of the array."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from every_store import all_of, assigning, each_of, every, mine, pulled, settle
from small_jobs import BOUND
from store_kinds import Kind, Run

import kvstore as kv

pytestmark = pytest.mark.filterwarnings("ignore:.* has momentum .* gradients come late:UserWarning")

ROWS = BOUND // 5  # of 7 elements, so that arrays are cut within rows
SHAPE = (ROWS, 7)
FIRST = torch.arange(ROWS * 7.0).view(SHAPE) / 8
IDS = [0, ROWS // 2, ROWS - 1]


def sparse(factor: float, ids: Sequence[int] = IDS, dtype: torch.dtype = torch.float32) -> kv.RowSparse:
    return kv.RowSparse(ids, torch.full((len(ids), 7), factor, dtype=dtype), SHAPE)


@assigning
def test_without_an_optimizer_the_sum_becomes_the_value(store: kv.KVStore) -> None:
    """As MXNet has it: rows that nobody has pushed are zeros."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        key = str(dtype)
        store.init(key, FIRST.to(dtype))
        settle(store, store.push(key, sparse(mine(store), [*IDS, store.rank], dtype)))
        expected = torch.zeros(SHAPE)
        expected[IDS] = float(all_of(store))
        for rank in range(store.num_workers):
            expected[rank] += rank + 1
        assert torch.equal(torch.from_numpy(pulled(store, key, FIRST.to(dtype))), expected)
        store.barrier()


@every
def test_an_optimizer_updates_what_is_pushed_alone(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=0.5, lr_mult={"w": 2.0})
    store.init(["w", "b"], [FIRST, torch.zeros(3)])
    coo = torch.sparse_coo_tensor([IDS], torch.ones(3, 7) * mine(store), SHAPE, check_invariants=False)
    settle(store, store.push(["w", "b"], [coo, torch.ones(3)]))
    expected = FIRST.clone()
    expected[IDS] -= all_of(store)
    assert torch.equal(torch.from_numpy(pulled(store, "w", SHAPE)), expected)
    assert (pulled(store, "b", (3,)) == -0.5 * store.num_workers).all()
    store.barrier()
    # Nothing, and what several devices have, with rows that come twice.
    settle(store, store.push("w", kv.RowSparse.zeros(SHAPE)))
    settle(store, store.push("w", [sparse(1), sparse(1, [1, 1])]))
    expected[IDS] -= store.num_workers
    expected[1] -= 2 * store.num_workers
    assert torch.equal(torch.from_numpy(pulled(store, "w", SHAPE)), expected)


@every
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_decay_and_state_wait_for_a_row_as_those_of_a_table_do(run: Run, name: str) -> None:
    hyper = {"sgd": {"momentum": 0.9, "wd": 0.25}, "adam": {"wd": 0.25}}[name]

    def work(store: kv.KVStore) -> None:
        store.set_optimizer(name, learning_rate=0.25, **hyper)
        store.init(["w", "t"], [FIRST, kv.RowSparse(range(ROWS), FIRST, SHAPE)])
        for ids in ([0, 5], [5, 9], [0]):
            settle(store, store.push(["w", "t"], [sparse(1, ids), sparse(1, ids)]))
        table = torch.empty(SHAPE)
        store.pull("t", table, ignore_sparse=False)
        assert torch.equal(torch.from_numpy(pulled(store, "w", SHAPE)), table)
        assert torch.equal(table[6], FIRST[6])

    run(work)


@each_of(
    [
        Kind("dist_sync", 2, 2),
        Kind("dist_sync", 2, 2, aggregators=1),
        Kind("dist_sync", 3, 2, quorum=3),
        Kind("dist_ssp", 2, 2),
        Kind("dist_async", 2, 1, aggregators=1),
    ]
)
@pytest.mark.parametrize("wholes", [(), (0,), (0, 1, 2)])
def test_some_workers_may_push_whole_arrays(store: kv.KVStore, wholes: Sequence[int]) -> None:
    """Whole numbers: their sums do not depend on the order."""
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", FIRST)
    for step in range(3):
        value = sparse(mine(store), [step, store.rank + 3, ROWS - 1])
        settle(store, store.push("w", value.to_dense() if store.rank in wholes else value))
    expected = FIRST.clone()
    for rank in range(store.num_workers):
        for step in range(3):
            expected[[step, rank + 3, ROWS - 1]] -= rank + 1
    assert torch.equal(torch.from_numpy(pulled(store, "w", SHAPE)), expected)


@every
def test_pushpull_brings_the_whole_array(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(["w", "b"], [FIRST, torch.zeros(3)])
    outs = [torch.empty(SHAPE), torch.empty(3)]
    store.pushpull(["w", "b"], [sparse(1), torch.ones(3)], outs)
    with pytest.raises(kv.UsageError, match="not RowSparse: the value of an array is all of it"):
        store.pull("w", sparse(1))
    settle(store)
    assert torch.equal(outs[0][1:3], FIRST[1:3])
    assert (outs[0][0] < FIRST[0]).all()
    assert (outs[1] < 0).all()
    with pytest.raises(kv.UsageError, match="key 'w' has an array, whose value is all of it: pass an array"):
        store.pushpull("w", sparse(1))


@every
def test_half_precision_is_updated_in_float32(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=2.0**-12)
    store.init("w", torch.ones(SHAPE, dtype=torch.float16))
    for _ in range(4):  # a step is too small for float16
        settle(store, store.push("w", sparse(1, IDS, torch.float16)))
    steps = torch.full((3, 7), 1 - 4 * store.num_workers * 2.0**-12).half().float()
    assert torch.equal(torch.from_numpy(pulled(store, "w", torch.ones(SHAPE).half()))[IDS], steps)


@every
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (kv.RowSparse([ROWS], torch.ones(1, 7)), kv.UsageError, f"id {ROWS} at position 0 cannot be used: an array of"),
        (kv.RowSparse([-1], torch.ones(1, 7)), kv.UsageError, "id -1 at position 0"),
        (kv.RowSparse([1], torch.ones(1, 6)), kv.Mismatch, "1 rows of float32.*, 6"),
        (kv.RowSparse([1], torch.ones(1, 7).double()), kv.Mismatch, "of float64"),
        (kv.RowSparse([1], torch.full((1, 7), float("nan"))), kv.NotFinite, "row of id 1 at position 0"),
        ([kv.RowSparse([1], torch.ones(1, 7)), torch.ones(SHAPE)], kv.Mismatch, "not Tensor"),
    ],
)
def test_rows_that_an_array_cannot_have_are_an_error_at_the_call(
    store: kv.KVStore, value: Any, error: type, text: str
) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(["w", "b"], [FIRST, torch.zeros(3)])
    with pytest.raises(error, match=text):
        store.push("w", value)
    with pytest.raises(kv.UsageError, match=r"an array without rows, .*: push to_dense\(\)"):
        store.push("b", kv.RowSparse([1], torch.ones(1, 1)))
    with pytest.raises(kv.KeyNotInitialized):
        store.push("x", sparse(1))
    assert torch.equal(torch.from_numpy(pulled(store, "w", SHAPE)), FIRST)


@every
def test_states_of_an_optimizer_are_those_of_the_array(store: kv.KVStore, tmp_path: Path) -> None:
    store.set_optimizer("adam", learning_rate=0.25)
    store.init("w", FIRST)
    settle(store, store.push("w", sparse(1)))
    store.save_optimizer_states(tmp_path / "states")
    once = pulled(store, "w", SHAPE)
    settle(store, store.push("w", sparse(1)))
    twice = pulled(store, "w", SHAPE)
    store.barrier()
    store.load_optimizer_states(tmp_path / "states")
    settle(store, store.push("w", sparse(1)))
    again = pulled(store, "w", SHAPE)
    assert (once[1] == again[1]).all()
    assert (again[IDS] < twice[IDS]).all()


def test_an_updater_of_ones_own_gets_the_rows() -> None:
    store = kv.create("local")
    store.init("w", FIRST)

    def update(key: str, pushed: kv.RowSparse, stored: torch.Tensor) -> None:
        stored[pushed.ids] += pushed.rows

    store.set_updater(update)
    store.push("w", sparse(2))
    expected = FIRST.clone()
    expected[IDS] += 2
    assert torch.equal(torch.from_numpy(pulled(store, "w", SHAPE)), expected)
