"""The process group in one process: each worker a thread, with a group and a DDP of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from page import block
from threaded import ThreadedJob, set_limits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from waiting import LONG

import workers
from kvstore import DeadlineExceeded, Unsupported, UsageError
from kvstore.client import DistStore
from workers.integrations import torch_distributed
from workers.integrations.__main__ import main
from workers.integrations.torch_distributed import LARGEST, SMALLEST, StoreGroup

OPS = dist.ReduceOp


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=3, servers=2) as cluster:
        yield cluster


def run(cluster: ThreadedJob, work: Callable[[StoreGroup], Any]) -> list[Any]:
    return cluster.run(lambda store: work(StoreGroup(store)))


def options(op: Any = OPS.SUM, root: int = 0) -> Any:
    """What torch.distributed passes."""
    return SimpleNamespace(reduceOp=OPS(op), rootRank=root)


def test_a_job_that_goes_on_without_some_workers_has_no_group() -> None:
    """What all_gather brought of a lost worker was zeros, and one that came back waited in DDP for weights."""
    store: Any = SimpleNamespace(min_workers=1)
    with pytest.raises(Unsupported, match="start it without --min-workers, or train with workers"):
        StoreGroup(store)


@pytest.mark.parametrize(("op", "wanted"), [(OPS.SUM, 12), (OPS.AVG, 4), (OPS.MAX, 6), (OPS.MIN, 2), (OPS.PRODUCT, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce(cluster: ThreadedJob, op: Any, wanted: int, dtype: torch.dtype) -> None:
    def work(group: StoreGroup) -> list[torch.Tensor]:
        mine = 2 * (group.rank() + 1)
        tensors = [torch.full((), mine, dtype=dtype), torch.full((3, 4), mine, dtype=dtype).t()]
        for tensor in tensors:
            assert group.allreduce([tensor], options(op)).wait()
        return tensors

    for tensors in run(cluster, work):
        assert all(tensor.unique().tolist() == [wanted] for tensor in tensors)


@pytest.mark.parametrize("length", [0, 1, SMALLEST, SMALLEST + 1, LARGEST, 2 * LARGEST + 5])
def test_any_length_is_summed_with_few_keys(cluster: ThreadedJob, length: int) -> None:
    def work(store: DistStore) -> tuple[torch.Tensor, list[int]]:
        group, tensor = StoreGroup(store), torch.arange(length)
        group.allreduce([tensor], options()).wait()
        sizes = [int(key.rpartition("/")[2]) for key in group.keys]
        return tensor, sizes

    for tensor, sizes in cluster.run(work):
        assert torch.equal(tensor, 3 * torch.arange(length))
        assert all(size & (size - 1) == 0 and SMALLEST <= size <= LARGEST for size in sizes)


def test_values_of_one_worker_and_of_all(cluster: ThreadedJob) -> None:
    def work(group: StoreGroup) -> dict[str, Any]:
        rank, size = group.rank(), group.size()
        mine = torch.tensor([rank + 0.5, float("nan"), -0.0])
        sent = mine.clone()
        group.broadcast([sent], options(root=1)).wait()
        listed = [torch.zeros(3) for _ in range(size)]
        group.allgather([listed], [mine]).wait()
        flat = torch.zeros(size, dtype=torch.bool)
        group.all_gather_single(flat, torch.tensor([rank == 2])).wait()
        gathered = [torch.zeros(3) for _ in range(size)] if rank == 2 else []
        group.gather([gathered] if gathered else [], [mine], options(root=2)).wait()
        part = torch.zeros(1, dtype=torch.complex64)
        parts = [[torch.tensor([each + 1j]) for each in range(size)]] if rank == 1 else []
        group.scatter([part], parts, options(root=1)).wait()
        crossed = [torch.zeros(1) for _ in range(size)]
        group.alltoall(crossed, [torch.tensor([10.0 * rank + each]) for each in range(size)]).wait()
        group.barrier().wait()
        return {
            "sent": sent.view(torch.int32).tolist(),
            "listed": torch.stack(listed).view(torch.int32).tolist(),
            "flat": flat.tolist(),
            "gathered": [each[0].item() for each in gathered],
            "part": part.item(),
            "crossed": [each.item() for each in crossed],
        }

    rows = [torch.tensor([rank + 0.5, float("nan"), -0.0]).view(torch.int32).tolist() for rank in range(3)]
    for rank, found in enumerate(run(cluster, work)):
        assert found["sent"] == rows[1]
        assert found["listed"] == rows
        assert found["flat"] == [False, False, True]
        assert found["gathered"] == ([0.5, 1.5, 2.5] if rank == 2 else [])
        assert found["part"] == rank + 1j
        assert found["crossed"] == [10.0 * other + rank for other in range(3)]


def test_work_that_is_not_waited_for_at_once(cluster: ThreadedJob) -> None:
    def work(group: StoreGroup) -> None:
        first, second = torch.ones(5), torch.ones(5)  # of one size, and under way together
        works = [group.allreduce([tensor], options()) for tensor in (first, second.mul_(2))]
        while not works[1].is_completed():
            pass
        assert works[1].result()[0].tolist() == [6.0] * 5
        assert works[0].get_future().wait()[0] is first
        assert first.tolist() == [3.0] * 5
        together = group.allreduce_coalesced([first, second], options())
        together.wait()
        assert (first.tolist(), second.tolist()) == ([9.0] * 5, [18.0] * 5)

    run(cluster, work)


class Branches(nn.Module):
    """Of two branches, every other batch needs one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.one, self.other = nn.Linear(40, 2), nn.Linear(40, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.one(hidden) + self.other(hidden) if both else self.one(hidden)


def train(model: nn.Module, rank: int, size: int, static: bool) -> dict[str, torch.Tensor]:
    """The weights after three steps, each but the first of two backward passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    data = torch.Generator().manual_seed(0)
    for step in range(3):
        optimizer.zero_grad()
        for last in (False, True)[not step :]:
            x = torch.randn(12, 6, generator=data)[rank::size]
            with nullcontext() if last or size == 1 else model.no_sync():  # type: ignore[operator]
                model(x, static or step % 2 == 0).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", ["plain", "views", "static", "float16", "power_sgd"])
def test_ddp(cluster: ThreadedJob, how: str) -> None:
    """Whatever way DDP has to send its buckets, and to wait for them: one process with all data gets the same."""

    models = []
    for rank in range(3):
        torch.manual_seed(rank)  # DDP gives all workers rank 0's weights
        models.append(Branches())
    alone = train(deepcopy(models[0]), 0, 1, how == "static")

    def work(group: StoreGroup) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(
            models[group.rank()],
            process_group=group,
            bucket_cap_mb=0.0005,
            find_unused_parameters=how != "static",
            gradient_as_bucket_view=how == "views",
            static_graph=how == "static",
        )
        if how == "float16":
            model.register_comm_hook(group, fp16_compress_hook)
        if how == "power_sgd":  # waits for one sum in the callback of another
            state = PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.1)
            model.register_comm_hook(state, powerSGD_hook)
        return train(model, group.rank(), group.size(), how == "static")

    near = {"float16": 1e-3, "power_sgd": 1.0}.get(how, 1e-6)
    found = run(cluster, work)
    for name, value in alone.items():
        assert all(torch.equal(found[0][name], other[name]) for other in found)
        torch.testing.assert_close(found[0][name], value, rtol=near, atol=near)


def test_what_there_is_not(cluster: ThreadedJob) -> None:
    def work(group: StoreGroup) -> None:
        with pytest.raises(Unsupported, match=r"has SUM, AVG, MAX, MIN and PRODUCT alone, not .*BAND"):
            group.allreduce([torch.ones(1, dtype=torch.int64)], options(OPS.BAND))
        with pytest.raises(Unsupported, match="make the gradient dense"):
            group.allreduce([torch.eye(2).to_sparse()], options())
        with pytest.raises(Unsupported, match=r"send: .* has what DDP needs"):
            group.send([torch.ones(1)], 1, 0)

    run(cluster, work)


def test_a_worker_that_does_not_come_is_named_by_backward() -> None:
    def work(store: DistStore) -> None:
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=StoreGroup(store))
        for _ in range(2):  # DDP chooses its buckets anew in the second step
            model(torch.ones(1, 2)).sum().backward()
        if store.rank == 0:
            set_limits(store, 0.1)
            with pytest.raises(DeadlineExceeded, match="worker 1"):
                model(torch.ones(1, 2)).sum().backward()
            set_limits(store, LONG)
            late.set()
        else:
            late.wait(LONG)
            model(torch.ones(1, 2)).sum().backward()

    late = Event()
    with ThreadedJob(workers=2, servers=1) as cluster:
        cluster.run(work)


def test_outside_of_a_job_it_is_a_group_of_one() -> None:
    before = dict(os.environ)
    try:
        names: dict[str, Any] = {"DistributedDataParallel": DistributedDataParallel, "model": nn.Linear(2, 1)}
        exec(block("torch_distributed.init()"), names)
        assert (names["rank"], names["device"]) == torch_distributed.init() == (0, torch.device("cpu"))
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("kvstore", 0, 1)
        assert dict(os.environ) == before
        model = names["model"]
        model(torch.ones(3, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[3.0, 3.0]]
        objects = [{"name": 1}]
        dist.broadcast_object_list(objects)
        assert objects == [{"name": 1}]
        with pytest.raises(RuntimeError):  # gloo's members have nowhere to meet; and it says so at once
            dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()
        workers.shutdown()


def test_the_command_says_how_it_is_used() -> None:
    with pytest.raises(SystemExit, match=r"python -m workers.integrations train.py"):
        main(["--help"])


def test_another_group_is_an_error() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="a group of 'gloo' already"):
            torch_distributed.init()
    finally:
        dist.destroy_process_group()
        workers.shutdown()
