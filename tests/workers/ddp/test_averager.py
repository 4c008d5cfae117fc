"""Gradients that are averages when backward returns: of which backwards, of which parameters, of which dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaged import alone, batch, halve, loss_of, network, same, sgd, trained
from threaded import ThreadedJob
from torch import nn
from torch.utils.checkpoint import checkpoint

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import DistributedOptimizer
from workers.alike import Alike
from workers.ddp.averager import GradientAverager, counts_of


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
def test_gradients_of_several_backwards_add_up(pair: ThreadedJob, passes: int) -> None:
    """Of three backwards a step, however many the optimizer has been told of."""

    def thrice(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        loss_of(model, step + 50, rank).backward()
        loss_of(model, step + 60, rank).backward()
        optimizer.step()

    same(trained(pair, thrice, backward_passes_per_step=passes)[0], alone(thrice))


def test_backwards_in_no_sync_send_nothing(pair: ThreadedJob) -> None:
    def twice(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        if rank is None:
            loss_of(model, step, rank).backward()
        else:
            own = torch.autograd.grad(loss_of(model, step, rank), list(model.parameters()))
            with optimizer.no_sync():
                loss_of(model, step, rank).backward()
            assert all(map(torch.equal, own, (param.grad for param in model.parameters())))
        if step % 2:  # else it is for step to send
            loss_of(model, step + 50, rank).backward()
        optimizer.step()

    same(trained(pair, twice)[0], alone(twice))


def test_a_sum(pair: ThreadedJob) -> None:
    def summed(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        (loss_of(model, step, rank) * (2 if rank is None else 1)).backward()
        optimizer.step()

    same(trained(pair, summed, op=workers.Sum)[0], alone(summed))


def test_nothing_is_added_to_a_sum(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), kvstore=store, op="sum")
        loss_of(model, 0, store.rank).backward()
        model.zero_grad()
        loss_of(model, 1, store.rank).backward()  # adds to nothing
        with pytest.raises(kv.UsageError, match=r"a second backward.. adds to the gradient of"):
            loss_of(model, 2, store.rank).backward()
        optimizer.zero_grad()
        loss_of(model, 2, store.rank).backward()

    pair.run(work)


class Branches(nn.Module):
    """Each worker's loss depends on a part; nobody's on one of the layers; two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.first, self.second, self.nobody = (nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.both.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, rank: int | None) -> torch.Tensor:
        hidden = self.both(x).tanh()
        losses = [self.last(branch(hidden)).square().mean() for branch in (self.first, self.second)]
        return sum(losses) / 2 if rank is None else losses[rank]


def branch_step(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
    optimizer.zero_grad()
    model(batch(step)[0], rank).backward()
    optimizer.step()


def test_what_got_a_gradient_on_one_worker_counts_as_zeros_on_the_other(pair: ThreadedJob) -> None:
    one, _ = trained(pair, branch_step, build=Branches)
    same(one, alone(branch_step, build=Branches))
    assert one.nobody.weight.grad is None  # weight decay would have changed it
    assert torch.equal(one.nobody.weight, Branches().nobody.weight)


def test_a_worker_whose_loss_depends_on_nothing_takes_part(pair: ThreadedJob) -> None:
    def idle(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        if rank != 1:
            (loss_of(model, step, 0) * (1 if rank == 0 else 0.5)).backward()
        optimizer.step()

    same(trained(pair, idle)[0], alone(idle))


def test_gradients_that_no_backward_has_made_are_averaged_by_step(pair: ThreadedJob) -> None:
    def by_hand(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0 if rank is None else 1.0 + 2 * rank)
        optimizer.step()

    same(trained(pair, by_hand)[0], alone(by_hand))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_other_dtypes(pair: ThreadedJob, dtype: torch.dtype, atol: float) -> None:
    def build() -> nn.Module:
        return network(dtype)

    same(trained(pair, build=build)[0], alone(build=build), atol)


@pytest.mark.parametrize(
    ("how", "factor", "expected"),
    [({}, 60000.0, 60000.0), ({"op": workers.Sum}, 3.0, 6.0)],  # of 60,000 twice float16 cannot hold the sum
    ids=["mean", "sum"],
)
def test_half_precision(pair: ThreadedJob, how: dict[str, Any], factor: float, expected: float) -> None:
    def work(store: DistStore) -> torch.Tensor | None:
        param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=0.0), kvstore=store, **how)
        (param * factor).sum().backward()
        optimizer.step()
        return param.grad

    for grad in pair.run(work):
        assert torch.equal(grad, torch.full((2,), expected, dtype=torch.float16))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_half_precision_are_rounded_once(pair: ThreadedJob, dtype: torch.dtype, overlap: bool) -> None:
    # float16 is halved without an error only where it is not as small as this; bfloat16 has 8 bits.
    numbers = [[2.0**-24, 0.0], [3 * 2.0**-24, 40_000.0], [1.0, 60_000.0], [256.0, 0.5]]

    def work(store: DistStore) -> tuple[torch.Tensor, torch.Tensor]:
        half, plain = nn.Parameter(torch.zeros(4, dtype=dtype)), nn.Parameter(torch.zeros(4))
        optimizer = DistributedOptimizer(torch.optim.SGD([half, plain], lr=0.0), kvstore=store, overlap=overlap)
        mine = torch.tensor([both[store.rank] for both in numbers])
        for _ in range(2):
            optimizer.zero_grad()
            ((half * mine.to(dtype)).float().sum() + (plain * mine).sum()).backward()
            optimizer.step()
        assert half.grad is not None
        assert plain.grad is not None
        return half.grad, plain.grad

    both = torch.tensor(numbers)
    for half, plain in pair.run(work):
        assert torch.equal(half, both.to(dtype).float().mean(dim=1).to(dtype))
        assert torch.equal(plain, both.mean(dim=1))


def test_dtypes_and_layouts_mixed(pair: ThreadedJob) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2).double())
        return model.to(memory_format=torch.channels_last)

    def do(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        x = batch(step, rank)[0][:, :3, None, None].expand(-1, -1, 2, 2).contiguous(memory_format=torch.channels_last)
        model[2](model[1](model[0](x)).double()).square().mean().backward()
        optimizer.step()

    same(trained(pair, do, build=build)[0], alone(do, build=build))


def test_a_backward_inside_of_a_backward(pair: ThreadedJob) -> None:
    def checkpointed(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        x, y = batch(step, rank)
        hidden = checkpoint(model[1:4], model[0](x), use_reentrant=True)
        nn.functional.cross_entropy(model[4](hidden), y).backward()
        optimizer.step()

    same(trained(pair, checkpointed)[0], alone(checkpointed))


def halve_data(param: torch.Tensor) -> None:
    param.grad.data.mul_(0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("halve", [halve, halve_data])
def test_a_hook_that_changes_a_gradient_that_has_gone_is_an_error(
    pair: ThreadedJob, halve: Callable[[torch.Tensor], None]
) -> None:
    def halved(overlap: bool) -> Callable[[DistStore], torch.Tensor | None]:
        def work(store: DistStore) -> torch.Tensor | None:
            param = nn.Parameter(torch.ones(100))
            optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1), kvstore=store, overlap=overlap)
            param.register_post_accumulate_grad_hook(halve)
            (param * (1 + store.rank)).sum().backward()
            optimizer.step()
            return param.grad

        return work

    with pytest.raises(kv.UsageError, match=r"gradient of 'parameter 0' changed after it was sent; pass overlap=False"):
        pair.run(halved(True))
    for grad in pair.run(halved(False)):
        assert torch.equal(grad, torch.full((100,), 0.75))


def test_two_optimizers_whose_backwards_come_in_another_order_do_not_wait_for_each_other(pair: ThreadedJob) -> None:
    """Which of them hears of a backward first depends on the graph, which is another on each worker."""

    def work(session: Any) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        stores = [DistStore(session), DistStore(session)]
        optimizers = [
            DistributedOptimizer(torch.optim.SGD([param], lr=1), kvstore=store)
            for param, store in zip(params, stores, strict=True)
        ]
        outer, inner = params if session.rank else reversed(params)
        ((inner * 2).tanh() * outer).sum().backward()
        for optimizer, store in zip(optimizers, stores, strict=True):
            optimizer.step()
            store.close()
        return [param.detach() for param in params]

    one, two = pair.run_sessions(work)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))


def test_it_lets_go_of_the_parameters(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        inner = sgd(model.parameters())
        DistributedOptimizer(inner, kvstore=store)
        loss_of(model, 0, store.rank).backward()
        pushes = store.statistics().pushes
        loss_of(model, 0, store.rank).backward()
        assert store.statistics().pushes == pushes

    pair.run(work)


# ---- Sparse gradients of two workers with a DistributedOptimizer, against the optimizer itself with all samples


def embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2), nn.Embedding(9, 4, sparse=True))


def two_rates(params: Any) -> torch.optim.Optimizer:
    table, *rest = params
    return torch.optim.SGD([{"params": [table], "lr": 0.5}, {"params": rest}], lr=0.3)


def look_up(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
    optimizer.zero_grad()
    ids = batch(step, rank)[1]
    hidden = model[0](ids + 4 * step)
    if step:  # the second table has no gradient in the first step
        hidden = hidden + model[2](ids)
    model[1](hidden).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"overlap": False}])
def test_as_the_optimizer_alone(pair: ThreadedJob, options: dict[str, Any]) -> None:
    same(trained(pair, look_up, two_rates, embedding, **options)[0], alone(look_up, two_rates, embedding))


def test_sparse_adam(pair: ThreadedJob) -> None:
    def only(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        model(batch(step, rank)[1]).square().mean().backward()
        optimizer.step()

    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(5, 4, sparse=True)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(params, lr=0.1)

    same(trained(pair, only, make, table)[0], alone(only, make, table))


def test_a_gradient_that_only_one_worker_has(pair: ThreadedJob) -> None:
    def work(store: Any) -> list[Any]:
        model = embedding()
        params = dict(model.named_parameters())
        used = "/used"
        values = {name: param.detach() for name, param in params.items()}
        store.init([*values, used], [*values.values(), counts_of(len(params))])
        alike = Alike(torch.optim.SGD(params.values(), lr=1), store, "test")
        how: Any = {"average": False, "passes": 1, "sparse_as_dense": False, "overlap": True}
        averager = GradientAverager(params, store, used, alike, {*values, used}, **how)
        seen: list[Any] = []
        for reached in (store.rank == 1, True, False):
            model.zero_grad()
            averager.step_over()
            loss = model[1](torch.ones(4)).sum()
            if reached:
                loss = loss + model[0](torch.tensor([3 + store.rank, 3])).sum()
            loss.backward()
            grad = model[0].weight.grad
            seen.append(None if grad is None else (grad.indices().tolist(), grad.values()[:, 0].tolist()))
        return seen

    first, second = pair.run(work)
    assert first == second == [([[3, 4]], [1, 1]), ([[3, 4]], [3, 1]), None]
