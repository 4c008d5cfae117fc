"""DistributedOptimizer, and the partition of its data."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from averaged import STEPS, alone, loss_of, network, plain_step, same, sgd, trained
from hypothesis import given
from hypothesis import strategies as st
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters, partition_dataset
from workers.ddp.partition import batch_sizes


@pytest.mark.parametrize("overlap", [True, False])
def test_two_workers_do_as_one_with_both_their_batches(pair: ThreadedJob, overlap: bool) -> None:
    same(trained(pair, overlap=overlap)[0], alone())


def test_what_changes_gradients_after_backward_changes_averages(pair: ThreadedJob) -> None:
    def clipped(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    same(trained(pair, clipped)[0], alone(clipped))
    assert not torch.allclose(alone(clipped)[0].weight, alone()[0].weight, atol=1e-3)


def test_horovods_way_of_clipping_does_the_same(pair: ThreadedJob) -> None:
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

    same(trained(pair, clipped)[0], alone(clipped))


def test_compression(pair: ThreadedJob) -> None:
    half = trained(pair, compression="fp16")[0]
    same(half, alone(), atol=2e-3)
    assert not torch.equal(half[0].weight, alone()[0].weight)
    trained(pair, compression={"type": "2bit", "threshold": 0.01})
    with pytest.raises(kv.UnknownName, match="zip"):
        trained(pair, compression="zip")


def test_parameter_groups_and_schedulers_are_the_optimizers(pair: ThreadedJob) -> None:
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

    same(trained(pair, scheduled, groups)[0], alone(scheduled, groups))


def test_a_grad_scaler_decides_alike_on_all_workers(pair: ThreadedJob) -> None:
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

    same(trained(pair, scaled, fused)[0], alone(scaled, fused))
    assert {scaler.get_scale() for scaler in scalers.values()} == {2.0**9}


def test_a_search_along_the_loss_goes_the_same_way_on_all_workers(pair: ThreadedJob) -> None:
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

    same(trained(pair, searching, lbfgs)[0], alone(searching, lbfgs), atol=1e-2)
    assert losses[0] == losses[1] == pytest.approx(losses[None], abs=1e-3)


def test_parameters_may_be_added(pair: ThreadedJob) -> None:
    def first(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params)[4:], lr=0.3)

    def growing(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model.parameters())[:4], "lr": 0.1})
        plain_step(model, optimizer, step, rank)

    same(trained(pair, growing, first)[0], alone(growing, first))


def test_everything_else_is_the_optimizers(pair: ThreadedJob) -> None:
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

    pair.run(work)


def test_workers_that_disagree_are_told(pair: ThreadedJob) -> None:
    def work(store: DistStore, options: Any, sizes: Any, text: str) -> None:
        param = nn.Parameter(torch.ones(sizes[store.rank]))
        with pytest.raises(kv.Mismatch, match=text):
            DistributedOptimizer(torch.optim.SGD([param], lr=1), kvstore=store, **options[store.rank])

    for options, sizes, text in (
        ([{}, {}], [2, 3], "worker . has other parameters|worker .'s optimizer has different parameters"),
        ([{"op": "sum"}, {}], [2, 2], "a different op"),
        ([{"backward_passes_per_step": 2}, {}], [2, 2], "backward_passes_per_step"),
    ):
        pair.run(lambda store, how=(options, sizes, text): work(store, *how))


def test_a_store_serves_one_of_them_and_sums(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        params = [nn.Parameter(torch.ones(2))]
        DistributedOptimizer(torch.optim.SGD(params, lr=1), kvstore=store)
        with pytest.raises(kv.UsageError, match="another model's keys"):
            DistributedOptimizer(torch.optim.SGD(params, lr=1), kvstore=store)

    pair.run(work)

    def late(store: DistStore) -> None:
        with pytest.raises(kv.UsageError, match="averages need 'dist_sync'"):
            DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1), kvstore=store)

    pair.run(late, mode="async")


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
def test_all_workers_begin_with_rank_0s_buffers(pair: ThreadedJob, make: Any, given: str) -> None:
    def work(store: kv.KVStore) -> list[torch.Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.register_buffer("mask", torch.arange(3) + 10 * store.rank)
        nn.init.constant_(model[0].running_mean, store.rank)
        optimizer, named = torch.optim.SGD(model.parameters(), lr=0.1), ()
        if make is DistributedOptimizer and given != "the optimizer alone":
            named = (model if given == "the model" else model.named_parameters(),)
        make(optimizer, *named, kvstore=store)
        return [buffer.clone() for buffer in model.buffers()]

    first, second = pair.run(work)
    assert first[0].tolist() == [0, 1, 2]
    assert all(map(torch.equal, first, second))


def test_buffers_of_modules_that_differ_are_left_alone_with_a_warning(
    pair: ThreadedJob, caplog: pytest.LogCaptureFixture
) -> None:
    def work(store: kv.KVStore) -> list[float]:
        model = nn.Linear(3, 1)
        model.register_buffer(f"mask {store.rank}", torch.full((2,), float(store.rank)))
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kvstore=store)
        return next(model.buffers()).tolist()

    assert pair.run(work) == [[0, 0], [1, 1]]
    assert "leaves each worker's buffers as they are" in caplog.text


# ---- partition_dataset: every sample once over all workers, in as many batches on each


class Numbers:
    """Not a torch data set, but has what one has."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return np.array([number, 0.5]), number


def parts(samples: int, batch_size: int, size: int, **options: Any) -> list[Any]:
    return [partition_dataset(Numbers(samples), batch_size, rank=rank, size=size, **options)[0] for rank in range(size)]


def labels(loader: Any) -> list[list[int]]:
    return [y.tolist() for _, y in loader]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 7))
def test_every_sample_comes_once_and_all_have_as_many_batches(samples: int, size: int, each: int) -> None:
    if samples < size:
        return
    read = [loader.batch_sampler for loader in parts(samples, each * size, size)]
    epochs = [[list(sampler) for sampler in read] for _ in range(2)]
    for epoch in epochs:
        assert len({len(batches) for batches in epoch}) == 1
        assert all(1 <= len(batch) <= each for batches in epoch for batch in batches)
        seen = [number for batches in epoch for batch in batches for number in batch]
        assert set(seen) == set(range(samples))
        assert len(seen) == samples or (each == 1 and len(seen) == -(-samples // size) * size)
    assert [len(sampler) for sampler in read] == [len(batches) for batches in epochs[0]]


def test_the_order_is_the_seeds_and_new_in_each_epoch() -> None:
    (one,), (two,), (other,) = parts(50, 8, 1), parts(50, 8, 1), parts(50, 8, 1, seed=7)
    first = labels(one)
    assert first == labels(two)
    assert first != labels(other)
    assert first != labels(one)


def test_a_run_that_goes_on_goes_on_where_it_was() -> None:
    (whole,), (stopped,), (resumed,) = (parts(50, 8, 1) for _ in range(3))
    expected = labels(whole)
    loader = iter(stopped)
    taken = [next(loader)[1].tolist() for _ in range(3)]
    resumed.batch_sampler.load_state_dict(stopped.batch_sampler.state_dict())
    assert taken + labels(resumed) == expected


def test_batches_are_the_workers_part_of_the_batch_size() -> None:
    _, bsz = partition_dataset(Numbers(100), 33, rank=0, size=4)
    assert bsz == 8


def test_floats_get_the_dtype_and_integers_do_not() -> None:
    (loader,) = parts(4, 4, 1, dtype="float32", device="cpu")
    x, y = next(iter(loader))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    (loader,) = parts(4, 4, 1)
    assert next(iter(loader))[0].dtype == torch.float64


def test_samples_of_any_shape_go_to_the_device() -> None:
    Pair = namedtuple("Pair", "x y")
    data = [{"pair": Pair(torch.zeros(2).double(), 1), "name": "a"}] * 3
    loader, _ = partition_dataset(data, 3, dtype=torch.float16, rank=0, size=1)
    batch = next(iter(loader))
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].x.dtype == torch.float16
    assert batch["name"] == ["a"] * 3
    loader, _ = partition_dataset(TensorDataset(torch.zeros(3, 2)), 3, rank=0, size=1)
    assert next(iter(loader))[0].shape == (3, 2)


def test_what_cannot_be_divided_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(kv.UsageError, match="a Stream cannot be divided"):
        partition_dataset(Stream(), 4, rank=0, size=1)
    with pytest.raises(kv.UsageError, match="3 samples cannot be divided between 4 workers"):
        partition_dataset(Numbers(3), 4, rank=0, size=4)
    with pytest.raises(kv.UsageError, match="must be at least 4"):
        partition_dataset(Numbers(9), 3, rank=0, size=4)
    with pytest.raises(kv.UsageError, match=r"call workers.init\(\) first"):
        partition_dataset(Numbers(9), 3)


@pytest.mark.parametrize(
    ("samples", "batches", "sizes"), [(7, 2, [4, 3]), (8, 2, [4, 4]), (8, 3, [4, 3, 1]), (4, 1, [4]), (4, 2, [3, 1])]
)
def test_the_sizes_of_batches(samples: int, batches: int, sizes: list[int]) -> None:
    assert batch_sizes(samples, batches, 4) == sizes


# ---- parameters on a CUDA device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_and_states_on_a_device(cuda: torch.device, dtype: torch.dtype) -> None:
    models = [nn.Linear(300, 40).to(cuda, dtype) for _ in range(2)]
    inner = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]

    def work(store: DistStore) -> None:
        model = models[store.rank]
        optimizer = DistributedOptimizer(inner[store.rank], kvstore=store)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((4, 300), 0.01 * (step + store.rank), device=cuda, dtype=dtype)
            model(x).float().square().mean().backward()
            optimizer.step()

    def same_start(store: DistStore) -> None:
        broadcast_parameters(models[store.rank], kvstore=store)
        broadcast_optimizer_state(inner[store.rank], 1, kvstore=store)

    with ThreadedJob(workers=2, servers=2) as pair:
        pair.run(same_start)
        pair.run(work)
        inner[0].state.clear()
        pair.run(same_start)
        pair.run(work)
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert one.is_cuda
        assert torch.equal(one, two)
