"""What tests of ``fit`` train: a small network on made-up samples, as one of two workers or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kvstore.client import DistStore
from kvstore.member.session import Session
from kvstore.rule import Rule
from workers import Checkpoint, Reducer, SplitSampler, fit

FEATURES, CLASSES = 6, 3
SGD = {"learning_rate": 0.1, "momentum": 0.9}
_seeding = Lock()  # the generator is everybody's, and workers are threads here


def network(seed: int = 0, batch_norm: bool = True) -> nn.Module:
    with _seeding:
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Tanh(), nn.Linear(8, CLASSES))


def samples(count: int, seed: int = 1) -> TensorDataset:
    """Samples that can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, FEATURES, generator=generator) + 2 * nn.functional.one_hot(labels, FEATURES)
    return TensorDataset(inputs, labels)


def loader(count: int, batch_size: int, parts: int = 1, part: int = 0, **options: Any) -> DataLoader[Any]:
    dataset = samples(count)
    return DataLoader(dataset, batch_size, sampler=SplitSampler(dataset, parts, part, **options))


def reducer_of(store: DistStore) -> Reducer:
    """A reducer for a store in a thread, whose job kv.create could not find."""
    return Reducer.over(store)


def run(cluster: ThreadedJob, work: Callable[..., Any], mode: str = "sync", **rule: Any) -> list[Any]:
    """Call ``work(store, reducer)`` on every worker; return the results by rank."""

    def in_session(session: Session) -> Any:
        store, sums = DistStore(session, f"dist_{mode}", Rule(mode, **rule)), DistStore(session)
        result = work(store, reducer_of(sums))
        store.close()
        sums.close()
        return result

    return cluster.run_sessions(in_session)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def require_resumable(
    cluster: ThreadedJob, work: Callable[..., Any], prefix: str, places: Sequence[tuple[int, int]]
) -> list[Any]:
    """Run ``work`` whole, then from the checkpoint of each epoch and batch: same weights, same later history."""
    whole = run(cluster, work)
    for place in places:
        resumed = run(cluster, lambda *stores: work(*stores, resume=Checkpoint(prefix, *place)))  # noqa: B023
        for (weights, history), (again, later) in zip(whole, resumed, strict=True):
            assert same_bits(weights, again), place
            assert history[place[0] :] == later, place
    return whole


def go_on(checkpoint: Checkpoint, model: nn.Module | None = None, **options: Any) -> None:
    """Train on from a checkpoint of ``saved``."""
    data = options.pop("data", loader(8, 4))
    fit(model or network(), data, **{"num_epoch": 2, "optimizer_params": SGD, "resume": checkpoint, **options})


def plain(model: nn.Module, data: Any, epochs: int) -> nn.Module:
    """What a loop without all this makes of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        data.sampler.set_epoch(epoch)
        for inputs, labels in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model
