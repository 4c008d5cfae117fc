"""Jobs against plain runs: by seeds, over a network that repeats and delays, and with one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos import Chaos
from courses import KINDS, course
from played_shards import PlayedShards
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.table import TableSpec
from workers import Trainer

# ---- what is saved, loaded, read and taken over is what was there, in courses by seeds; ``-m faults`` makes very many


IDS = np.arange(10)
TABLE = kv.Table(dim=2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loaded_read_and_taken_over_is_what_was_there(kind: str) -> None:
    for seed in range(4):
        with course(kind, seed) as made:
            made.run()


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_over_very_many_courses(kind: str) -> None:
    for seed in range(2000):
        with course(kind, seed) as made:
            made.run()


def begun(tmp_path: Path, rule: Rule) -> PlayedShards:
    job = PlayedShards(2, rule, tmp_path / "checkpoints")
    job.store.set_optimizer("sgd", learning_rate=1.0)
    job.store.init(["t", "w"], [TABLE, torch.zeros(3)])
    return job


def push(job: PlayedShards, times: int = 1, ids: object = IDS) -> None:
    for _ in range(times):
        rows = kv.RowSparse(ids, -np.ones((len(np.asarray(ids)), 2), np.float32))
        job.store.push(["t", "w"], [rows, -torch.ones(3)], wait=True)


@pytest.mark.parametrize("rule", [Rule(), Rule("async")], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_a_server_that_takes_over_in_step_goes_on_with_deltas(tmp_path: Path, rule: Rule, later: bool) -> None:
    job = begun(tmp_path, rule)
    push(job, 2)
    for server in job.servers if later else ():
        server.pair()
    since = job.store.save_table("t", tmp_path / "t").wait()
    push(job, 2, [1, 4])
    for server in job.servers:
        server.take_over()
    push(job, 1, [4])
    job.store.save_table("t", tmp_path / "t", since=since)
    opened = kv.open_table(tmp_path / "t")
    assert opened.manifest.base is not None
    assert torch.equal(opened.lookup(IDS), job.store.row_sparse_pull("t", row_ids=IDS))


def test_a_server_that_does_not_know_which_rows_had_gone_saves_them_all(tmp_path: Path) -> None:
    job = begun(tmp_path, Rule())
    push(job, 2)
    since = job.store.save_table("t", tmp_path / "t").wait()
    push(job, 2, [1, 4])
    job.servers[1].pair()
    job.servers[1].take_over()
    job.store.save_table("t", tmp_path / "t", since=since)
    opened = kv.open_table(tmp_path / "t")
    assert opened.manifest.base is None
    assert torch.equal(opened.lookup(IDS), job.store.row_sparse_pull("t", row_ids=IDS))


@pytest.mark.parametrize("rule", [Rule(), Rule("async")], ids=str)
def test_readers_hold_values_over_a_takeover_and_no_older_ones_than_they_say(tmp_path: Path, rule: Rule) -> None:
    job = begun(tmp_path, rule)
    held, rows = job.held("w", Spec((3,), "float32")), job.held("t", TableSpec.of(TABLE))
    push(job, 30)
    assert job.read_value(held, 5).tolist() == [30] * 3
    assert job.read_rows(rows, IDS, 5)[:, 0].tolist() == [30] * 10
    push(job, 10)
    for server in job.servers:
        server.pair()  # a process that counts what it sees would begin here
    push(job, 5)
    for server in job.servers:
        server.take_over()
    assert job.read_value(held, 15).tolist() == [30] * 3
    assert job.read_rows(rows, IDS, 15)[:, 0].tolist() == [30] * 10
    push(job, 20)
    assert job.read_value(held, 15).tolist() == [65] * 3
    assert job.read_rows(rows, IDS, 15)[:, 0].tolist() == [65] * 10


def test_a_job_that_continues_from_a_checkpoint_begins_a_course_of_its_own(tmp_path: Path) -> None:
    job = begun(tmp_path, Rule())
    push(job, 3)
    since = job.store.save_table("t", tmp_path / "t").wait()
    assert job.store.save_checkpoint(wait=True) == 1
    push(job, 2, [0])
    later = job.store.save_table("t", tmp_path / "t", since=since).wait()
    resumed = PlayedShards(2, Rule(), tmp_path / "checkpoints", resume=True)
    resumed.store.set_optimizer("sgd", learning_rate=1.0)
    resumed.store.init(["t", "w"], [TABLE, torch.zeros(3)])
    push(resumed, 3, [5])
    for version in (since, later):
        resumed.store.save_table("t", tmp_path / "t", since=version)
        opened = kv.open_table(tmp_path / "t")
        assert opened.manifest.base is None
        assert opened.lookup(IDS)[:, 0].tolist() == [3, 3, 3, 3, 3, 6, 3, 3, 3, 3]


def test_a_job_that_begins_anew_continues_no_save_of_the_one_before(tmp_path: Path) -> None:
    first, second = begun(tmp_path, Rule()), begun(tmp_path, Rule())
    push(first, 3)
    since = first.store.save_table("t", tmp_path / "t").wait()
    push(second, 3, [2])
    push(second, 1, [5])
    second.store.save_table("t", tmp_path / "t", since=since)
    assert kv.open_table(tmp_path / "t").lookup(IDS)[:, 0].tolist() == [0, 0, 3, 0, 0, 1, 0, 0, 0, 0]


# ---- runs over a network that repeats, delays and reorders end in the same bits as clean ones


SHAPES = {"cut": (40, 20), "odd": (611,), "mid": (9, 11), "tiny": (3,), "one": ()}
ROUNDS = 24


def train(optimizer: str, **hyper: float) -> Any:
    """Return what a worker does: rounds of pushes and pulls in all the ways there are, and the weights it ends with."""

    def work(store: DistStore) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(100 + store.rank)
        names = sorted(SHAPES)
        weights = {name: torch.randn(SHAPES[name], generator=draws) for name in names}
        store.set_optimizer(optimizer, **hyper)
        store.init(names, [weights[name] for name in names])
        for step in range(ROUNDS):
            grads = {name: torch.randn(SHAPES[name], generator=draws) for name in names}
            if step == 11:  # while the rounds of step 10 are still on their way
                store.set_learning_rate(0.01)
            if step % 4 == 0:  # a message for each key, and none waits for another
                for name in names:
                    store.push(name, grads[name])
                for name in reversed(names):
                    store.pull(name, weights[name])
            elif step % 4 == 1:
                store.pushpull(names, [grads[name] for name in names], [weights[name] for name in names])
            elif step % 4 == 2:  # rounds pile up
                store.push(names[::2], [grads[name] for name in names[::2]])
                store.push(names[1::2], [grads[name] for name in names[1::2]])
                store.push(names, [grads[name] * 0.5 for name in names])
            else:
                tickets = [store.pushpull(name, grads[name], weights[name], wait=False) for name in names]
                for ticket in tickets:
                    ticket.wait()
                store.barrier()
        store.pull(names, [weights[name] for name in names])
        return [weights[name] for name in names]

    return work


def assert_same_bits(results: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> None:
    for tensors in results:
        for mine, theirs in zip(tensors, expected, strict=True):
            assert torch.equal(mine.view(-1).view(torch.int32), theirs.view(-1).view(torch.int32))


@pytest.mark.parametrize(
    ("workers", "servers", "optimizer", "hyper"),
    [
        (2, 2, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}),
        (3, 2, "adam", {"learning_rate": 0.1}),
        pytest.param(2, 3, "adam", {"learning_rate": 0.1, "wd": 1e-3}, marks=pytest.mark.release),
        pytest.param(3, 3, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, marks=pytest.mark.release),
    ],
)
def test_a_run_under_chaos_ends_in_the_bits_of_a_clean_one(
    workers: int, servers: int, optimizer: str, hyper: dict[str, float]
):
    with ThreadedJob(workers, servers, bigarray_bound=100) as cluster:
        clean = cluster.run(train(optimizer, **hyper))
    assert_same_bits(clean, clean[0])
    chaos = Chaos(1)
    with chaos, ThreadedJob(workers, servers, bigarray_bound=100, network=chaos.network) as cluster:
        assert_same_bits(cluster.run(train(optimizer, **hyper)), clean[0])
    assert chaos.deliveries > chaos.messages > 500
    assert chaos.overtaken > 100


def test_an_all_reduce_under_chaos_adds_in_the_order_of_ranks():
    values = [torch.randn(300, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(3)]
    expected = values[0] + values[1] + values[2]
    assert not torch.equal(expected, values[2] + values[1] + values[0]), "these values cannot tell"

    def work(store: DistStore) -> list[torch.Tensor]:
        store.init("x", torch.zeros(300))
        outs = []
        for _ in range(10):
            outs.append(torch.zeros(300))
            store.pushpull("x", values[store.rank], outs[-1])
        return outs

    chaos = Chaos(7)
    with chaos, ThreadedJob(3, 2, bigarray_bound=100, network=chaos.network) as cluster:
        for outs in cluster.run(work):
            assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("workers", [1, 3])
def test_async_under_chaos_every_push_is_one_update(workers: int):
    pushes = 40

    def work(store: DistStore) -> tuple[float, set[float]]:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["small", "cut"], [torch.zeros(1), torch.zeros(600)])
        out, cut = torch.zeros(1), torch.zeros(600)
        for turn in range(pushes):
            if turn % 4:
                store.push(["small", "cut"], [torch.ones(1), torch.ones(600)])
            else:
                store.pushpull(["small", "cut"], [torch.ones(1), torch.ones(600)], [out, cut])
                assert -pushes * workers <= out.item() <= -(turn // 4 + 1)
        store.barrier()  # of an async store: when all its pushes have been applied
        store.pull(["small", "cut"], [out, cut])
        return out.item(), set(cut.tolist())

    chaos = Chaos(11, repeated=0.6)
    with chaos, ThreadedJob(workers, 2, bigarray_bound=100, network=chaos.network) as cluster:
        results = cluster.run(work, mode="async")
    assert results == [(-float(pushes * workers), {-float(pushes * workers)})] * workers


# ---- the network itself


def test_no_message_is_lost_and_some_come_twice_and_late():
    heard: list[int] = []
    done = threading.Event()
    with Chaos(5) as chaos:
        for number in range(500):
            chaos.deliver(lambda number=number: heard.append(number))
        chaos.deliver(done.set)
    assert done.is_set()
    assert set(heard) == set(range(500))
    assert 600 < len(heard) < 700
    assert heard != sorted(heard)


def test_the_seed_decides():
    one, two, other = Chaos(5), Chaos(5), Chaos(6)
    decisions = [[chaos.decide() for _ in range(100)] for chaos in (one, two, other)]
    assert decisions[0] == decisions[1] != decisions[2]


# ---- n workers with batches of b end where one process with batches of n·b does


STEPS = 10
BATCH = 8
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 5))


def batch(step: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1000 + step)
    rows = workers * BATCH
    return torch.randn(rows, 12, generator=draws), torch.randint(0, 5, (rows,), generator=draws)


def alone(workers: int) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(STEPS):
        inputs, labels = batch(step, workers)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("workers", "servers", "update_on_kvstore"), [(1, 3, True), (2, 1, True), (2, 2, True), (3, 3, True), (3, 2, False)]
)
def test_n_workers_do_as_one(workers: int, servers: int, update_on_kvstore: bool):
    models = [network(seed=rank) for rank in range(workers)]  # rank 0's weights are the ones that count

    def train(store: DistStore) -> int:
        model = models[store.rank]
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        for step in range(STEPS):
            inputs, labels = batch(step, workers)
            mine = slice(store.rank * BATCH, (store.rank + 1) * BATCH)
            trainer.zero_grad()
            mean = step % 2  # a loss that is a mean, or a sum with the size of the whole batch: the same step
            loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine], reduction="mean" if mean else "sum")
            loss.backward()
            trainer.step(None if mean else workers * BATCH)
        return sum(count > 0 for count in store.statistics().server_bytes)

    with ThreadedJob(workers, servers, bigarray_bound=100) as cluster:
        assert cluster.run(train) == [servers] * workers, "every server holds a part"
    expected = alone(workers)
    start = [parameter.detach() for parameter in network().parameters()]
    assert max((one - two).abs().max() for one, two in zip(expected, start, strict=True)) > 0.05, "nothing was learned"
    for model in models:
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6
