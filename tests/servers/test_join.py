"""Workers that run out of batches, over threads: rounds go on without them, and all go on together afterwards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from chaos import Chaos
from threaded import ThreadedJob
from torch import nn
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, NodeLost, UsageError
from kvstore.member.session import Session
from kvstore.rule import Rule
from workers import Trainer

SHAPES = {"cut": (40, 20), "odd": (611,), "tiny": (3,)}


def test_sums_are_over_those_who_still_push():
    def work(store: DistStore) -> list[Any]:
        store.init(["w", "cut"], [torch.zeros(4), torch.zeros(2000)])
        out, cut, seen = torch.zeros(4), torch.zeros(2000), []
        for _ in range(2):
            for _ in range(1 + store.rank):
                store.pushpull("w", torch.full((4,), 10.0**store.rank), out)
                store.push("cut", torch.full((2000,), 10.0**store.rank))
                seen.append(out[0].item())
            seen.append(f"last is {store.join()}")
            store.pull(["w", "cut"], [out, cut])
            assert torch.equal(cut, out[0].expand(2000))
            seen.append(out[0].item())
        return seen

    with ThreadedJob(3, 2) as cluster:
        results = cluster.run(work)
    for rank, seen in enumerate(results):
        assert seen == [*[111, 110, 100][: rank + 1], "last is 2", 100] * 2


def epochs(optimizer: str, compression: dict[str, Any] | None = None, **hyper: float) -> Any:
    """What a worker does: three epochs of its own length, in all ways to push, and the weights after each join."""

    def work(store: DistStore) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(100 + store.rank)
        names, ends = sorted(SHAPES), []
        weights = {name: torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1)) for name in names}
        store.set_optimizer(optimizer, **hyper)
        store.init(names, [weights[name] for name in names])
        store.set_gradient_compression(compression)
        for epoch in range(3):
            for step in range((store.rank * 3 + epoch) % 4):
                grads = {name: torch.randn(SHAPES[name], generator=draws) for name in names}
                if step % 2:
                    store.pushpull(names, [grads[name] for name in names], [weights[name] for name in names])
                else:
                    for name in names:
                        store.push(name, grads[name])
                    store.push(names[: 1 + store.rank], [grads[name] for name in names[: 1 + store.rank]])
            assert store.join() == max(range(store.num_workers), key=lambda rank: lengths(rank, epoch))
            store.pull(names, [weights[name] for name in names])
            ends += [weights[name].clone() for name in names]
        return ends

    def lengths(rank: int, epoch: int) -> tuple[int, int]:
        steps = (rank * 3 + epoch) % 4
        return steps * 3 + -(-steps // 2) * (1 + rank), rank

    return work


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(-1).view(torch.int32), b.view(-1).view(torch.int32)) for a, b in pairs)


@pytest.mark.parametrize(
    ("workers", "servers", "optimizer", "compression"),
    [(3, 2, "adam", None), (2, 3, "sgd", None), (3, 2, "sgd", {"type": "2bit", "threshold": 0.5, "pull": "fp16"})],
)
def test_a_run_under_chaos_ends_in_the_bits_of_a_clean_one(
    workers: int, servers: int, optimizer: str, compression: dict[str, Any] | None
):
    hyper = {"learning_rate": 0.1} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    with ThreadedJob(workers, servers, bigarray_bound=100) as cluster:
        clean = cluster.run(epochs(optimizer, compression, **hyper))
    assert all(same_bits(mine, clean[0]) for mine in clean)
    chaos = Chaos(1)
    with chaos, ThreadedJob(workers, servers, bigarray_bound=100, network=chaos.network) as cluster:
        assert all(same_bits(mine, clean[0]) for mine in cluster.run(epochs(optimizer, compression, **hyper)))
    assert chaos.overtaken > 20


def test_with_a_quorum_everybody_is_let_go_and_weights_agree():
    def work(store: DistStore) -> float:
        store.init("w", torch.zeros(3))
        out = torch.zeros(3)
        for _ in range(3):
            for _ in range(2 + 3 * store.rank):
                store.pushpull("w", torch.ones(3), out)
            store.join()
        store.pull("w", out)
        return out[0].item()

    with ThreadedJob(3, 1) as cluster:
        assert cluster.run(work, rule=Rule(quorum=2)) == [1.0] * 3, "the last rounds are one worker's alone"


def test_bounded_staleness_does_not_wait_for_who_has_joined_nor_for_what_it_has_missed():
    def work(store: DistStore) -> float:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(1))
        out = torch.zeros(1)
        for _ in range(2):
            for _ in range(1 if store.rank else 20):
                store.pushpull("w", torch.ones(1), out)
            store.join()
        store.pull("w", out)
        return out.item()

    with ThreadedJob(2, 2, timeout_s=30) as cluster:
        assert cluster.run(work, mode="async", rule=Rule("async", staleness=2)) == [-42.0] * 2


@pytest.mark.parametrize("overlap", ["auto", True])
def test_a_trainer_with_uneven_batches_does_as_one_process(overlap: bool | str):
    """The gradient of each round, divided by all workers, is that of one process which misses those that are done."""

    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(4, 6, generator=draws)).square().mean()

    lengths = (3, 5)
    models = [network(), network()]

    def train(store: DistStore) -> None:
        model = models[store.rank]
        trainer = Trainer(
            model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, store, overlap=overlap
        )
        for epoch in range(2):
            for step in range(lengths[store.rank]):
                trainer.zero_grad()
                loss(model, store.rank, 10 * epoch + step).backward()
                trainer.step()
            assert trainer.join() == 1
        trainer.close()

    with ThreadedJob(2, 2, timeout_s=30, bigarray_bound=50_000) as cluster:
        cluster.run(train)
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for step in range(max(lengths)):
            optimizer.zero_grad()
            losses = [loss(alone, rank, 10 * epoch + step) for rank in (0, 1) if step < lengths[rank]]
            (sum(losses) / 2).backward()
            optimizer.step()
    for ours, theirs, expected in zip(*(model.parameters() for model in (*models, alone)), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours - expected).abs().max() <= 1e-6


def test_calls_that_need_a_worker_which_has_joined_name_it_and_change_nothing():
    def work(store: DistStore) -> list[str]:
        said = []
        store.init("w", torch.zeros(3))
        store.barrier()
        if store.rank != 0:
            with pytest.raises(UsageError) as barrier:
                store.barrier()
            with pytest.raises(UsageError) as init:
                store.init("new", torch.zeros(3))
            said = [str(barrier.value), str(init.value)]
            refused.wait()  # before either joins, which the other would be told of
        assert store.join() == 2
        store.barrier()
        store.init("new", torch.zeros(3))
        store.push("new", torch.ones(3))
        assert store.join() == 2
        out = torch.zeros(3)
        store.pull("new", out)
        assert out.tolist() == [3.0] * 3
        return said

    refused = threading.Barrier(2, timeout=LONG)
    with ThreadedJob(3, 1) as cluster:
        results = cluster.run(work)
    assert results[1] == results[2]
    assert "worker 0 has called join(): nobody inside join() comes to a barrier" in results[1][0]
    assert "worker 0 has called join(), and gives no key" in results[1][1]


def test_a_deadline_names_who_has_more_to_do_and_another_call_waits_on():
    def work(store: DistStore) -> str | None:
        store.init("w", torch.zeros(3))
        text = None
        if store.rank == 0:
            with pytest.raises(DeadlineExceeded) as late:
                store.join(timeout=0.2)
            text = str(late.value)
            with pytest.raises(UsageError, match="Call join"):
                store.push("w", torch.ones(3))
        signals[store.rank].barrier()
        if store.rank:
            store.pushpull("w", torch.ones(3), torch.zeros(3))
        assert store.join() == 1
        return text

    signals: dict[int, DistStore] = {}

    def both(session: Session) -> str | None:
        store = DistStore(session)
        signals[session.rank] = DistStore(session)
        text = work(store)
        store.close()
        return text

    with ThreadedJob(2, 1) as cluster:
        text, _ = cluster.run_sessions(both)
    assert text is not None
    assert text.startswith("join is not done after 0.2 s")
    assert "worker 1 to join" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ValueError: no such file"], "worker 1 failed: ValueError: no such file"),
        ([], "worker 1 has left the job without join()"),
    ],
)
def test_a_worker_that_fails_or_leaves_without_joining_is_named_to_those_who_have_joined(
    monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
):
    monkeypatch.setattr("servers.scheduler_process.FAREWELL_S", 0.2)

    def work(session: Session) -> str:
        store = DistStore(session)
        store.init("w", torch.zeros(3))
        if session.rank == 1:
            session.leave(*words)
            return ""
        with pytest.raises(NodeLost) as lost:
            store.join()
        return str(lost.value)

    with ThreadedJob(2, 1) as cluster:
        assert cluster.run_sessions(work)[0] == told


def test_alone_there_is_nobody_to_wait_for():
    for name in ("local", "device"):
        assert kv.create(name).join() == 0

    def work(store: DistStore) -> int:
        store.init("w", torch.zeros(3))
        store.pushpull("w", torch.ones(3), torch.zeros(3))
        return store.join()

    with ThreadedJob(1, 2) as cluster:
        assert cluster.run(work) == [0]
