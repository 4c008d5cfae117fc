"""What a trainer trains: whose values its parameters begin with, in which memory, its states, and wrong arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from trained import on_devices, weights

import kvstore as kv
from kvstore.dist import DistStore
from kvstore.member.session import Session
from workers import Trainer


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_states_of_a_dist_store(cluster: ThreadedJob, update_on_kvstore: bool, tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params = weights(1.0, 1.0)
        stores = [DistStore(session) for _ in params]
        trainers = [
            Trainer([param], "adam", {"lr": 0.1}, store, update_on_kvstore)
            for param, store in zip(params, stores, strict=True)
        ]

        def steps(i: int, count: int) -> None:
            for _ in range(count):
                params[i].grad = torch.full((2,), 0.5)
                trainers[i].step()

        steps(0, 2)
        steps(1, 2)
        path = tmp_path / f"s{session.rank * (not update_on_kvstore)}"
        if session.rank == 0 or not update_on_kvstore:
            trainers[0].save_states(path)
        stores[0].barrier()
        trainers[1].load_states(path)
        steps(0, 2)
        steps(1, 2)
        assert torch.equal(*params)

    cluster.run_sessions(work)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((([],)), kv.UsageError, "no parameters"),
        ((weights(0.0), "sdg"), kv.UnknownName, "no optimizer 'sdg'"),
        ((weights(0.0), "sgd", {"momentun": 1}), kv.UnknownName, "no hyper-parameter 'momentun'"),
        ((weights(0.0), "sgd", {"rescale_grad": "half"}), kv.UsageError, "rescale_grad='half' is not a finite number"),
        ((weights(0.0), "sgd", None, "disc"), kv.UnknownName, "no store 'disc'"),
        ((weights(0.0), "sgd", None, "dist_sync"), kv.ConfigError, "launch.py"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Trainer(*arguments)


def test_the_weights_of_rank_zero_count(cluster: ThreadedJob) -> None:
    for mode in ("sync", "async"):

        def work(store: DistStore) -> list[list[float]]:
            params = weights(5.0 + store.rank, 7.0)
            Trainer(on_devices(params), "sgd", None, store)
            return [param.tolist() for param in params]

        assert cluster.run(work, mode=mode) == [[[5, 5], [5, 5]]] * 2


@pytest.mark.parametrize(
    "share", [{"share_gradients": True}, {"share_weights": True}, {"share_gradients": True, "share_weights": True}]
)
def test_memory_that_is_shared_gives_the_same_weights(share: dict[str, bool]) -> None:
    def train(store: Any, **options: bool) -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
        for number, param in enumerate(model.parameters()):  # threads share torch's own generator
            torch.nn.init.normal_(param, std=0.3, generator=torch.Generator().manual_seed(number))
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, store, **options)
        for step in range(5):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + store.rank))
            trainer.zero_grad()
            model(batch).square().mean().backward()
            trainer.step()
        return [param.detach().clone() for param in model.parameters()]

    results = []
    for options in ({}, share):
        with ThreadedJob(2, 2, bigarray_bound=2**40) as cluster:
            results.append(cluster.run(lambda store, options=options: train(store, **options)))
    for plain, shared in zip(*results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, shared, strict=True))
