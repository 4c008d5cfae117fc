"""Sums and averages over workers, for what is not trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import Reducer
from workers.common.tensors import fingerprint

RunAll = Callable[[Callable[[Reducer, int], Any]], list[Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=3, servers=2, bigarray_bound=10) as cluster:
        yield cluster


@pytest.fixture
def run(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch) -> RunAll:
    """Calls a function with a reducer and the rank, on every worker."""
    mine = threading.local()
    names = []

    def create(name: str) -> kv.KVStore:
        names.append(name)
        return DistStore(mine.session)

    def run(work: Callable[[Reducer, int], Any]) -> list[Any]:
        def in_session(session: Any) -> Any:
            mine.session = session
            with Reducer("dist_async") as reducer:
                return work(reducer, session.rank)

        results = cluster.run_sessions(in_session)
        assert set(names) == {"dist_sync"}  # whatever the training's store is, sums are synchronous
        return results

    monkeypatch.setattr("workers.reducer.kv.create", create)
    return run


def test_sums_over_workers(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> Any:
        first = reducer.sum({"correct": 10.0 + rank, "seen": 100})
        second = reducer.sum({"correct": 0.5, "seen": 1})
        return first, second, reducer.sum({})

    expected = ({"correct": 33.0, "seen": 300.0}, {"correct": 1.5, "seen": 3.0}, {})
    assert run(work) == [expected] * 3


def test_sums_are_exact_for_large_counts(run: RunAll) -> None:
    assert run(lambda reducer, rank: reducer.sum({"n": 2**50 + rank})["n"]) == [3.0 * 2**50 + 3] * 3


def test_names_may_come_later_and_in_another_order(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> Any:
        reducer.sum({"a": 1})
        numbers = {"b": 2.0, "a": 3.0} if rank == 1 else {"a": 3.0, "b": 2.0}
        return reducer.sum(numbers)

    assert run(work) == [{"a": 9.0, "b": 6.0}] * 3


def test_averages_of_buffers(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        norm = nn.BatchNorm1d(12)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        for round_number in (1, 2):
            norm.running_mean.fill_(float(rank * round_number))
            norm.num_batches_tracked.fill_(rank + 1 + (rank == 2))  # 1, 2, 4
            reducer.average(dict(norm.named_buffers()))
            assert norm.running_mean.tolist() == [round_number] * 12
            assert norm.num_batches_tracked.item() == 2  # 7 / 3, rounded down

    run(work)


def test_averages_of_half_precision_and_nothing(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        half = torch.full((3,), float(rank), dtype=torch.bfloat16)
        reducer.average({"half": half})
        reducer.average({})
        assert half.tolist() == [1, 1, 1]

    run(work)


def test_a_number_and_a_tensor_may_have_one_name(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        assert reducer.sum({"x": 1.0}) == {"x": 3.0}
        value = torch.ones(2)
        reducer.average({"x": value})
        assert value.tolist() == [1, 1]

    run(work)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_alone_a_sum_is_the_number_itself(kind: str) -> None:
    with Reducer(kind) as reducer:
        for value in (3.0, 4.0):
            assert reducer.sum({"n": value}) == {"n": value}
        buffers = {"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(5)}
        reducer.average(buffers)
        assert [value.tolist() for value in buffers.values()] == [[1, 2], 5]


def test_without_an_argument_a_process_outside_of_a_job_is_alone() -> None:
    with Reducer() as reducer:
        assert reducer.sum({"n": 2.0}) == {"n": 2.0}


def test_a_store_stands_for_its_type() -> None:
    with Reducer(kvstore=kv.create("device")) as reducer:
        assert reducer.sum({"n": 2.0}) == {"n": 2.0}


def test_a_store_may_be_used_as_it_is() -> None:
    store = kv.create("local")
    reducer = Reducer.over(store)
    reducer.sum({"n": 2.0})
    assert store.statistics().keys == 1


def test_the_old_name_of_its_argument_warns() -> None:
    with pytest.warns(DeprecationWarning, match="kind= is now kvstore="):
        reducer = Reducer(kind="local")
    assert reducer.sum({"n": 2.0}) == {"n": 2.0}
    reducer.close()


def test_outside_a_job_a_dist_reducer_says_what_to_run() -> None:
    with pytest.raises(kv.ConfigError, match=r"launch\.py"):
        Reducer("dist_async")


def test_an_exception_passes_through_the_block() -> None:
    with pytest.raises(ZeroDivisionError), Reducer("local"):
        _ = 1 / 0


LOW = torch.finfo(torch.float32).min


def test_what_every_worker_has_equal_keeps_its_bits(run: RunAll) -> None:
    def constants() -> dict[str, torch.Tensor]:
        wide = torch.linspace(1, 2, 97) ** -0.7
        return {
            "mask": torch.tensor([0.0, LOW, float("-inf"), float("nan"), -0.0]),
            "frequencies": wide,
            "double": wide.double() / 3,
            "half": wide.half(),
            "complex": torch.polar(wide, wide),
            "count": torch.tensor(7),
        } | odd_tensors(3)

    def work(reducer: Reducer, rank: int) -> None:
        mine = constants()
        reducer.average(mine)
        assert [name for name, tensor in constants().items() if fingerprint(tensor) != fingerprint(mine[name])] == []

    run(work)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_a_mean_of_the_largest_numbers_there_are_is_no_infinity(run: RunAll, dtype: torch.dtype) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        most = torch.finfo(dtype).max
        value = torch.tensor([most, -most, most, 3.0 * rank], dtype=dtype)
        value[2] = most if rank else -most
        reducer.average({"a": value})
        third = torch.tensor(most / 3, dtype=dtype)
        torch.testing.assert_close(value, torch.tensor([most, -most, third, 3.0], dtype=dtype), rtol=1e-2, atol=0)
        assert value[0] == most

    run(work)


def test_integers_of_few_bits_do_not_wrap_around(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        value = torch.tensor([100 + rank, -100], dtype=torch.int8)
        reducer.average({"a": value})
        assert value.tolist() == [101, -100]

    run(work)


def test_buffers_without_a_mean_become_rank_zeros(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        model = nn.BatchNorm1d(2)
        model.register_buffer("low", torch.full((2,), LOW), persistent=False)
        for name, tensor in odd_tensors(rank).items():
            model.register_buffer(name.replace(" ", "_"), tensor)
        model.running_mean.fill_(float(rank))  # type: ignore[union-attr]
        model.num_batches_tracked.fill_(5 - rank)  # type: ignore[union-attr]
        reducer.average_buffers(model)
        assert model.running_mean.tolist() == [1, 1]  # type: ignore[union-attr]
        assert model.num_batches_tracked == 5
        assert model.low.tolist() == [LOW, LOW]  # type: ignore[union-attr]
        found = dict(model.named_buffers())
        for name, tensor in odd_tensors(0).items():
            if name not in ("expanded", "expanded scalar", "channels last"):  # these have a mean
                assert fingerprint(found[name.replace(" ", "_")]) == fingerprint(tensor), name
        assert found["expanded_scalar"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
        assert found["expanded"].stride() == (0, 1)

    run(work)


def test_a_broadcast_of_what_differs(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(rank)
            model.bias.fill_(3)
        model.weight.requires_grad_(False)
        reducer.broadcast(model)
        assert model.weight.tolist() == [[0, 0], [0, 0]]
        assert model.bias.tolist() == [3, 3]

    run(work)


def test_workers_that_average_other_tensors_are_told(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        with pytest.raises(kv.Mismatch, match=r"worker \d averages other tensors"):
            reducer.average({"a": torch.zeros(2 if rank else 3)})

    run(work)
