"""What of torch works with which way to train: the table in docs/training.md, each row of it on two workers.

Every row is a training that two workers with half of each batch must end as torch alone does with all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import workers
from kvstore import UnknownName, UsageError
from kvstore.client import DistStore
from workers.integrations.torch_distributed import StoreGroup

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
SGD = {"lr": 0.1, "momentum": 0.9}
_seeding = Lock()  # the generator is everybody's, and workers are threads here


class Loop:
    """A training loop of torch alone, and of each way to train."""

    def __init__(self, model: nn.Module, optimizer: Any, step: Callable[..., Any], forward: Any = None) -> None:
        self.scaler: Any = None
        self.last = True
        self.after_step: Callable[[], None] = lambda: None
        self.bare, self.model, self.optimizer, self.step = model, forward or model, optimizer, step


def alone(model: nn.Module, _store: DistStore | None, make: Any) -> Loop:
    optimizer = make(model.parameters())
    return Loop(model, optimizer, optimizer.step)


def on_servers(model: nn.Module, store: DistStore | None, make: Any) -> Loop:
    trainer = workers.Trainer(model.named_parameters(), make(model.parameters()), kvstore=store)
    return Loop(model, trainer.optimizer, trainer.optimizer.step)


def in_workers(model: nn.Module, store: DistStore | None, make: Any) -> Loop:
    optimizer = make(model.parameters())
    trainer = workers.Trainer(model.named_parameters(), optimizer, kvstore=store, update_on_kvstore=False)
    return Loop(model, trainer.optimizer, trainer.optimizer.step)


def distributed(model: nn.Module, store: DistStore | None, make: Any) -> Loop:
    optimizer = workers.DistributedOptimizer(make(model.parameters()), model, kvstore=store)
    return Loop(model, optimizer, optimizer.step)


def averaged(model: nn.Module, store: DistStore | None, make: Any) -> Loop:
    optimizer = make(model.parameters())
    averaging = workers.PeriodicAveraging(model, optimizer, store or "auto", sync_every=1)
    loop = Loop(model, optimizer, averaging.step)
    loop.after_step = averaging.after_step
    return loop


def ddp(model: nn.Module, store: DistStore | None, make: Any) -> Loop:
    assert store is not None
    wrapped = DistributedDataParallel(model, process_group=StoreGroup(store))
    optimizer = make(model.parameters())
    return Loop(model, optimizer, optimizer.step, wrapped)


WAYS = {
    "`Trainer`": on_servers,
    "`Trainer(update_on_kvstore=False)`": in_workers,
    "`DistributedOptimizer`": distributed,
    "`PeriodicAveraging`": averaged,
    "DDP": ddp,
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **SGD)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        result: torch.Tensor = checkpoint(lambda h: self.last(h.tanh()), hidden, use_reentrant=False)
        return result


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.two(self.one(x).tanh()))
        return result


def frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index, union-attr]
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))


Act = Callable[[Loop, int, torch.Tensor, torch.Tensor], None]


def plain(loop: Loop, _step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    loop.optimizer.zero_grad()
    cross_entropy(loop.model(x), y).backward()
    loop.step()


def compiled(loop: Loop, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    if step == 0:
        loop.model = torch.compile(loop.model, backend="eager")
    plain(loop, step, x, y)


def functional(loop: Loop, _step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    params = {name: param.detach() for name, param in loop.bare.named_parameters()}
    grads = grad(lambda given: cross_entropy(functional_call(loop.bare, given, x), y))(params)
    for name, param in loop.bare.named_parameters():
        param.grad = grads[name]
    loop.step()


def unfreeze(loop: Loop, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    if step == 2:
        loop.bare[0].requires_grad_()  # type: ignore[index]
    plain(loop, step, x, y)


def add(loop: Loop, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    if step == 2:
        loop.bare.added = nn.Parameter(torch.ones(3))
        loop.optimizer.add_param_group({"params": [loop.bare.added]})
    loop.optimizer.zero_grad()
    cross_entropy(loop.model(x) * getattr(loop.bare, "added", 1.0), y).backward()
    loop.step()


def closure(loop: Loop, _step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    def evaluate() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = cross_entropy(loop.model(x), y)
        loss.backward()
        return loss

    loop.step(evaluate)


def scaled(loop: Loop, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """In step 1 the gradients of the last worker overflow, and of no other."""
    if step == 0:
        loop.scaler = torch.amp.GradScaler("cpu")
    loop.optimizer.zero_grad()
    loss = cross_entropy(loop.model(x), y)
    loop.scaler.scale(loss * float("inf") if step == 1 and loop.last else loss).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.after_step()


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


ROWS: dict[str, tuple[Callable[[], nn.Module], Act, Any]] = {
    "`torch.compile`": (network, compiled, sgd),
    "`GradScaler`, overflow on one worker": (network, scaled, sgd),
    "activation checkpointing": (Checkpointed, plain, sgd),
    "`torch.func`": (network, functional, sgd),
    "tied weights": (Tied, plain, sgd),
    "frozen layers, unfrozen later": (frozen, unfreeze, sgd),
    "parameters added later": (network, add, sgd),
    "`nn.LazyLinear`, not yet called": (lazy, plain, sgd),
    "closures": (network, closure, sgd),
    "`LBFGS`": (network, closure, lbfgs),
}


# tests/workers/integrations/tools_script.py has these.
IN_A_JOB = ["`DataLoader` with `fork`, `spawn` and `forkserver`", "`torch.distributed.checkpoint`"]
BATCH_NORM = "running statistics of BatchNorm"


def table() -> dict[str, dict[str, str]]:
    """The cells of the page's table, by row and column."""
    lines = PAGE.read_text().partition("## What of torch works\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[1:]}


def train(row: str, way: Any, store: DistStore | None) -> dict[str, torch.Tensor]:
    make, act, optimizer = ROWS[row]
    rank, size = (0, 1) if store is None else (store.rank, store.num_workers)
    with _seeding:
        torch.manual_seed(rank)
        model = make()
    loop = way(model, store, optimizer)
    loop.last = rank == size - 1
    for step in range(4):
        data = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data)
        act(loop, step, x[rank::size], y[rank::size])
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.fixture(autouse=True)
def no_forward_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch notes which DDP module runs for the process, not for the thread, and puts back what was there before. Two
    # workers that are threads leave the other's module behind, and models compiled later would be cut as that one.
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)


def test_every_row_of_the_page_has_a_test() -> None:
    assert list(table()) == [*ROWS, *IN_A_JOB, BATCH_NORM]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS)
def test_row(pair: ThreadedJob, row: str, way: str) -> None:
    said = table()[row][way]

    def work(store: DistStore) -> dict[str, torch.Tensor]:
        if said.startswith("error"):
            with pytest.raises((UsageError, UnknownName, RuntimeError)):  # torch's, of DDP
                train(row, WAYS[way], store)
            return {}
        return train(row, WAYS[way], store)

    if said.startswith("untested"):
        return
    found = pair.run(work)
    wanted = {} if said.startswith("error") else train(row, alone, None)
    # A search along the loss makes rounding errors larger.
    same = all(torch.allclose(wanted[name], each[name], rtol=0, atol=1e-5) for each in found for name in wanted)
    assert same == (not said.startswith("no"))


@pytest.mark.parametrize("way", WAYS)
def test_batch_norm(pair: ThreadedJob, way: str) -> None:
    """Weights are equal; running statistics are each worker's until something averages them."""

    models: dict[int, nn.Module] = {}

    def work(store: DistStore) -> tuple[torch.Tensor, torch.Tensor]:
        with _seeding:
            torch.manual_seed(store.rank)
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        models[store.rank] = model
        loop = WAYS[way](model, store, sgd)
        for _ in range(2):
            x = torch.randn(6, 6, generator=torch.Generator().manual_seed(store.rank))
            plain(loop, 0, x, torch.arange(6) % 3)
        return model[0].weight.detach(), model.state_dict()["1.running_mean"].clone()

    (weight, own), (weight_1, own_1) = pair.run(work)
    assert torch.equal(weight, weight_1)
    assert torch.equal(own, own_1) == table()[BATCH_NORM][way].startswith("averaged")
    pair.run(lambda store: workers.Reducer.over(store).average_buffers(models[store.rank]))
    assert torch.equal(*(models[rank].state_dict()["1.running_mean"] for rank in range(2)))


def test_dist_opt_says_what_it_cannot_take() -> None:
    with pytest.raises(UsageError, match="without a closure, which LBFGS needs"):
        workers.DistOpt(lbfgs(network().parameters()), "local")
    with pytest.raises(UsageError, match="has no shape yet"):
        workers.DistOpt(sgd(lazy().parameters()), "local")
