"""Workers that run out of batches: Trainer.join, with overlap, sums beside the training, and schedules."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from threading import Event

import pytest
import torch
from models import same
from threaded import ThreadedJob
from torch import nn
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer, schedules

SGD = {"learning_rate": 0.1, "momentum": 0.9}
STEPS = (3, 5)  # of each worker in an epoch
EACH = 4  # samples a batch

pytestmark = pytest.mark.usefixtures("small_buckets")


MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def network() -> nn.Module:
    return deepcopy(MODEL)  # threads that seed torch would draw from each other's numbers


def backward(model: nn.Module, epoch: int, step: int, rank: int) -> None:
    """Of the sum of a batch's losses."""
    draws = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
    data, labels = torch.randn(EACH, 6, generator=draws), torch.randint(3, (EACH,), generator=draws)
    nn.functional.cross_entropy(model(data), labels, reduction="sum").backward()


def alone(epochs: int, optimizer: torch.optim.Optimizer, model: nn.Module, clip: float | None = None) -> None:
    """What one process does with all batches; those of workers that have run out are empty."""
    for epoch in range(epochs):
        for step in range(max(STEPS)):
            optimizer.zero_grad()
            for rank, steps in enumerate(STEPS):
                if step < steps:
                    backward(model, epoch, step, rank)
            for param in model.parameters():
                assert param.grad is not None
                param.grad /= EACH * len(STEPS)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def turns(store: DistStore, epoch: int) -> int:
    """The steps of a worker, who has more of them in every other epoch."""
    return STEPS[(store.rank + epoch) % 2]


def own(store: DistStore, epoch: int) -> int:
    return STEPS[store.rank]


def train(
    trainer: Trainer,
    model: nn.Module,
    store: DistStore,
    epochs: int,
    steps: Callable[[DistStore, int], int] = own,
    batch_size: int = 1,
    clip: float | None = None,
) -> list[int]:
    """Train and join in each epoch; return what the joins have said."""
    lasts = []
    for epoch in range(epochs):
        for step in range(steps(store, epoch)):
            trainer.zero_grad()
            backward(model, epoch, step, store.rank)
            if clip is not None:
                trainer.clip_grad_norm_(clip, batch_size=batch_size)
            trainer.step(batch_size)
        lasts.append(trainer.join())
    return lasts


ALL = EACH * len(STEPS)  # samples in a step of all workers


@pytest.mark.parametrize("overlap", ["auto", True, False])
@pytest.mark.parametrize("share", [False, True])
def test_every_sample_counts_the_same(pair: ThreadedJob, overlap: bool | str, share: bool) -> None:
    how = {"overlap": overlap, "share_gradients": share, "share_weights": share}

    def work(store: DistStore) -> tuple[nn.Module, list[int], int]:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, **how)
        return model, train(trainer, model, store, 3, batch_size=ALL), trainer.num_update

    (first, lasts, updates), (second, *others) = pair.run(work)
    assert lasts == [1, 1, 1]
    assert [lasts, updates] == others
    assert updates == 3 * max(STEPS)
    same(first, second, atol=0)
    expected = network()
    alone(3, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), expected)
    same(first, expected)


def test_in_every_order_the_same_bits(pair: ThreadedJob) -> None:
    def work(store: DistStore, overlap: bool) -> nn.Module:
        model = network()
        trainer = Trainer(model.named_parameters(), "adam", {}, store, overlap=overlap)
        assert train(trainer, model, store, 2, turns) == [1, 0]
        return model

    models = [model for overlap in (True, False) for model in pair.run(partial(work, overlap=overlap))]
    for model in models[1:]:
        same(models[0], model, atol=0)


def test_schedules_go_on_together(pair: ThreadedJob) -> None:
    schedule = [0.1 / (1 + number) for number in range(3 * max(STEPS) + 1)]

    def work(store: DistStore) -> nn.Module:
        model = network()
        options = {**SGD, "lr_scheduler": lambda number: schedule[number]}
        train(Trainer(model.named_parameters(), "sgd", options, store), model, store, 3, batch_size=ALL)
        return model

    first, second = pair.run(work)
    same(first, second, atol=0)
    expected = network()
    optimizer = torch.optim.SGD(expected.parameters(), lr=schedule[1], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: schedule[done + 1] / schedule[1])
    optimizer.register_step_post_hook(lambda *_: scheduler.step() if scheduler.last_epoch + 2 < len(schedule) else None)
    alone(3, optimizer, expected)
    same(first, expected)


def test_clipping_goes_on_without_who_has_joined(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> nn.Module:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, overlap=False)
        train(trainer, model, store, 2, batch_size=ALL, clip=0.2)
        return model

    first, second = pair.run(work)
    same(first, second, atol=0)
    expected = network()
    alone(2, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), expected, clip=0.2)
    same(first, expected)


def test_flags_go_on_without_who_has_joined(pair: ThreadedJob) -> None:
    """Parameters without a gradient, and a GradScaler's overflows."""

    def work(store: DistStore) -> tuple[list[torch.Tensor], list[bool]]:
        weights = {name: nn.Parameter(torch.zeros(2)) for name in ("used", "at times")}
        trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, store, overlap=False)
        seen = []
        for step in range(1 + 2 * store.rank):
            trainer.zero_grad()
            loss = weights["used"].sum() + (weights["at times"].sum() if step == 1 else 0)
            loss.backward()
            seen.append(trainer.overflows(step == store.rank))
            trainer.step(ignore_stale_grad=True)
        trainer.join()
        return [weight.detach() for weight in weights.values()], seen

    (first, *_), (second, seen) = pair.run(work)
    assert [its.tolist() for its in first] == [its.tolist() for its in second] == [[-2.0, -2.0], [-0.5, -0.5]]
    assert seen == [True, True, False]


@pytest.mark.parametrize("early", [0, 1])
def test_what_the_joined_have_never_taken_part_in_is_an_error_at_once(pair: ThreadedJob, early: int) -> None:
    def work(store: DistStore) -> None:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, overlap=False)
        if store.rank != early:
            with pytest.raises(kv.UsageError, match=rf"worker {early}\b.*(has called|is inside) join"):
                store.barrier()  # from here on it is inside join
            backward(model, 0, 0, 0)
            with pytest.raises(kv.UsageError, match=rf"worker {early}\b.*(has called|is inside) join"):
                trainer.clip_grad_norm_(1.0)
        trainer.join()

    pair.run(work)


def test_updates_in_the_workers_cannot_join(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        trainer = Trainer(network().named_parameters(), "sgd", SGD, store, update_on_kvstore=False)
        with pytest.raises(kv.Unsupported, match=r"join\(\) needs update_on_kvstore=True"):
            trainer.join()

    pair.run(work)


@pytest.mark.parametrize("kvstore", [None, "local"])
def test_alone_there_is_nobody_to_wait_for(kvstore: str | None) -> None:
    trainer = Trainer(network().named_parameters(), "sgd", SGD, kvstore)
    assert trainer.join() == 0


def test_not_in_the_middle_of_a_step(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, overlap=True)
        for step in range(2):
            trainer.zero_grad()
            backward(model, 0, step, store.rank)
            if step:
                with pytest.raises(kv.UsageError, match=r"join\(\) between backward\(\) and step\(\)"):
                    trainer.join()
            trainer.step()
        trainer.join()

    pair.run(work)


def test_asynchronous_workers_end_with_the_same(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> nn.Module:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.01}, store)
        train(trainer, model, store, 1)
        assert trainer.num_update == STEPS[store.rank]
        return model

    first, second = pair.run(work, mode="async")
    same(first, second, atol=0)


def test_a_deadline_that_has_passed_is_no_end(pair: ThreadedJob) -> None:
    passed = Event()

    def work(store: DistStore) -> int:
        trainer = Trainer(network().named_parameters(), "sgd", SGD, store)
        if store.rank == 0:
            with pytest.raises(kv.DeadlineExceeded, match="worker 1"):
                trainer.join(timeout=0.05)
            passed.set()
        assert passed.wait(LONG)
        return trainer.join()

    assert pair.run(work) == [1, 1]


def test_whoever_learns_at_once_that_all_have_run_out(pair: ThreadedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    join = DistStore.join

    def lucky(store: DistStore, timeout: float | None = None) -> int:
        return join(store, LONG if timeout == 0 and store.rank == 1 else timeout)

    def work(store: DistStore) -> tuple[list[int], int]:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store)
        return train(trainer, model, store, 2), trainer.num_update

    monkeypatch.setattr(DistStore, "join", lucky)
    assert pair.run(work) == [([1, 1], 10)] * 2


def test_a_schedule_of_mxnet(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        model = network()
        options = {"learning_rate": 0.1, "lr_scheduler": schedules.FactorScheduler(step=2, factor=0.5)}
        trainer = Trainer(model.named_parameters(), "sgd", options, store)
        train(trainer, model, store, 2, turns)
        return trainer.learning_rate

    first, second = pair.run(work)
    assert first == second
