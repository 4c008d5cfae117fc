"""DistributedOptimizer in jobs made of threads: two workers do as one does with both their batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from averaged import STEPS, alone, loss_of, network, pair, plain_step, same, sgd
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import DistributedOptimizer


@pytest.mark.parametrize("overlap", [True, False])
def test_two_workers_do_as_one_with_both_their_batches(cluster: ThreadedJob, overlap: bool) -> None:
    same(pair(cluster, overlap=overlap)[0], alone())


def test_what_changes_gradients_after_backward_changes_averages(cluster: ThreadedJob) -> None:
    def clipped(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    same(pair(cluster, clipped)[0], alone(clipped))
    assert not torch.allclose(alone(clipped)[0].weight, alone()[0].weight, atol=1e-3)


def test_horovods_way_of_clipping_does_the_same(cluster: ThreadedJob) -> None:
    def clipped(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if rank is not None:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if rank is None:
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()

    same(pair(cluster, clipped)[0], alone(clipped))


def test_compression(cluster: ThreadedJob) -> None:
    half = pair(cluster, compression="fp16")[0]
    same(half, alone(), atol=2e-3)
    assert not torch.equal(half[0].weight, alone()[0].weight)
    pair(cluster, compression={"type": "2bit", "threshold": 0.01})
    with pytest.raises(kv.UnknownName, match="zip"):
        pair(cluster, compression="zip")


def test_parameter_groups_and_schedulers_are_the_optimizers(cluster: ThreadedJob) -> None:
    def groups(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)

    schedulers: dict[int, Any] = {}

    def scheduled(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        if step == 0:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        plain_step(model, optimizer, step, rank)
        schedulers[id(optimizer)].step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 if step == 0 else 0.05 if step < 3 else 0.005)

    same(pair(cluster, scheduled, groups)[0], alone(scheduled, groups))


def test_a_grad_scaler_decides_alike_on_all_workers(cluster: ThreadedJob) -> None:
    """One worker's gradients are infinite in one step; all leave that one out."""

    def fused(params: Any) -> torch.optim.Optimizer:  # tells GradScaler that it unscales by itself
        return torch.optim.SGD(params, lr=0.3, fused=True)

    scalers = {rank: torch.amp.GradScaler("cpu", init_scale=2.0**10) for rank in (0, 1, None)}

    def scaled(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        scaler = scalers[rank]
        optimizer.zero_grad()
        loss = loss_of(model, step, rank) * (float("inf") if step == 1 and rank != 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    same(pair(cluster, scaled, fused)[0], alone(scaled, fused))
    assert {scaler.get_scale() for scaler in scalers.values()} == {2.0**9}


def test_a_search_along_the_loss_goes_the_same_way_on_all_workers(cluster: ThreadedJob) -> None:
    def lbfgs(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, max_iter=5, line_search_fn="strong_wolfe")

    losses: dict[int | None, list[float]] = {0: [], 1: [], None: []}

    def searching(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank)
            loss.backward()
            return loss

        losses[rank].append(optimizer.step(closure).item())

    same(pair(cluster, searching, lbfgs)[0], alone(searching, lbfgs), atol=1e-2)
    assert losses[0] == losses[1] == pytest.approx(losses[None], abs=1e-3)


def test_parameters_may_be_added(cluster: ThreadedJob) -> None:
    def first(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params)[4:], lr=0.3)

    def growing(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model.parameters())[:4], "lr": 0.1})
        plain_step(model, optimizer, step, rank)

    same(pair(cluster, growing, first)[0], alone(growing, first))


def test_everything_else_is_the_optimizers(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model, inner = network(), None
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, kvstore=store)
        steps: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))
        plain_step(model, optimizer, 0, store.rank)
        assert steps == [1]
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.state is inner.state
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.defaults is inner.defaults
        assert "Adam" in repr(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        plain_step(model, optimizer, 1, store.rank)
        optimizer.load_state_dict(saved)
        assert float(inner.state[model[0].weight]["step"]) == 1
        optimizer.reset_grad()
        assert model[0].weight.grad is None
        with pytest.raises(AttributeError):
            optimizer.nothing  # noqa: B018

    cluster.run(work)


def test_workers_that_disagree_are_told(cluster: ThreadedJob) -> None:
    def work(store: DistStore, options: Any, sizes: Any, text: str) -> None:
        param = nn.Parameter(torch.ones(sizes[store.rank]))
        with pytest.raises(kv.Mismatch, match=text):
            DistributedOptimizer(torch.optim.SGD([param], lr=1), kvstore=store, **options[store.rank])

    for options, sizes, text in (
        ([{}, {}], [2, 3], "worker . has other parameters|worker .'s optimizer has different parameters"),
        ([{"op": "sum"}, {}], [2, 2], "a different op"),
        ([{"backward_passes_per_step": 2}, {}], [2, 2], "backward_passes_per_step"),
    ):
        cluster.run(lambda store, how=(options, sizes, text): work(store, *how))


def test_a_store_serves_one_of_them_and_sums(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        params = [nn.Parameter(torch.ones(2))]
        DistributedOptimizer(torch.optim.SGD(params, lr=1), kvstore=store)
        with pytest.raises(kv.UsageError, match="another model's keys"):
            DistributedOptimizer(torch.optim.SGD(params, lr=1), kvstore=store)

    cluster.run(work)

    def late(store: DistStore) -> None:
        with pytest.raises(kv.UsageError, match="averages need 'dist_sync'"):
            DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1), kvstore=store)

    cluster.run(late, mode="async")


def test_alone_it_is_the_optimizer() -> None:
    workers.init()
    try:
        model = network()
        optimizer = DistributedOptimizer(sgd(model.parameters()), compression="fp16")
        for step in range(STEPS):
            with optimizer.no_sync():
                plain_step(model, optimizer, step, None)
            optimizer.synchronize()
        assert all(torch.equal(*its) for its in zip(model.parameters(), alone().parameters(), strict=True))
        assert optimizer.step(lambda: 3.5) == 3.5
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        workers.shutdown()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (["sgd"], {}, "not str"),
        ([None], {"op": "max"}, "choose from average, sum"),
        ([None], {"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ([None, [("a", nn.Parameter(torch.ones(1)))]], {}, "lacks 1 of the optimizer's 1 parameters"),
        ([None, ["a"]], {}, "pairs of a name and a parameter"),
        ([None, [("a", nn.Parameter(torch.ones(1)))] * 2], {}, "a name twice"),
        ([None], {}, r"call workers.init\(\) first"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[Any], options: Any, text: str) -> None:
    given = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1) if its is None else its for its in arguments]
    with pytest.raises(kv.UsageError, match=text):
        DistributedOptimizer(*given, **options)


@pytest.mark.parametrize("given", ["the optimizer alone", "named_parameters()", "the model"])
@pytest.mark.parametrize("make", [DistributedOptimizer, workers.DistOpt])
def test_all_workers_begin_with_rank_0s_buffers(cluster: ThreadedJob, make: Any, given: str) -> None:
    def work(store: kv.KVStore) -> list[torch.Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.register_buffer("mask", torch.arange(3) + 10 * store.rank)
        nn.init.constant_(model[0].running_mean, store.rank)
        optimizer, named = torch.optim.SGD(model.parameters(), lr=0.1), ()
        if make is DistributedOptimizer and given != "the optimizer alone":
            named = (model if given == "the model" else model.named_parameters(),)
        make(optimizer, *named, kvstore=store)
        return [buffer.clone() for buffer in model.buffers()]

    first, second = cluster.run(work)
    assert first[0].tolist() == [0, 1, 2]
    assert all(map(torch.equal, first, second))


def test_buffers_of_modules_that_differ_are_left_alone_with_a_warning(
    cluster: ThreadedJob, caplog: pytest.LogCaptureFixture
) -> None:
    def work(store: kv.KVStore) -> list[float]:
        model = nn.Linear(3, 1)
        model.register_buffer(f"mask {store.rank}", torch.full((2,), float(store.rank)))
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kvstore=store)
        return next(model.buffers()).tolist()

    assert cluster.run(work) == [[0, 0], [1, 1]]
    assert "leaves each worker's buffers as they are" in caplog.text
