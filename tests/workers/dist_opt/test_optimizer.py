"""DistOpt: every way to send against the same computed by hand in one process, alone and mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from singa import (
    OPTIONS,
    SIZES,
    STEPS,
    WORKERS,
    Half,
    Send,
    Sparse,
    alone,
    by_hand,
    loss_of,
    network,
    parameters,
    plain,
    same,
    top,
    weights,
    with_dist_opt,
)
from threaded import ThreadedJob
from torch import Tensor, nn

import kvstore as kv
from kvstore.client import DistStore
from kvstore.member.session import Session
from workers import DistOpt, group
from workers.dist_opt.channels import fuse


@pytest.mark.parametrize("threshold", [2097152, 8, 0])
def test_the_plain_way_is_the_mean_of_gradients(run: Any, threshold: int) -> None:
    results = run(with_dist_opt(lambda sgd, loss, step: sgd.backward_and_update(loss, threshold=threshold)))
    same(results, by_hand([plain] * STEPS))


def test_calling_it_is_the_plain_way(run: Any) -> None:
    same(run(with_dist_opt(lambda sgd, loss, step: sgd(loss))), by_hand([plain] * STEPS))


def test_any_optimizer_will_do(run: Any) -> None:
    def work(rank: int) -> Tensor:
        model = network()
        adam = DistOpt(torch.optim.Adam(model.parameters()), "dist_sync")
        for step in range(STEPS):
            adam.backward_and_update(loss_of(model, rank, step))
        return weights(model)

    same(run(work), by_hand([plain] * STEPS, torch.optim.Adam))


@pytest.mark.parametrize(
    "send",
    [
        lambda sgd, loss: sgd.backward_and_update(loss),
        lambda sgd, loss: sgd.backward_and_sparse_update(loss, spars=1e-3),
        lambda sgd, loss: sgd.backward_and_sparse_update(loss, spars=1.0, topK=True),
    ],
    ids=["plain", "sparse", "topk"],
)
def test_means_of_float16_parameters_come_from_sums_that_float16_cannot_hold(
    run: Any, send: Callable[[DistOpt, Tensor], None]
) -> None:
    def work(rank: int) -> Tensor | None:
        param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        sgd = DistOpt(torch.optim.SGD([param], lr=2.0**-12), "dist_sync")
        send(sgd, (param * torch.tensor([40_000.0, 0.5], dtype=torch.float16)).sum())
        assert param.detach().tolist() == [-40_000 / 4096, -0.5 / 4096]
        return param.grad

    for grad in run(work):
        assert torch.equal(grad, torch.tensor([40_000.0, 0.5], dtype=torch.float16))


def test_half(run: Any) -> None:
    half = Half()
    results = run(with_dist_opt(lambda sgd, loss, step: sgd.backward_and_update_half(loss, threshold=8)))
    same(results, by_hand([half] * STEPS))
    assert half.kept[0][1].abs().max() > 0, "rounding has lost something here"


def test_half_with_clipping(run: Any) -> None:
    half = Half()

    def clipped(grads: list[list[Tensor]]) -> list[Tensor]:
        return half([[grad.clamp(-0.01, 0.01) for grad in its] for its in grads])

    results = run(
        with_dist_opt(lambda sgd, loss, step: sgd.backward_and_update_half(loss, clipping=True, clip_Value=0.01))
    )
    same(results, by_hand([clipped] * STEPS))
    assert not torch.allclose(results[0], by_hand([plain] * STEPS), atol=1e-3), "and it makes a difference here"


@pytest.mark.parametrize(
    ("topK", "corr", "threshold"),
    [(True, True, 20), (True, False, 2097152), (False, True, 2097152), (False, False, 20)],
)
def test_sparse(run: Any, topK: bool, corr: bool, threshold: int) -> None:  # noqa: N803
    spars = 0.1 if topK else 0.05
    choose = top(spars) if topK else lambda flat: flat.abs() >= spars
    how: dict[str, Any] = {"threshold": threshold, "spars": spars, "topK": topK, "corr": corr}
    results = run(with_dist_opt(lambda sgd, loss, step: sgd.backward_and_sparse_update(loss, **how)))
    same(results, by_hand([Sparse(choose, fuse(SIZES, threshold), corr)] * STEPS))


def test_sparse_sends_little_both_ways_and_has_an_older_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create, made = kv.create, [[] for _ in range(WORKERS)]

    def noting(name: str) -> kv.KVStore:
        store = create(name)
        made[store.rank].append(store)
        return store

    monkeypatch.setattr(kv, "create", noting)

    def work(rank: int) -> tuple[int, int]:
        model = nn.Linear(100, 100)
        sgd = DistOpt(torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync")
        for _ in range(2):
            sgd.backward_and_spars_update(model(torch.randn(4, 100)).square().mean(), spars=0.01, topK=True)
        _, compressed = made[rank]
        statistics = compressed.statistics()
        return statistics.bytes_pushed, statistics.bytes_pulled

    for pushed, pulled in run(work):
        assert pushed < 2 * 1000 + 100
        assert pulled < 2 * WORKERS * 1000 + 200


@pytest.mark.parametrize("threshold", [2097152, 20])
def test_partial_averages_one_partition_a_step(run: Any, threshold: int) -> None:
    models = [network() for _ in range(WORKERS)]
    opts = [torch.optim.SGD(model.parameters(), **OPTIONS) for model in models]
    partitions = fuse(SIZES, threshold)
    assert len(partitions) == (1 if threshold > 100 else 3)
    for step in range(STEPS):
        for rank, (model, opt) in enumerate(zip(models, opts, strict=True)):
            opt.zero_grad()
            loss_of(model, rank, step).backward()
            opt.step()
        for i in partitions[step % len(partitions)]:
            its = [parameters(model)[i] for model in models]
            mean = torch.stack([param.detach() for param in its]).mean(0)
            for param in its:
                param.data.copy_(mean)
    results = run(with_dist_opt(lambda sgd, loss, step: sgd.backward_and_partial_update(loss, threshold)))
    for result, model in zip(results, models, strict=True):
        torch.testing.assert_close(result, weights(model), rtol=0, atol=1e-6)
    assert torch.equal(*results) == (len(partitions) == 1)


def test_each_way_keeps_what_it_holds_back_while_others_are_used(run: Any) -> None:
    ways: list[tuple[Send, Callable[[DistOpt, Tensor], None]]] = [
        (plain, lambda sgd, loss: sgd.backward_and_update(loss)),
        (Half(), lambda sgd, loss: sgd.backward_and_update_half(loss)),
        (
            Sparse(top(0.1), [[0, 1, 2, 3]], True),
            lambda sgd, loss: sgd.backward_and_sparse_update(loss, spars=0.1, topK=True),
        ),
        (
            Sparse(lambda flat: flat.abs() >= 0.05, [[0, 1, 2, 3]], True),
            lambda sgd, loss: sgd.backward_and_sparse_update(loss),
        ),
    ]
    steps = 3 * len(ways)
    results = run(with_dist_opt(lambda sgd, loss, step: ways[step % len(ways)][1](sgd, loss), steps))
    same(results, by_hand([ways[step % len(ways)][0] for step in range(steps)]))


def test_after_partial_updates_another_way_makes_workers_equal_and_they_stay_so(run: Any) -> None:
    def call(sgd: DistOpt, loss: Tensor, step: int) -> None:
        if step < 2:
            sgd.backward_and_partial_update(loss, threshold=20)
        else:
            sgd.backward_and_update(loss)

    before = run(with_dist_opt(call, 2))
    assert not torch.equal(*before)
    (first, second), (later, also) = run(with_dist_opt(call, 3)), run(with_dist_opt(call, 5))
    assert torch.equal(first, second)
    assert torch.equal(later, also)
    moved = (first - torch.stack(before).mean(0)).norm()
    assert 0 < moved < 0.5 * first.norm(), "one step away from the mean of what they were"


def test_gradients_of_several_batches_and_their_own_backward(run: Any) -> None:
    def work(rank: int) -> Tensor:
        model = network()
        sgd = DistOpt(torch.optim.SGD(model.parameters(), **OPTIONS), "dist_sync")
        for step in range(2):
            sgd.opt.zero_grad()
            for _ in range(2):
                (loss_of(model, rank, step) / 2).backward()
            sgd.step()
        return weights(model)

    same(run(work), by_hand([plain] * 2))


def test_updates_of_one_parameter_at_a_time(run: Any) -> None:
    def work(rank: int) -> tuple[Tensor, list[Any]]:
        model = network()
        sgd = DistOpt(torch.optim.SGD(model.parameters(), **OPTIONS), "dist_sync")
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            for param in parameters(model):
                sgd.all_reduce(param.grad)
                sgd.update(param, param.grad)
            sgd.step()  # SINGA's loops call it too: nothing is left to do
        return weights(model), [param.grad for param in parameters(model)]

    results = run(work)
    same([result for result, _ in results], by_hand([plain] * STEPS))
    assert results[0][1] == [None] * len(SIZES)


def test_what_no_loss_depends_on_is_left_alone_and_what_some_does_counts(run: Any) -> None:
    def work(rank: int) -> list[float]:
        used, half_used, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        sgd = DistOpt(torch.optim.SGD([used, half_used, unused], lr=1.0, weight_decay=0.5), "dist_sync")
        loss = used.sum() + (half_used.sum() if rank == 0 else 0.0)
        sgd.backward_and_update(loss)
        assert unused.grad is None
        return [float(param.detach()[0]) for param in (used, half_used, unused)]

    assert run(work) == [[-0.5, 0.0, 1.0]] * 2


def test_frozen_parameters_get_rank_0s_values_and_stay(run: Any) -> None:
    def work(rank: int) -> Tensor:
        model = network(seed=rank)
        model[0].weight.requires_grad_(False)
        sgd = DistOpt(torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync")
        for step in range(2):
            sgd.backward_and_sparse_update(loss_of(model, rank, step))
        return model[0].weight.detach()

    same([result.flatten() for result in run(work)], network()[0].weight.detach().flatten())


@pytest.mark.parametrize("given", [{"nccl_id": 1, "gpu_num": 0, "gpu_per_node": 2}, {"local_rank": 0}], ids=str)
def test_singas_arguments_for_starting_processes(given: dict[str, Any]) -> None:
    with pytest.raises(kv.UsageError, match=rf"and no {', '.join(given)}: launch\.py, .* starts the processes"):
        DistOpt(torch.optim.SGD(network().parameters(), lr=0.1), **given)


def test_a_store_that_updates_or_serves_another() -> None:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    updating = kv.create("local")
    updating.set_optimizer("sgd", learning_rate=0.1)
    with pytest.raises(kv.UsageError, match="has an optimizer or updater"):
        DistOpt(opt, updating)
    store = kv.create("local")
    DistOpt(opt, store)
    with pytest.raises(kv.UsageError, match=r"make a second one with kvstore.create"):
        DistOpt(opt, store)


def test_arguments_that_are_out_of_range() -> None:
    model, sgd = alone()
    loss = loss_of(model, 0, 0)
    with pytest.raises(
        kv.UsageError, match=r"spars=1.5 must be the part of the elements to send, above 0 and at most 1"
    ):
        sgd.backward_and_sparse_update(loss, spars=1.5, topK=True)
    with pytest.raises(kv.UsageError, match=r"spars=0 must be the magnitude from which elements are sent"):
        sgd.backward_and_sparse_update(loss, spars=0)
    with pytest.raises(kv.UsageError, match=r"clip_Value=0 must be positive and finite"):
        sgd.backward_and_update_half(loss, clipping=True, clip_Value=0)
    with pytest.raises(kv.UsageError, match=r"threshold=-1 must be an integer, at least 0"):
        sgd.backward_and_partial_update(loss, threshold=-1)
    with pytest.raises(kv.UsageError, match="loss must be a tensor that was computed from the parameters, not float"):
        sgd.backward_and_update(0.5)  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match=r"no such parameter, of shape \[2\]"):
        sgd.update(torch.ones(2), torch.ones(2))
    assert torch.equal(weights(model), weights(network())), "nothing has changed"


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model, sgd = alone()
    with pytest.raises(kv.UsageError, match="infinite or NaN"):
        sgd.backward_and_update_half(loss_of(model, 0, 0) * float("nan"))
    assert torch.equal(weights(model), weights(network()))


# ---- Which values go together, and what compression takes away where nothing is sent


def test_small_ones_gather_until_they_are_more_than_the_threshold_and_large_ones_go_alone() -> None:
    assert fuse([5, 5, 100, 5, 5, 5], 9) == [[0, 1], [2], [3, 4], [5]]
    assert fuse([5, 5, 100, 5], 100) == [[0, 1, 2], [3]]
    assert fuse([5, 5], 5) == [[0, 1]], "as large as the threshold is not larger"
    assert fuse([5, 5], 0) == [[0], [1]]
    assert fuse([5, 5], 1000) == [[0, 1]]


def test_in_one_process_gradients_become_what_they_would_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a job of one worker, which does send them."""
    ways: list[Callable[[DistOpt, Tensor], None]] = [
        lambda sgd, loss: sgd.backward_and_update_half(loss),
        lambda sgd, loss: sgd.backward_and_sparse_update(loss, spars=0.1, topK=True),
        lambda sgd, loss: sgd.backward_and_sparse_update(loss, corr=False),
        lambda sgd, loss: sgd.backward_and_partial_update(loss, threshold=20),
    ]

    def train() -> Tensor:
        model = network()
        sgd = DistOpt(torch.optim.SGD(model.parameters(), **OPTIONS))
        for step in range(3 * len(ways)):
            ways[step % len(ways)](sgd, loss_of(model, 0, step))
        assert (sgd.world_size, sgd.rank_in_global, sgd.rank_in_local) == (1, 0, 0)
        return weights(model)

    try:
        alone = train()
        assert group.store().type == "device"
    finally:
        group.shutdown()
    with ThreadedJob(workers=1, servers=1) as cluster:
        monkeypatch.setattr(group, "is_initialized", lambda: True)

        def in_job(session: Session) -> Tensor:
            monkeypatch.setattr(group, "new_store", lambda *_: DistStore(session))
            return train()

        (sent,) = cluster.run_sessions(in_job)
    assert torch.equal(alone, sent)
    assert not torch.allclose(alone, weights(network()), atol=1e-2)


# ---- Sums of anything over workers, and who they are


def test_sums_of_anything(run: Any) -> None:
    def work(rank: int) -> list[Any]:
        sgd = DistOpt(torch.optim.SGD(network().parameters(), lr=0.1), "dist_sync")
        tensor, array = torch.full((2, 2), rank + 1.0), np.array([rank + 1.0])
        ones = [torch.full((3,), float(i)) for i in range(2)]
        sgd.all_reduce(tensor.data)
        sgd.all_reduce(array)
        sgd.fused_all_reduce(ones, send=False)
        sgd.fused_all_reduce(ones)
        half, large = torch.tensor([2048.0, 1.0]), torch.tensor([60000.0])
        sgd.all_reduce_half(half)
        half += 1  # float16 has no 4097
        sgd.fused_all_reduce_half([half, large])
        sgd.wait()
        return [tensor.tolist(), array.tolist(), [one.tolist() for one in ones], half.tolist(), large.tolist()]

    expected = [[[3.0] * 2] * 2, [3.0], [[0.0] * 3, [2.0] * 3], [8192.0, 6.0], [float("inf")]]
    assert run(work) == [expected] * 2


def test_who_is_there(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> tuple[int, ...]:
        sgd = DistOpt(torch.optim.SGD(network().parameters(), lr=0.1), "dist_sync")
        return sgd.world_size, sgd.rank_in_global, sgd.global_rank, sgd.rank_in_local, sgd.local_rank

    with pytest.raises(kv.UsageError, match="KVSTORE_LOCAL_RANK is not set"):
        run(work)
    monkeypatch.setenv("KVSTORE_LOCAL_RANK", "4")
    assert run(work) == [(2, 0, 0, 4, 4), (2, 1, 1, 4, 4)]


# ---- The gradients that are sent: of which parameters, and which cannot be


def test_not_an_optimizer() -> None:
    with pytest.raises(kv.UsageError, match=r"such as torch.optim.SGD\(model.parameters\(\), lr=0.005\), not str"):
        DistOpt("sgd")  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="no parameter that requires a gradient"):
        DistOpt(torch.optim.SGD([torch.ones(2)], lr=0.1), "local")


def test_workers_with_other_parameters(run: Any) -> None:
    def work(rank: int) -> None:
        model = nn.Linear(2, 2 + rank)
        with pytest.raises(kv.Mismatch, match=f"worker {1 - rank}'s optimizer has different parameters"):
            DistOpt(torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync")

    run(work)


def test_parameters_that_came_later_and_sparse_gradients() -> None:
    model, sgd = alone()
    sgd.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(kv.UsageError, match="the optimizer's parameters have changed"):
        sgd.backward_and_update(loss_of(model, 0, 0))
    model, sgd = alone()
    next(model.parameters()).requires_grad_(False)
    for call in (sgd.backward_and_update, sgd.backward_and_partial_update):
        with pytest.raises(kv.UsageError, match=r"requires_grad has changed, of \d of shape .* make a new DistOpt"):
            call(loss_of(model, 0, 0))
    table = nn.Embedding(3, 2, sparse=True)
    sgd = DistOpt(torch.optim.SGD(table.parameters(), lr=0.1), "local")
    with pytest.raises(
        kv.UsageError, match=r"a parameter of shape \[3, 2\] is sparse: create its layer with sparse=False"
    ):
        sgd.backward_and_update(table(torch.tensor([1])).sum())
