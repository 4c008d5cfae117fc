"""What workers call to have their optimizer's states saved and loaded, and what servers cannot be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore


def test_servers_take_no_function(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        with pytest.raises(kv.Unsupported, match="use set_optimizer"):
            store.set_updater(lambda key, pushed, stored: None)

    cluster.run(work)


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


def test_a_worker_that_set_no_optimizer_can_save(cluster: ThreadedJob, tmp_path: Path) -> None:
    def work(store: DistStore) -> None:
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

    cluster.run(work)
