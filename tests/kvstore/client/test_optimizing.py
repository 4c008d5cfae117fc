"""A worker's view of the optimizer: who sets it, and what pushes ask for."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from every_worker import every_worker_of
from small_jobs import SOON, value_of
from threaded import ThreadedJob, set_limits
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.client.optimizing import advice
from kvstore.errors import UsageError
from kvstore.optim.optimizer import describe, find
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.table import Table
from workers import Trainer


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rank_zero_may_set_the_optimizer_alone(cluster: ThreadedJob, mode: str) -> None:
    def work(store: DistStore) -> None:
        store.init(["w", "big"], [torch.zeros(3), torch.zeros(25)])
        if store.rank == 0:
            store.set_optimizer("sgd", learning_rate=0.5)
        store.barrier()
        store.push(["w", "big"], [torch.ones(3), torch.ones(25)]).wait()
        store.barrier()
        assert value_of(store, "w", 3).tolist() == [-1] * 3
        assert value_of(store, "big", 25).tolist() == [-1] * 25
        store.barrier()
        if store.rank == 1:
            with pytest.raises(kv.UsageError, match="this worker has set no optimizer"):
                _ = store.learning_rate
            store.set_optimizer("sgd", learning_rate=0.5)
            assert store.learning_rate == 0.5
            store.set_learning_rate(0.25)
        else:
            store.set_learning_rate(0.25)
        store.push("w", torch.ones(3)).wait()
        store.barrier()
        assert value_of(store, "w", 3).tolist() == [-1.5] * 3

    cluster.run(work, mode=mode)


def test_a_worker_that_sets_an_optimizer_alone_learns_whom_it_waits_for(cluster: ThreadedJob) -> None:
    late = threading.Event()

    def zero(store: DistStore) -> None:
        assert late.wait(LONG)
        store.set_optimizer("sgd", learning_rate=0.5)

    def one(store: DistStore) -> None:
        set_limits(store, SOON)
        with pytest.raises(kv.DeadlineExceeded, match="waits for worker 0, which has not called set_optimizer"):
            store.set_optimizer("sgd", learning_rate=0.5)
        late.set()
        set_limits(store, LONG)
        store.set_optimizer("sgd", learning_rate=0.5)

    def work(store: DistStore) -> None:
        (one if store.rank else zero)(store)
        store.set_optimizer("sgd", learning_rate=0.25)
        assert store.learning_rate == 0.25

    cluster.run(work)


@pytest.mark.parametrize(
    ("name", "options"), [("sgd", {"lr": 0.25}), ("sgd", {"momentum": 0.9}), ("adam", {"lr": 0.5}), ("nag", {})]
)
@every_worker_of("cluster")
def test_workers_that_disagree_on_the_optimizer(store: DistStore, name: str, options: dict[str, Any]) -> None:
    store.init("w", torch.zeros(1))
    if store.rank == 0:
        store.set_optimizer("sgd", lr=0.5)
    else:
        with pytest.raises(kv.Mismatch, match=r"set_optimizer differs from worker 0's"):
            store.set_optimizer(name, **options)
    store.push("w", torch.ones(1))
    assert value_of(store, "w", 1).item() == -1.0  # rank 0's is the one that counts


@every_worker_of("cluster")
def test_an_optimizer_that_throws_in_a_round_raises_in_every_worker(store: DistStore) -> None:
    """Adamax divides by 1 - beta1."""
    store.set_optimizer("adamax")
    store.init(["m", "v"], [torch.zeros(2, 2), torch.zeros(2)])
    store.set_hyperparameters(beta1=1.0)
    with pytest.raises(kv.ServerError, match=r"ZeroDivisionError"):
        store.push("v", torch.ones(2)).wait()
    store.set_hyperparameters(beta1=0.9)
    store.push("m", torch.eye(2)).wait()
    assert value_of(store, "m", 2, 2)[0, 0] < 0


@pytest.mark.parametrize("what", ["learning_rate", "rescale_grad"])
@every_worker_of("cluster")
def test_workers_that_disagree_on_a_number_for_one_round(store: DistStore, what: str) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", torch.zeros(1))
    store.set_hyperparameters(**{what: 0.5 + store.rank})
    with pytest.raises(
        kv.Mismatch,
        match=rf"disagree on the {what.replace('learning_', 'learning.')}.*'w': 0\.5 on worker 0, 1\.5 on worker 1",
    ):
        store.push("w", torch.ones(1)).wait()
    assert value_of(store, "w", 1).item() == 0
    store.set_hyperparameters(**{what: 0.5})
    store.push("w", torch.ones(1))
    assert value_of(store, "w", 1).item() == -1


@every_worker_of("cluster")
def test_one_worker_may_set_the_learning_rate_for_all(store: DistStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", torch.zeros(1))
    if store.rank == 1:
        store.set_learning_rate(0.25)
    for _ in range(2):
        store.push("w", torch.ones(1))
    assert value_of(store, "w", 1).item() == -1


def test_a_ported_schedule_gives_mxnets_numbers(cluster: ThreadedJob, tmp_path: Path) -> None:
    path = tmp_path / "states"

    def work(store: DistStore) -> None:
        how = {"momentum": 0.5, "rescale_grad": 1 / store.num_workers}
        store.init(["w", "cut"], [torch.zeros(1), torch.zeros(25)])
        store.set_optimizer("sgd", momentum_style="mxnet", learning_rate=1.0, **how)
        store.push(["w", "cut"], [torch.full((1,), 2.0), torch.full((25,), 2.0)]).wait()
        store.set_learning_rate(0.5)
        store.push(["w", "cut"], [torch.full((1,), 2.0), torch.full((25,), 2.0)]).wait()
        assert value_of(store, "w", 1).item() == -4.0
        assert value_of(store, "cut", 25).tolist() == [-4.0] * 25
        if store.rank == 0:
            store.save_optimizer_states(path)
            store.load_optimizer_states(path)
        store.barrier()
        store.push("w", torch.full((1,), 2.0)).wait()
        assert value_of(store, "w", 1).item() == -6.0
        store.set_optimizer("sgd", learning_rate=0.5, **how)
        if store.rank == 0:
            with pytest.raises(kv.UsageError, match="states of sgd momentum_style=mxnet, but the optimizer is sgd"):
                store.load_optimizer_states(path)
        store.push("w", torch.full((1,), 2.0)).wait()
        assert value_of(store, "w", 1).item() == -7.0, "the momentum has been dropped"

    cluster.run(work)


@pytest.mark.parametrize("name", ["lamb", "lans", "lars"])
def test_norms_are_of_whole_arrays(cluster: ThreadedJob, name: str) -> None:
    first, grad = torch.linspace(0, 1, 42).view(6, 7), torch.linspace(-1, 1, 42).view(6, 7)

    def work(store: DistStore) -> None:
        store.set_optimizer(name, learning_rate=0.1, rescale_grad=1 / store.num_workers)
        store.init(["w", "v"], [first, 2 * first])  # in one bucket
        for _ in range(2):
            store.push(["w", "v"], [grad, grad]).wait()
        assert torch.equal(value_of(store, "w", 6, 7), expected[0])
        assert torch.equal(value_of(store, "v", 6, 7), expected[1])

    expected = [first.clone(), 2 * first]
    optimizer: Any = find(name).cls(expected, lr=0.1)
    for _ in range(2):
        for weight in expected:
            weight.grad = grad.clone()
        optimizer.step()
    cluster.run(work)


def test_an_optimizer_that_needs_whole_arrays_gets_them(cluster: ThreadedJob) -> None:
    def early(store: DistStore) -> None:
        store.set_optimizer("adafactor", learning_rate=0.1)
        store.init("w", torch.ones(60, 7))
        store.push("w", torch.full((60, 7), 0.5)).wait()
        value = value_of(store, "w", 60, 7)
        weight = torch.nn.Parameter(torch.ones(60, 7))
        weight.grad = torch.ones(60, 7)
        torch.optim.Adafactor([weight], lr=0.1).step()
        torch.testing.assert_close(value, weight.detach())
        assert sorted(store.statistics().server_bytes) == [0, 4 * 420]

    def late(store: DistStore) -> None:
        store.init("w", torch.ones(60, 7))
        for name in ("adafactor", "lamb", "groupadagrad"):
            with pytest.raises(kv.UsageError, match=f"{name} needs whole tensors, but key 'w' is cut over 2 servers"):
                store.set_optimizer(name)

    cluster.run(early)
    cluster.run(late)


ASYNC, SSP, SYNC = Rule("async"), Rule("async", staleness=3), Rule()
MUCH = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("rule", [ASYNC, SSP], ids=["async", "ssp"])
@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "momentum"),
    [
        ("sgd", MUCH, "0.9"),
        ("sgd", {"momentum": 0.5}, "0.5"),
        ("sgd", {"momentum": 0.9, "momentum_style": "mxnet"}, "0.9"),
        ("nag", {"learning_rate": 0.1}, "0.9"),
        ("sgd", {"groups": [{"keys": ["a"], "momentum": 0.8}], "momentum": 0.1}, "0.8"),
    ],
    ids=["sgd", "just enough", "MXNet's", "by default", "of a group"],
)
def test_a_high_momentum(rule: Rule, optimizer: str, hyperparameters: dict[str, Any], momentum: str) -> None:
    text = advice(describe(optimizer, hyperparameters), rule, "dist_x", 4)
    assert f"{optimizer} has momentum {momentum} in a 'dist_x' store of 4 workers" in text
    assert "momentum=0" in text


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "rule", "workers"),
    [
        ("sgd", MUCH, SYNC, 4),
        ("sgd", MUCH, Rule(quorum=2), 4),
        ("sgd", MUCH, ASYNC, 1),
        ("sgd", {"momentum": 0.3}, ASYNC, 4),
        ("sgd", {}, ASYNC, 4),
        ("adam", {}, ASYNC, 4),
        ("signum", {}, ASYNC, 4),
    ],
    ids=["sync", "quorum", "alone", "low", "none", "adam", "signum"],
)
def test_nothing_to_say(optimizer: str, hyperparameters: dict[str, Any], rule: Rule, workers: int) -> None:
    assert not advice(describe(optimizer, hyperparameters), rule, "dist_x", workers)


def test_one_worker_warns_at_the_callers_line() -> None:
    def work(session: Any) -> None:
        with DistStore(session, "dist_async", ASYNC) as store:
            store.set_optimizer("sgd", **MUCH)
        with DistStore(session, "dist_ssp", SSP) as store:
            Trainer([("w", torch.nn.Parameter(torch.zeros(2)))], "sgd", MUCH, kvstore=store)
        with DistStore(session) as store:
            store.set_optimizer("sgd", **MUCH)

    with ThreadedJob(2, 1) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.run_sessions(work)
    assert [(str(each.message).split(":")[0], each.filename, each.category) for each in caught] == [
        (f"sgd has momentum 0.9 in a {name!r} store of 2 workers", __file__, UserWarning)
        for name in ("dist_async", "dist_ssp")
    ]


@every_worker_of("cluster")
def test_servers_take_no_function(store: DistStore) -> None:
    with pytest.raises(kv.Unsupported, match="use set_optimizer"):
        store.set_updater(lambda key, pushed, stored: None)


def test_states_move_to_a_job_with_other_servers_and_to_a_local_store(
    cluster: ThreadedJob, three: ThreadedJob, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    shapes = {"w": (3,), "big": (7, 8), "n": ()}
    grads = [torch.full(shape, 0.25) for shape in shapes.values()]

    def start(store: kv.KVStore, weights: list[torch.Tensor]) -> None:
        store.init(list(shapes), [weight.clone() for weight in weights])
        store.set_optimizer("adam", learning_rate=0.1, rescale_grad=1.0 / store.num_workers)

    def step(store: kv.KVStore, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        store.pushpull(list(shapes), grads, outs := [torch.empty_like(weight) for weight in weights])
        return outs

    def first_half(store: DistStore) -> tuple[Any, Any]:
        weights = [torch.ones(shape) for shape in shapes.values()]
        start(store, weights)
        for _ in range(2):
            middle = step(store, weights)
        if store.rank == 1:  # any worker can
            store.save_optimizer_states(path)
        store.barrier()
        return middle, step(store, weights)

    middle, end = cluster.run(first_half)[0]

    def second_half(store: kv.KVStore) -> Any:
        start(store, middle)
        store.load_optimizer_states(path)
        return step(store, middle)

    for results in (three.run(second_half), [second_half(kv.create("local"))]):
        for outs in results:
            for out, expected in zip(outs, end, strict=True):
                torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@every_worker_of("cluster")
def test_a_worker_that_set_no_optimizer_can_save(store: DistStore, tmp_path: Path) -> None:
    store.init("w", torch.zeros(20))
    for name in ("adam", "sgd"):
        if store.rank == 0:
            store.set_optimizer(name, **({"momentum": 0.9} if name == "sgd" else {}))
        store.barrier()
        store.push("w", torch.ones(20)).wait()
        if store.rank == 1:
            store.save_optimizer_states(tmp_path / name)
        store.barrier()
    if store.rank == 0:
        store.load_optimizer_states(tmp_path / "sgd")
        with pytest.raises(kv.UsageError, match="the states of adam, but the optimizer is sgd"):
            store.load_optimizer_states(tmp_path / "adam")


ROWS, WIDTH = 30, 4
FAR = torch.tensor([2**61, -7, 12, 2**40, 99])


def pushed(store: DistStore, step: int) -> None:
    """Push some rows of both tables, the same whatever the number of workers and servers."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (9,), generator=draws)
    rows = torch.randn(9, WIDTH, generator=draws)
    mine = store.rank == 0
    fixed = RowSparse(ids, rows) if mine else RowSparse.zeros((ROWS, WIDTH))
    grown = RowSparse(FAR[ids % len(FAR)], rows) if mine else RowSparse.zeros((0, WIDTH))
    store.push(["fixed", "grown"], [fixed, grown])


def begun(store: DistStore) -> None:
    store.set_optimizer("adam", learning_rate=0.1)
    tables = [Table(shape=(ROWS, WIDTH), init="normal", seed=1), Table(dim=WIDTH)]
    store.init(["fixed", "grown"], tables)
    for step in range(3):
        pushed(store, step)


def further(store: DistStore) -> list[torch.Tensor]:
    pushed(store, 9)
    return store.row_sparse_pull(["fixed", "grown"], row_ids=[range(ROWS), FAR])


def test_states_are_saved_by_id_and_loaded_into_another_number_of_servers(
    cluster: ThreadedJob, three: ThreadedJob, tmp_path: Path
) -> None:
    def first(store: DistStore) -> list[torch.Tensor]:
        begun(store)
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "states")
        store.barrier()
        return further(store)

    def second(store: DistStore) -> list[torch.Tensor]:
        begun(store)
        store.set_optimizer("sgd", learning_rate=0.1)  # which forgets the states
        store.set_optimizer("adam", learning_rate=0.1)
        store.load_optimizer_states(tmp_path / "states")
        store.barrier()
        return further(store)

    wanted, found = cluster.run(first)[0], three.run(second)[0]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_states_of_tables_that_there_are_not(tmp_path: Path) -> None:
    with ThreadedJob(1, 1) as job:

        def save(store: DistStore) -> None:
            begun(store)
            store.save_optimizer_states(tmp_path / "states")

        def load(store: DistStore) -> None:
            store.set_optimizer("adam", learning_rate=0.1)
            store.init("fixed", Table(shape=(ROWS, WIDTH)))
            with pytest.raises(UsageError, match="states of table 'grown', which has not been initialized"):
                store.load_optimizer_states(tmp_path / "states")

        job.run(save)
        job.run(load)
