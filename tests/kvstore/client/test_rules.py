"""The rules of stores: bounded staleness, quorums, delay compensation, finite values; and options that ask for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_worker import every_worker_of
from threaded import ThreadedJob, shared_job
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.client.store_options import SSP_STALENESS, parse
from kvstore.errors import UnknownName, UsageError
from kvstore.rule import Rule

SIZES = {"small": 3, "large": 3000}  # the second is cut over the servers


def _begin(store: Any, optimizer: bool = True) -> None:
    if optimizer:
        store.set_optimizer("sgd", learning_rate=1.0)
    store.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])


def _step(store: Any) -> list[torch.Tensor]:
    outs = [torch.empty(size) for size in SIZES.values()]
    store.pushpull(list(SIZES), [torch.ones(size) for size in SIZES.values()], out=outs)
    return outs


def test_a_fast_worker_waits_for_a_slow_one_and_counts_its_staleness() -> None:
    steps, bound = 12, 2
    done = [0, 0]

    def work(store: Any) -> dict[int, int]:
        _begin(store)
        store.barrier()
        for step in range(steps):
            if store.rank == 1:
                assert gate.wait(LONG)
            _step(store)
            done[store.rank] = step + 1
            if store.rank == 0 and step == bound - 1:
                gate.set()  # until here it needs nobody
            assert done[0] - done[1] <= bound + 1
        return dict(store.statistics().staleness)

    gate = threading.Event()
    with ThreadedJob(2, 2) as job:
        seen = job.run(work, mode="ssp", rule=Rule("async", staleness=bound))
    for counts in seen:
        assert max(counts) <= bound
        assert sum(counts.values()) >= steps
    assert seen[0][bound] > 0


def test_a_straggler_does_not_hold_up_a_quorum() -> None:
    def work(store: Any) -> tuple[float, int]:
        _begin(store, optimizer=False)
        if store.rank == 2:
            assert gate.wait(LONG)
        for _ in range(5 if store.rank < 2 else 1):
            outs = _step(store)
        if store.rank < 2:
            gate.set()
        assert all(torch.all(out == 3.0) for out in outs)
        return float(outs[0][0]), store.statistics().late

    gate = threading.Event()
    with ThreadedJob(3, 2) as job:
        results = job.run(work, rule=Rule(quorum=2))
    assert results[2][1] > 0, "its first pushes came too late"


def test_a_worker_that_was_late_takes_part_again() -> None:
    def work(store: Any) -> int:
        _begin(store, optimizer=False)
        if store.rank == 1:
            assert gate.wait(LONG)
            outs = _step(store)  # too late for round 1, and told so
            store.barrier()
            store.pushpull("small", torch.full((3,), 7.0), out=outs[0])
            return int(outs[0][0])
        for _ in range(3):
            _step(store)
        gate.set()
        store.barrier()
        out = torch.empty(3)
        while store.pull("small", out=out) and out[0] != 14.0:  # 7 stands for both
            pass
        return 14

    gate = threading.Event()
    with ThreadedJob(2, 2) as job:
        assert job.run(work, rule=Rule(quorum=1)) == [14, 14]


def test_compensation_changes_what_two_workers_do_and_not_what_one_does() -> None:
    def work(store: Any) -> torch.Tensor:
        _begin(store)
        outs = [torch.zeros(3)]
        for _ in range(4):
            store.pull("small", out=outs[0])
            store.push("small", torch.full((3,), 0.5))
        store.barrier()
        store.pull("small", out=outs[0])
        return outs[0]

    with ThreadedJob(1, 1) as job:
        plain = job.run(work, mode="async")[0]
    with ThreadedJob(1, 1) as job:
        assert torch.equal(job.run(work, mode="async", rule=Rule("async", compensation=1.0))[0], plain)


def test_a_quorum_of_more_workers_than_there_are() -> None:
    with ThreadedJob(2, 1) as job, pytest.raises(UsageError, match="quorum=3 is more than the 2 workers of this job"):
        job.run(lambda store: None, rule=Rule(quorum=3))


@pytest.mark.parametrize(
    ("canonical", "options", "rule"),
    [
        ("dist_sync", {}, Rule()),
        ("dist_sync", {"quorum": 3, "late": "keep"}, Rule(quorum=3, late="keep")),
        ("dist_sync", {"quorum": 3, "grace": 2}, Rule(quorum=3, grace=2.0)),
        ("dist_device_sync", {"quorum": 1.0}, Rule(quorum=1)),
        ("dist_async", {"delay_compensation": 0.04}, Rule("async", compensation=0.04)),
        ("dist_async", {"aggregate": "host"}, Rule("async", aggregate="host")),
        ("dist_ssp", {"aggregate": "rounds"}, Rule("async", staleness=3)),
        ("dist_ssp", {}, Rule("async", staleness=3)),
        ("dist_ssp", {"staleness": 0}, Rule("async", staleness=0)),
        ("dist_ssp", {"staleness": np.int64(2)}, Rule("async", staleness=2)),
        ("dist_sync", {"quorum": torch.tensor(3), "check_finite": np.True_}, Rule(quorum=3, finite=True)),
    ],
)
def test_options_make_a_rule(canonical: str, options: dict[str, Any], rule: Rule) -> None:
    assert parse(canonical, canonical, options)[0] == rule


@pytest.mark.parametrize(
    ("canonical", "options", "error", "words"),
    [
        ("dist_sync", {"staleness": 3}, UnknownName, "no option 'staleness'; choose from timeout, bigarray_bound"),
        ("dist_async", {"quorum": 3}, UnknownName, "delay_compensation"),
        ("dist_ssp", {"staleness": -1}, UsageError, "staleness=-1 must be an integer, at least 0"),
        ("dist_ssp", {"staleness": 1.5}, UsageError, "an integer"),
        ("dist_sync", {"quorum": 0}, UsageError, "quorum=0"),
        ("dist_sync", {"grace": 1}, UsageError, "give a quorum, too"),
        ("dist_sync", {"quorum": 1, "grace": -1}, UsageError, "grace=-1 must be at least 0.0"),
        ("dist_sync", {"late": "never"}, UsageError, "late='never' must be one of drop, keep"),
        ("dist_async", {"delay_compensation": -1}, UsageError, "at least 0"),
        ("dist_async", {"aggregate": "rack"}, UsageError, "aggregate='rack' must be one of rounds, host"),
        ("dist_sync", {"aggregate": "host"}, UnknownName, "no option 'aggregate'"),
        ("dist_ssp", {"aggregate": "host", "delay_compensation": 0.1}, UsageError, "sums them before that"),
    ],
)
def test_options_that_make_no_sense(
    canonical: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse(canonical, canonical, options)


def test_the_deadline_and_the_bound_are_the_jobs_unless_they_are_given() -> None:
    assert parse("dist_sync", "dist_sync", {})[1:] == (None, None)
    assert parse("dist_sync", "dist_sync", {"timeout": 2, "bigarray_bound": 1e6})[1:] == (2.0, 1_000_000)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"bigarray_bound": 0}, {"bigarray_bound": 1.5}])
def test_deadlines_and_bounds_have_a_least_value(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=f"{name}=.* must be .*at least"):
        parse("dist_sync", "dist_sync", options)


def test_a_bounded_store_has_a_bound_if_none_is_given() -> None:
    assert parse("dist_ssp", "dist_ssp", {"staleness": None})[0].staleness == SSP_STALENESS
    assert parse("dist_async", "dist_async", {})[0].staleness is None


@pytest.mark.parametrize("canonical", ["dist_sync", "dist_device_sync", "dist_async", "dist_ssp"])
def test_every_store_can_check_that_values_are_finite(canonical: str) -> None:
    assert parse(canonical, canonical, {"check_finite": True})[0].finite


BAD = [float("nan"), float("inf"), -float("inf")]
Work = Callable[[kv.KVStore], Any]


job = shared_job(2, 2, bigarray_bound=30)


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
@every_worker_of("run")
def test_a_push_that_is_not_finite_is_refused_by_name(store: kv.KVStore, size: int, bad: float) -> None:
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


@every_worker_of("run")
def test_integers_are_always_finite(store: kv.KVStore) -> None:
    if "async" in store.type:
        return
    store.init("n", torch.zeros(3, dtype=torch.int32))
    store.push("n", torch.full((3,), 2**30, dtype=torch.int32)).wait()


@every_worker_of("run")
def test_double_precision_has_its_own_largest_value(store: kv.KVStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", torch.zeros(3, dtype=torch.float64))
    store.push("w", torch.full((3,), 1e300, dtype=torch.float64)).wait()


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
