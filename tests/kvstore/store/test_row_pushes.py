"""Pushes to tables, in every store: which rows they change, and how sums are made; MXNet's nightly tests, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_store import all_of, mine, settle
from row_stores import (
    ASYNC,
    LOCAL,
    ONES,
    ROWS,
    SYNC,
    WIDTH,
    begin,
    each_of,
    every,
    everywhere,
    firsts,
    grads,
    in_rounds,
    updating,
)
from store_kinds import Kind, Run

import kvstore as kv

HALVES = [torch.float16, torch.bfloat16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


@every
def test_only_rows_that_a_worker_has_pushed_change(store: kv.KVStore) -> None:
    begin(store)
    settle(store, store.push("t", grads([9, store.rank], mine(store))))
    expected = [1 - float(row + 1) if row < store.num_workers else 1.0 for row in range(ROWS - 1)]
    assert firsts(store) == [*expected, 1.0 - all_of(store)]


@updating
def test_without_an_optimizer_rows_become_the_sum(store: kv.KVStore) -> None:
    store.init("t", ONES)
    for factor in (1, 10):
        store.push("t", grads([2, 4 + store.rank], factor * mine(store)))
        after = firsts(store)
        assert after[2] == factor * all_of(store)
        assert after[4 : 4 + store.num_workers] == [factor * (rank + 1) for rank in range(store.num_workers)]
        assert [*after[:2], *after[8:]] == [1] * 4


@every
def test_all_rows(store: kv.KVStore) -> None:
    begin(store)
    settle(store, store.push("t", grads(torch.arange(ROWS).flip(0), mine(store))))
    assert firsts(store) == [1.0 - all_of(store)] * ROWS


@every
def test_no_rows_are_a_push_too(store: kv.KVStore) -> None:
    begin(store)
    nothing = kv.RowSparse.zeros((ROWS, WIDTH))
    settle(store, store.push("t", nothing))  # of all workers
    assert firsts(store) == [1.0] * ROWS
    store.barrier()
    settle(store, store.push("t", grads([3]) if store.rank == 0 else nothing))
    assert firsts(store) == [0.0 if row == 3 else 1.0 for row in range(ROWS)]
    pushes = 2 if "async" not in store.type and "ssp" not in store.type else 2 * store.num_workers
    assert store.table_statistics("t")["version"] % pushes == 0  # of all stripes


@every
def test_rows_of_one_id_are_summed(store: kv.KVStore) -> None:
    begin(store)
    value = kv.RowSparse([5, 0, 5, 5], torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None].expand(4, WIDTH))
    settle(store, store.push("t", value))
    assert firsts(store, [0, 5]) == [1.0 - 2 * store.num_workers, 1.0 - 13 * store.num_workers]


@updating
def test_rows_of_one_id_are_summed_in_the_order_of_their_positions(store: kv.KVStore) -> None:
    store.init("t", kv.Table(shape=(4, 1)))
    parts = [1e8, 1.0, -1e8, 3.0]
    store.push("t", kv.RowSparse([2, 2, 2, 2], np.array(parts, np.float32)[:, None]))
    expected = np.float32(0)
    for part in parts:
        expected += np.float32(part)
    assert store.row_sparse_pull("t", row_ids=[2]).item() == expected * store.num_workers


@every
def test_values_of_several_devices_are_summed(store: kv.KVStore) -> None:
    begin(store)
    coo = kv.RowSparse([3, 3, 8], torch.full((3, WIDTH), 2.0), (ROWS, WIDTH)).to_sparse_coo()
    settle(store, store.push("t", [grads([8, 1]), coo, coo.coalesce()]))
    assert firsts(store, [1, 3, 8]) == [1.0 - store.num_workers * part for part in (1, 8, 5)]


@every
def test_the_callers_gradient_stays_as_it_is_and_is_the_callers_again_at_once(store: kv.KVStore) -> None:
    begin(store, lr=0.5, rescale_grad=2.0)
    value = grads([1, 6])
    ticket = store.push("t", value)
    assert value.rows.eq(1).all()
    assert value.ids.tolist() == [1, 6]
    value.rows.fill_(99)
    value.ids.fill_(0)
    settle(store, ticket)
    assert firsts(store, [0, 1, 6]) == [1.0, 1.0 - store.num_workers, 1.0 - store.num_workers]


@everywhere
def test_tables_and_arrays_in_one_list(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(["t", "w", "u", "v"], [ONES, torch.zeros(2), kv.Table(dim=2), torch.zeros(5, 5)])
    values = [grads([7]), torch.ones(2), grads([2**40], 1.0, 2), torch.ones(5, 5)]
    settle(store, store.push(["t", "w", "u", "v"], values))
    settle(store, store.push(["w", "t"], [torch.ones(2), grads([7])]))
    out, whole = torch.empty(2), torch.empty(5, 5)
    store.pull(["w", "v"], [out, whole])
    done = store.num_workers
    assert (out.tolist(), whole.unique().tolist()) == ([-2 * done] * 2, [-done])
    assert firsts(store, [6, 7]) == [1.0, 1.0 - 2 * done]
    assert firsts(store, [2**40, 1], "u") == [-done, 0]


@every
def test_a_key_listed_twice_has_both_values(store: kv.KVStore) -> None:
    begin(store)
    settle(store, store.push(["t", "t"], [grads([1]), grads([1, 2])]))
    assert firsts(store, [1, 2]) == [1.0 - 2 * store.num_workers, 1.0 - store.num_workers]


@every
def test_ids_near_the_end_of_a_large_table_and_beyond_32_bits(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    last = 3_000_000 - 1
    store.init(["fixed", "grows"], [kv.Table(shape=(last + 1, 2)), kv.Table(dim=2)])
    large = [2**40 + 1, 2**62, 2**63 - 1, 0, -1, -(2**63)]
    settle(store, store.push(["fixed", "grows"], [grads([last, 0], 1.0, 2), grads(large, 1.0, 2)]))
    assert firsts(store, [0, last - 1, last], "fixed") == [-store.num_workers, 0, -store.num_workers]
    assert firsts(store, [*large, 1], "grows") == [-store.num_workers] * len(large) + [0]


@every
def test_rows_of_several_dimensions_and_of_float64(store: kv.KVStore) -> None:
    begin(store, kv.Table(shape=(6, 2, 2), dtype="float64"))
    value = kv.RowSparse([4], torch.arange(4.0, dtype=torch.float64).view(1, 2, 2))
    settle(store, store.push("t", value, priority=-3))
    rows = store.row_sparse_pull("t", row_ids=[[4], [0]], priority=2)
    assert (rows.dtype, rows.shape) == (torch.float64, (2, 1, 2, 2))
    assert torch.equal(rows[0, 0], -store.num_workers * value.rows[0])


@every
def test_rows_that_a_table_begins_with(store: kv.KVStore) -> None:
    first = kv.RowSparse([4, 1, 4], torch.full((3, WIDTH), 2.0 + store.rank), (ROWS, WIDTH))
    store.init(["t", "s"], [first, first.to_sparse_coo()])
    for key in ("t", "s"):
        assert firsts(store, key=key) == [0, 2, 0, 0, 4, *[0] * 5]
    store.init("d", kv.Table(shape=(5, 8), init="normal", scale=0.5, seed=3, dtype="float64"))
    begun = store.row_sparse_pull("d", row_ids=torch.arange(5))
    assert 0.3 < float(begun.std()) < 0.7
    assert torch.equal(begun[3:], store.row_sparse_pull("d", row_ids=[3, 4]))


@updating
def test_a_learning_rate_counts_from_the_next_push_on(store: kv.KVStore) -> None:
    begin(store)
    store.push("t", grads([1])).wait()
    store.set_learning_rate(0.25)
    store.push("t", grads([1, 2])).wait()
    store.set_hyperparameters(rescale_grad=2.0)
    store.push("t", grads([2])).wait()
    assert firsts(store, [1, 2]) == [1 - 1.25 * store.num_workers, 1 - 0.75 * store.num_workers]


@pytest.mark.parametrize("lazy", [True, False])
@updating
def test_rows_that_nobody_pushes_decay_without_lazy_update_alone(store: kv.KVStore, lazy: bool) -> None:
    begin(store, lr=0.5, wd=0.5, momentum=0.5, lazy_update=lazy)
    store.init("half", kv.Table(shape=(ROWS, WIDTH), init="constant", dtype="bfloat16"))
    for _ in range(2):
        store.push("t", grads([3], 1.0 / store.num_workers))
        row = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        store.push("half", kv.RowSparse([3], row) if store.rank == 0 else kv.RowSparse([], row[:0]))
    momentum, buffer, weight, still = 0.0, 0.0, 1.0, 1.0
    for _ in range(2):
        momentum = 0.5 * momentum + 1.0 + 0.5 * weight
        weight -= 0.5 * momentum
        buffer = 0.5 * buffer + 0.5 * still
        still -= 0.5 * buffer
    np.testing.assert_allclose(firsts(store, [3, 4]), [weight, 1.0 if lazy else still], rtol=1e-6)
    assert firsts(store, [3, 4], "half") == torch.tensor([weight, 1.0 if lazy else still]).bfloat16().tolist()


@every
def test_a_table_that_grows_has_no_update_of_all_rows(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", lazy_update=False)
    with pytest.raises(kv.UsageError, match="lazy_update"):
        store.init("t", kv.Table(dim=2))
    store.init("t", ONES)


@every
def test_an_optimizer_without_a_rule_for_rows_is_refused(store: kv.KVStore) -> None:
    store.init("t", ONES)
    with pytest.raises(kv.UsageError, match=r"lamb.*(sgd|adam)"):
        store.set_optimizer("lamb")
    begin(store, key="u")
    store.barrier()
    settle(store, store.push("t", grads([0])))
    assert firsts(store, [0]) == [1.0 - store.num_workers]


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [*((codec, torch.float32) for codec in ("fp16", "bf16", "int8")), *(("int8", dtype) for dtype in HALVES)],
    ids=str,
)
@every
def test_rows_in_fewer_bytes(store: kv.KVStore, codec: str, dtype: torch.dtype) -> None:
    begin(store, kv.Table(shape=(ROWS, WIDTH), init="constant", dtype=dtype, codec=codec))
    rows = torch.tensor([[1.0, -0.5, 0.25], [3.0, 2.0, -1.0]], dtype=dtype)
    settle(store, store.push("t", kv.RowSparse([7, 2], rows)))
    found = store.row_sparse_pull("t", row_ids=[7, 2, 0])
    expected = 1 - store.num_workers * torch.cat([rows, torch.zeros(1, WIDTH)])
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


@each_of([SYNC], long=[ASYNC])
def test_compression_of_arrays_leaves_tables_alone(store: kv.KVStore) -> None:
    begin(store)
    store.init("w", torch.zeros(40))
    store.set_gradient_compression({"type": "2bit", "threshold": 8.0})
    settle(store, store.push(["t", "w"], [grads([5], 0.25), torch.full((40,), 0.25)]))
    out = torch.empty(40)
    store.pull("w", out)
    assert out.unique().tolist() == [0]  # kept back
    assert firsts(store, [5]) == [1.0 - 0.25 * store.num_workers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@in_rounds
def test_mxnets_nightly_rounds(store: kv.KVStore, dtype: torch.dtype) -> None:
    """dist_sync_kvstore.py, default_cpu: rows at random, pushed and pulled; those that are not are as they began."""
    shape, rounds = (120, 12), 3
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("t", kv.RowSparse(torch.arange(120), torch.ones(shape, dtype=dtype), shape))
    rng = np.random.default_rng(store.rank)
    common = np.random.default_rng(99)
    total = torch.ones(shape, dtype=dtype)
    for number in range(rounds):
        ids = common.permutation(120)[:36]
        store.push("t", kv.RowSparse(ids, torch.full((36, 12), -float(mine(store)), dtype=dtype), shape))
        total[ids] += all_of(store)
        asked = np.sort(rng.permutation(120)[: 30 * number])  # in the first round none
        out = kv.RowSparse.zeros(shape, dtype)
        store.row_sparse_pull("t", out=out, row_ids=torch.from_numpy(asked))
        expected = torch.zeros(shape, dtype=dtype)
        expected[asked] = total[asked]
        assert torch.equal(out.to_dense(), expected)
    store.push("t", kv.RowSparse.zeros(shape, dtype))  # zeros change nothing
    out = torch.empty(shape, dtype=dtype)
    store.pull("t", out, ignore_sparse=False)
    assert torch.equal(out, total)


@halves
@every
def test_rows_of_half_precision_are_those_of_float32_rounded(run: Run, dtype: torch.dtype) -> None:
    """Whether they are pushed as they are, or summed before they leave, alone, or together with other tables."""
    both = [dtype, torch.float32]

    def work(store: kv.KVStore) -> None:
        generator = torch.Generator().manual_seed(store.rank)
        store.set_optimizer("adam", learning_rate=0.1)
        keys = [["fixed", "other", "grows"], ["fixed32", "other32", "grows32"]]
        for listed, each in zip(keys, both, strict=True):
            fixed = kv.Table(shape=(ROWS, 8), init="constant", scale=0.5, dtype=each)
            store.init(listed, [fixed, fixed, kv.Table(dim=3, dtype=each)])
        for number in range(8):
            if number % 3 == 2:
                ids = torch.randint(ROWS, (6,), generator=generator)  # they may repeat
            else:
                ids = torch.randperm(ROWS, generator=generator)[:4].sort().values
            listed = slice(0, 1 + number % 3)
            widths = [8, 8, 3][listed]
            rows = [torch.randn(len(ids), width, generator=generator).to(dtype) for width in widths]
            calls = [
                (of[listed], [kv.RowSparse(ids, part.to(each)) for part in rows])
                for of, each in zip(keys, both, strict=True)
            ]
            if "async" in store.type or "ssp" in store.type:  # one message, for each push is an update
                calls = [([key for of, _ in calls for key in of], [value for _, each in calls for value in each])]
            outs = []
            for of, values in calls:
                made = [torch.empty_like(value.rows) for value in values]
                store.pushpull(of, values, made, row_ids=[ids] * len(of))
                outs += made
            for narrow, wide in zip(outs[: len(rows)], outs[len(rows) :], strict=True):
                assert narrow.dtype == dtype
                assert torch.equal(narrow, wide.to(dtype))
        store.barrier()
        for key, twin in zip(*keys, strict=True):
            narrow, wide = store.row_sparse_pull([key, twin], row_ids=[torch.arange(ROWS)] * 2)
            assert torch.equal(narrow, wide.to(dtype)), key
        whole = torch.empty(ROWS, 8, dtype=dtype)
        store.pull("fixed", whole, ignore_sparse=False)
        assert torch.equal(whole, store.row_sparse_pull("fixed32", row_ids=torch.arange(ROWS)).to(dtype))
        rows_of = {
            int(each): row for part in store.table_rows("fixed") for each, row in zip(part.ids, part.rows, strict=True)
        }
        assert all(torch.equal(row, whole[each]) for each, row in rows_of.items())

    run(work)


@halves
@updating
def test_a_sum_of_rows_that_half_precision_lacks_is_used_in_float32(store: kv.KVStore, dtype: torch.dtype) -> None:
    table = kv.Table(shape=(ROWS, WIDTH), dtype=dtype)
    store.init("sum", table)
    store.push("sum", kv.RowSparse([4, 2, 4], torch.tensor([[1.0], [3.0], [2**-9]], dtype=dtype).expand(3, WIDTH)))
    assert firsts(store, [2, 4, 0], "sum") == [
        3.0 * store.num_workers,
        torch.tensor(store.num_workers * (1 + 2**-9)).to(dtype).item(),
        0.0,
    ]
    store.set_optimizer("sgd", learning_rate=2.0**-11)
    store.init("t", table)
    for _ in range(2):
        store.push("t", kv.RowSparse([7, 7], torch.full((2, WIDTH), 2.0**15, dtype=dtype)))
    assert firsts(store, [7]) == [-64.0 * store.num_workers]
    for _ in range(4):  # each is lost in a row of bfloat16, but not in its copy in float32
        store.push("t", kv.RowSparse([7], torch.full((1, WIDTH), 2.0**9, dtype=dtype)))
    assert firsts(store, [7]) == [-65.0 * store.num_workers]


@halves
def test_rows_of_half_precision_are_put_saved_and_loaded(jobs: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=2.0**-12, momentum=0.5)
        store.init("t", kv.Table(dim=WIDTH, dtype=dtype))
        for _ in range(3):
            store.push("t", kv.RowSparse([3, -5], torch.ones(2, WIDTH, dtype=dtype)))
        store.put_rows("t", kv.RowSparse([8], torch.full((1, WIDTH), 1.5, dtype=dtype)))
        with pytest.raises(kv.Mismatch, match="but this call has"):
            store.put_rows("t", kv.RowSparse([8], torch.ones(1, WIDTH, dtype=torch.int16)))
        with pytest.raises(kv.Mismatch, match="but this call has"):
            store.push("t", kv.RowSparse([8], torch.ones(1, WIDTH, dtype=torch.int16)))
        for out in (torch.empty(1, WIDTH, dtype=torch.int16), torch.empty(1, WIDTH)):
            with pytest.raises(kv.Mismatch, match="need an out of"):
                store.row_sparse_pull("t", out, row_ids=[8])
        directory = tmp_path / f"{store.type}-{dtype}"
        states = tmp_path / f"{store.type}.states"
        if not store.rank:  # the other worker's copy might be of before the rows were put
            store.save_table("t", directory)
        store.save_optimizer_states(states)
        store.push("t", kv.RowSparse([3, 8], torch.ones(2, WIDTH, dtype=dtype)))
        after = store.row_sparse_pull("t", row_ids=[3, -5, 8, 9])
        store.barrier()
        for with_states in (False, True):
            store.load_table("t", directory)
            if with_states:
                store.load_optimizer_states(states)
            store.push("t", kv.RowSparse([3, 8], torch.ones(2, WIDTH, dtype=dtype)))
            assert torch.equal(store.row_sparse_pull("t", row_ids=[3, -5, 8, 9]), after)
            store.barrier()
        opened = kv.open_table(directory, verify=True)
        assert opened.lookup([8, 9]).tolist() == [[1.5] * WIDTH, [0.0] * WIDTH]
        assert opened.lookup([8]).dtype == dtype

    jobs.run(LOCAL, work)
    jobs.run(SYNC, work)


def test_the_number_of_servers_changes_no_bit(jobs: Any) -> None:
    def work(store: kv.KVStore) -> Any:
        generator = torch.Generator().manual_seed(store.rank)
        store.set_optimizer("adam", learning_rate=0.1)
        tables = [kv.Table(shape=(50, 4), init="normal"), kv.Table(dim=4, init="uniform", admit=kv.MinCount(2))]
        store.init(["t", "u"], tables)
        for _ in range(6):
            ids = torch.randint(50, (2, 20), generator=generator)
            rows = torch.randn(2, 20, 4, generator=generator)
            store.push(["t", "u"], [kv.RowSparse(*each) for each in zip(ids, rows, strict=True)])
        return store.row_sparse_pull(["t", "u"], row_ids=[torch.arange(50)] * 2)

    results = [jobs.run(Kind("dist_sync", 2, servers), work) for servers in (1, 2, 4)]
    first = results[0][0]
    for result in results:
        for tensors in result:
            assert all(torch.equal(*each) for each in zip(tensors, first, strict=True))


@pytest.mark.parametrize("optimizer", ["adagrad", "ftrl", None])
def test_devices_of_one_process_are_as_workers_of_a_job(jobs: Any, optimizer: str | None) -> None:
    tables = [kv.Table(shape=(30, 4), init="normal"), kv.Table(dim=4, init="uniform", admit=kv.MinCount(2))]

    def begun(store: kv.KVStore) -> None:
        if optimizer is not None:
            store.set_optimizer(optimizer, learning_rate=0.1)
        store.init(["t", "u"], tables)

    def values(number: int, rank: int) -> list[kv.RowSparse]:
        generator = torch.Generator().manual_seed(100 * number + rank)
        ids = torch.randint(30, (2, number * 3), generator=generator)
        return [kv.RowSparse(each, torch.randn(len(each), 4, generator=generator)) for each in ids]

    def rows(store: kv.KVStore) -> list[torch.Tensor]:
        return store.row_sparse_pull(["t", "u"], row_ids=[torch.arange(30)] * 2)

    def alone(store: kv.KVStore) -> Any:
        begun(store)
        for number in range(5):
            by_rank = [values(number, rank) for rank in range(3)]
            store.push(["t", "u"], [list(devices) for devices in zip(*by_rank, strict=True)])
        return rows(store)

    def together(store: kv.KVStore) -> Any:
        begun(store)
        for number in range(5):
            store.push(["t", "u"], values(number, store.rank))
        return rows(store)

    (expected,) = jobs.run(LOCAL, alone)
    for result in jobs.run(SYNC, together):
        assert all(torch.equal(*each) for each in zip(result, expected, strict=True))
