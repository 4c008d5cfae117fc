"""NaN and infinity: a store that checks refuses them by name, whatever it is made of; others let them pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule

BAD = [float("nan"), float("inf"), -float("inf")]
Work = Callable[[kv.KVStore], Any]


@pytest.fixture(scope="module")
def job() -> Iterator[ThreadedJob]:
    with ThreadedJob(2, 2, bigarray_bound=30) as job:
        yield job


@pytest.fixture(params=["local", "device", "dist_sync", "dist_async"])
def run(request: pytest.FixtureRequest, job: ThreadedJob) -> Callable[[Work], list[Any]]:
    """Calls a function with a new store that checks, on every worker; returns the results."""

    def run(work: Work) -> list[Any]:
        if not request.param.startswith("dist"):
            with kv.create(request.param, check_finite=True) as store:
                return [work(store)]

        def in_session(session: Any) -> Any:
            with DistStore(session, request.param, Rule(request.param.removeprefix("dist_"), finite=True)) as store:
                return work(store)

        return job.run_sessions(in_session)

    return run


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("size", [3, 70], ids=["whole", "cut"])
def test_a_push_that_is_not_finite_is_refused_by_name(run: Callable[[Work], list[Any]], size: int, bad: float) -> None:
    def work(store: kv.KVStore) -> None:
        assert store.check_finite
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(size))
        out = torch.zeros(size)
        store.pushpull("w", torch.ones(size), out)
        store.barrier()
        gradient = torch.ones(size)
        last = store.num_workers - 1
        if store.rank == last:
            gradient[-1] = bad
        expected = rf"push 2 of 'w'{f' by worker {last}' if last else ''} has NaN or infinite"
        if store.rank == last or "async" not in store.type:
            with pytest.raises(kv.NotFinite, match=expected):
                store.push("w", gradient).wait()
        else:
            store.push("w", gradient).wait()
        store.barrier()
        store.pull("w", out)
        assert out.isfinite().all()
        assert out[-1] == -1 * store.num_workers - (store.num_workers - 1) * ("async" in store.type)
        store.barrier()
        store.push("w", torch.zeros(size)).wait()  # it goes on

    run(work)


def test_integers_are_always_finite(run: Callable[[Work], list[Any]]) -> None:
    def work(store: kv.KVStore) -> None:
        if "async" in store.type:
            return
        store.init("n", torch.zeros(3, dtype=torch.int32))
        store.push("n", torch.full((3,), 2**30, dtype=torch.int32)).wait()

    run(work)


def test_double_precision_has_its_own_largest_value(run: Callable[[Work], list[Any]]) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(3, dtype=torch.float64))
        store.push("w", torch.full((3,), 1e300, dtype=torch.float64)).wait()

    run(work)


@pytest.mark.parametrize("name", ["local", "device"])
def test_by_default_nobody_looks(name: str) -> None:
    with kv.create(name) as store:
        assert not store.check_finite
        store.init("w", torch.zeros(1))
        store.push("w", torch.tensor([float("nan")]))
        with pytest.raises(kv.UsageError, match="check_finite='yes' must be True or False"):
            kv.create(name, check_finite="yes")


def test_workers_that_disagree_about_it_are_told(job: ThreadedJob) -> None:
    def work(session: Any) -> Any:
        try:
            DistStore(session, "dist_sync", Rule(finite=session.rank == 0)).close()
        except kv.Mismatch as exc:
            return str(exc)
        return None

    texts = [text for text in job.run_sessions(work) if text]
    assert len(texts) == 1
    assert "finite values only" in texts[0]
