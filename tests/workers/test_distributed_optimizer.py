"""DistributedOptimizer in jobs made of threads: two workers do as one does with both their batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from torch.utils.checkpoint import checkpoint

import kvstore as kv
import workers
from kvstore.dist import DistStore
from workers import DistributedOptimizer

STEPS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.common.buckets.FIRST_BYTES", 64)
    monkeypatch.setattr("workers.common.buckets.BUCKET_BYTES", 200)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step, or those of one of two workers."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    return (x, y) if rank is None else (x[rank::2], y[rank::2])


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)


Step = Callable[[nn.Module, Any, int, "int | None"], None]


def plain_step(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


def pair(
    cluster: ThreadedJob,
    do: Step = plain_step,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    build: Callable[[], nn.Module] = network,
    **options: Any,
) -> list[nn.Module]:
    """Both workers' models after ``STEPS`` steps; they are the same to the bit."""
    models = [build(), build()]
    makers = [make(model.parameters()) for model in models]  # not in threads: torch's first optimizer imports a lot

    def work(store: DistStore) -> None:
        optimizer = DistributedOptimizer(makers[store.rank], kvstore=store, **options)
        for step in range(STEPS):
            do(models[store.rank], optimizer, step, store.rank)

    cluster.run(work)
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, two)
    return models


def alone(
    do: Step = plain_step,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    build: Callable[[], nn.Module] = network,
) -> nn.Module:
    """What the optimizer itself makes of it, with all samples."""
    model = build()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        do(model, optimizer, step, None)
    return model


def same(one: nn.Module, two: nn.Module, atol: float = 1e-6) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


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


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
def test_gradients_of_several_backwards_add_up(cluster: ThreadedJob, passes: int) -> None:
    """Of three backwards a step, however many the optimizer has been told of."""

    def thrice(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        loss_of(model, step + 50, rank).backward()
        loss_of(model, step + 60, rank).backward()
        optimizer.step()

    same(pair(cluster, thrice, backward_passes_per_step=passes)[0], alone(thrice))


def test_backwards_in_no_sync_send_nothing(cluster: ThreadedJob) -> None:
    def twice(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        if rank is None:
            loss_of(model, step, rank).backward()
        else:
            with optimizer.no_sync():
                loss_of(model, step, rank).backward()
            assert optimizer._gradients is not None
            assert not optimizer._gradients.final
        if step % 2:  # else it is for step to send
            loss_of(model, step + 50, rank).backward()
        optimizer.step()

    same(pair(cluster, twice)[0], alone(twice))


def test_a_sum(cluster: ThreadedJob) -> None:
    def summed(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        (loss_of(model, step, rank) * (2 if rank is None else 1)).backward()
        optimizer.step()

    same(pair(cluster, summed, op=workers.Sum)[0], alone(summed))


def test_nothing_is_added_to_a_sum(cluster: ThreadedJob) -> None:
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

    cluster.run(work)


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


def test_what_got_a_gradient_on_one_worker_counts_as_zeros_on_the_other(cluster: ThreadedJob) -> None:
    one, _ = pair(cluster, branch_step, build=Branches)
    same(one, alone(branch_step, build=Branches))
    assert one.nobody.weight.grad is None  # weight decay would have changed it
    assert torch.equal(one.nobody.weight, Branches().nobody.weight)


def test_a_worker_whose_loss_depends_on_nothing_takes_part(cluster: ThreadedJob) -> None:
    def idle(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        if rank != 1:
            (loss_of(model, step, 0) * (1 if rank == 0 else 0.5)).backward()
        optimizer.step()

    same(pair(cluster, idle)[0], alone(idle))


def test_gradients_that_no_backward_has_made_are_averaged_by_step(cluster: ThreadedJob) -> None:
    def by_hand(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0 if rank is None else 1.0 + 2 * rank)
        optimizer.step()

    same(pair(cluster, by_hand)[0], alone(by_hand))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_other_dtypes(cluster: ThreadedJob, dtype: torch.dtype, atol: float) -> None:
    def build() -> nn.Module:
        return network(dtype)

    same(pair(cluster, build=build)[0], alone(build=build), atol)


def test_a_mean_of_float16_may_come_from_a_sum_that_float16_cannot_hold(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> torch.Tensor | None:
        param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=0.0), kvstore=store)
        (param * 60000.0).sum().backward()
        optimizer.step()
        return param.grad

    for grad in cluster.run(work):
        assert torch.equal(grad, torch.full((2,), 60000.0, dtype=torch.float16))


def test_dtypes_and_layouts_mixed(cluster: ThreadedJob) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2).double())
        return model.to(memory_format=torch.channels_last)

    def do(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        x = batch(step, rank)[0][:, :3, None, None].expand(-1, -1, 2, 2).contiguous(memory_format=torch.channels_last)
        model[2](model[1](model[0](x)).double()).square().mean().backward()
        optimizer.step()

    same(pair(cluster, do, build=build)[0], alone(do, build=build))


def embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 4, sparse=True))


def look_up(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
    optimizer.zero_grad()
    model(batch(step, rank)[1]).square().mean().backward()
    optimizer.step()


def test_sparse_gradients_are_dense_or_an_error(cluster: ThreadedJob) -> None:
    def dense(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.3)

    same(pair(cluster, look_up, dense, embedding, sparse_as_dense=True)[0], alone(look_up, dense, embedding))
    with pytest.raises(kv.UsageError, match=r"gradient of 'parameter 0' is sparse: pass sparse_as_dense=True"):
        pair(cluster, look_up, dense, embedding)


def test_a_backward_inside_of_a_backward(cluster: ThreadedJob) -> None:
    def checkpointed(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        x, y = batch(step, rank)
        hidden = checkpoint(model[1:4], model[0](x), use_reentrant=True)
        nn.functional.cross_entropy(model[4](hidden), y).backward()
        optimizer.step()

    same(pair(cluster, checkpointed)[0], alone(checkpointed))


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


def test_parameters_that_are_unfrozen_are_an_error(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        model[0].requires_grad_(False)
        optimizer = DistributedOptimizer(sgd(model.parameters()), list(model.named_parameters()), kvstore=store)
        plain_step(model, optimizer, 0, store.rank)
        model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, 1, store.rank).backward()
        with pytest.raises(kv.UsageError, match=r"'0.weight' has a gradient now .* make it anew"):
            optimizer.step()

    cluster.run(work)


@torch.no_grad()
def halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def test_a_hook_that_changes_a_gradient_that_has_gone_is_an_error(cluster: ThreadedJob) -> None:
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
        cluster.run(halved(True))
    for grad in cluster.run(halved(False)):
        assert torch.equal(grad, torch.full((100,), 0.75))


def test_two_optimizers_whose_backwards_come_in_another_order_do_not_wait_for_each_other(cluster: ThreadedJob) -> None:
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

    one, two = cluster.run_sessions(work)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))


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
        ([{}, {}], [2, 3], "worker . has other parameters|worker .'s optimizer has other parameters"),
        ([{"op": "sum"}, {}], [2, 2], "another op"),
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


def test_it_lets_go_of_the_parameters(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        inner = sgd(model.parameters())
        DistributedOptimizer(inner, kvstore=store)
        loss_of(model, 0, store.rank).backward()
        pushes = store.statistics().pushes
        loss_of(model, 0, store.rank).backward()
        assert store.statistics().pushes == pushes

    cluster.run(work)


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
