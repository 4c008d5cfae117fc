"""Replicas that update by themselves begin alike, stay alike, and are alike again after uneven batches."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from singa import network
from threaded import ThreadedJob, shared_job
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from kvstore.member.session import Session
from kvstore.rule import Rule
from workers import DiLoCo, DistOpt, DistributedOptimizer, PartialSync, PeriodicAveraging, Trainer

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


three = shared_job(workers=3, servers=1)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.common.buckets.FIRST_BYTES", 64)
    monkeypatch.setattr("workers.common.buckets.BUCKET_BYTES", 200)


@pytest.fixture(autouse=True)
def _stores_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    create = kv.create
    monkeypatch.setattr(kv, "create", lambda n: DistStore(here.session, n) if n.startswith("dist") else create(n))


here = threading.local()  # the session of the worker that a thread is


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + 10 * step + rank)
    x, y = torch.randn(6, 6, generator=generator), torch.randint(3, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All values of a replica, as plain lists, which compare to the bit."""
    states = [dict(optimizer.state.get(param, {})) for param in model.parameters()]
    flat = [{n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in sorted(s.items())} for s in states]
    groups = [
        {n: float(v) if isinstance(v, torch.Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]
    return [[param.tolist() for param in model.parameters()], flat, groups]


def close(one: list[torch.Tensor], two: list[torch.Tensor], atol: float = 1e-6) -> None:
    for ours, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def wrapped(model: nn.Module, inner: torch.optim.Optimizer, store: Any) -> Callable[[int, int], None]:
    optimizer = DistributedOptimizer(inner, model.named_parameters(), kvstore=store)

    def step(number: int, rank: int) -> None:
        optimizer.zero_grad()
        loss_of(model, number, rank).backward()
        optimizer.step()

    step.join = optimizer.join  # type: ignore[attr-defined]
    return step


def singa(way: str, **options: Any) -> Callable[[nn.Module, torch.optim.Optimizer, Any], Callable[[int, int], None]]:
    def make(model: nn.Module, inner: torch.optim.Optimizer, store: Any) -> Callable[[int, int], None]:
        optimizer = DistOpt(inner, kvstore=store)

        def step(number: int, rank: int) -> None:
            getattr(optimizer, way)(loss_of(model, number, rank), **options)

        step.join = optimizer.join  # type: ignore[attr-defined]
        return step

    return make


BOTH = pytest.mark.parametrize("make", [wrapped, singa("backward_and_update")], ids=["DistributedOptimizer", "DistOpt"])


# ---- how they begin


@BOTH
def test_all_begin_with_the_parameters_states_and_numbers_of_rank_0(pair: ThreadedJob, make: Any) -> None:
    """Frozen ones, too; a rate that is a tensor stays the object that the program fills."""

    def work(store: DistStore) -> list[Any]:
        model = network(store.rank)
        model[0].requires_grad_(False)
        rate = torch.tensor(0.1 / (1 + store.rank))
        inner = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5 + store.rank / 10, 0.9))
        if store.rank == 0:  # it alone has loaded a checkpoint
            loss_of(model, 99, 0).backward()
            inner.step()
        make(model, inner, store)
        assert inner.param_groups[0]["lr"] is rate
        inner.param_groups[0]["odd"] = object()
        return [*everything(model, inner)[:2], float(rate), inner.param_groups[0]["betas"]]

    one, two = pair.run(work)
    assert one == two
    assert one[1][2]["step"] == 1
    assert (one[2], one[3]) == (pytest.approx(0.1), (0.5, 0.9))


def test_what_a_model_has_beside_the_optimizers_parameters_is_rank_0s(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        with torch.no_grad():
            model[0].weight.add_(store.rank)
            model[1].running_mean.add_(store.rank)  # type: ignore[operator, union-attr]
        inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
        workers.broadcast_parameters(model[2], kvstore=store)  # as before; costs a second way
        DistributedOptimizer(inner, model, kvstore=store)
        return model.state_dict()

    one, two = pair.run(work)
    assert all(torch.equal(one[name], two[name]) for name in one)


# ---- each step


def rate(group: dict[str, Any]) -> None:
    group["lr"] = 0.5


def filled(group: dict[str, Any]) -> None:
    group["lr"].fill_(0.5)


def betas(group: dict[str, Any]) -> None:
    group["betas"] = (0.8, 0.999)


def decay(group: dict[str, Any]) -> None:
    group["weight_decay"] = 0.25


CHANGES = [
    (rate, r"disagree on the learning rate of group 1 for the same step: 0\.1 on worker 0, 0\.5 on worker 1"),
    (filled, r"learning rate of group 0 for the same step: 0\.1 on worker 0, 0\.5 on worker 1"),
    (betas, r"betas of group 1 .* \(0\.9, 0\.999\) on worker 0, \(0\.8, 0\.999\) on worker 1"),
    (decay, r"weight_decay of group 1 .* 0 on worker 0, 0\.25 on worker 1"),
]


@BOTH
def test_a_number_that_one_worker_has_changed_is_named_on_all_before_it_is_used(pair: ThreadedJob, make: Any) -> None:
    def work(store: DistStore, change: Any, text: str) -> tuple[list[Any], list[Any]]:
        model = network()
        groups = [
            {"params": model[0].parameters(), "lr": torch.tensor(0.1)},
            {"params": model[2].parameters(), "lr": 0.1},
        ]
        inner = torch.optim.Adam(groups)
        step = make(model, inner, store)
        step(0, store.rank)
        before = everything(model, inner)
        if store.rank == 1:
            change(inner.param_groups[change is not filled])
        with pytest.raises(kv.Mismatch, match=text):
            step(1, store.rank)
        return before[:2], everything(model, inner)[:2]

    for change, text in CHANGES:
        (one, after), (two, also) = pair.run(lambda store, how=(change, text): work(store, *how))
        assert one == after == two == also


@BOTH
def test_numbers_that_all_change_alike_are_as_in_one_process(pair: ThreadedJob, make: Any) -> None:
    def train(model: nn.Module, inner: Any, step: Callable[[int], None]) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.3, total_steps=8)
        for number in range(6):
            step(number)
            schedule.step()
        return [param.detach() for param in model.parameters()]

    def work(store: DistStore) -> list[torch.Tensor]:
        model = network()
        inner = torch.optim.SGD(model.parameters(), **SGD)
        step = make(model, inner, store)
        return train(model, inner, lambda number: step(number, store.rank))

    model = network()
    plain = torch.optim.SGD(model.parameters(), **SGD)

    def alone(number: int) -> None:
        plain.zero_grad()
        ((loss_of(model, number, 0) + loss_of(model, number, 1)) / 2).backward()
        plain.step()

    expected = train(model, plain, alone)
    for params in pair.run(work):
        close(params, expected)


def test_numbers_may_change_between_backward_and_step_if_they_do_on_all_workers(pair: ThreadedJob) -> None:
    def work(store: DistStore, who: tuple[int, ...]) -> list[Any]:
        model = network()
        inner = torch.optim.SGD(model.parameters(), **SGD)
        optimizer = DistributedOptimizer(inner, kvstore=store)

        def train() -> None:
            for number in range(4):
                optimizer.zero_grad()
                loss_of(model, number, store.rank).backward()
                if store.rank in who and number == 1:
                    inner.param_groups[0]["lr"] = 0.5
                optimizer.step()

        if len(who) == 2:
            train()
        else:  # the one that has not changed it hears of it in its next backward
            before = everything(model, inner)[0]
            with pytest.raises(kv.Mismatch, match=r"learning rate .* 0\.1 on worker 0, 0\.5 on worker 1"):
                train()
            assert everything(model, inner)[0] != before
        return everything(model, inner)

    one, two = pair.run(lambda store: work(store, (0, 1)))
    assert one == two
    pair.run(lambda store: work(store, (1,)))


def test_a_parameter_that_is_unfrozen_is_trained_from_then_on(pair: ThreadedJob) -> None:
    """Before ``zero_grad``, or after it: then its first gradient is averaged in ``step``."""

    def train(model: nn.Module, optimizer: Any, late: bool, ranks: list[int]) -> list[torch.Tensor]:
        for number in range(4):
            if number == 2 and not late:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            if number == 2:
                model[0].requires_grad_(True)
            (sum(loss_of(model, number, rank) for rank in ranks) / len(ranks)).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), **SGD)

    def work(store: DistStore, late: bool, op: str) -> list[torch.Tensor]:
        model, inner = frozen()
        return train(model, DistributedOptimizer(inner, kvstore=store, op=op), late, [store.rank])

    for late in (False, True):
        expected = train(*frozen(), late, [0, 1])
        for params in pair.run(lambda store, late=late: work(store, late, "average")):
            close(params, expected)


def test_a_parameter_that_one_worker_alone_has_unfrozen_is_named(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = network()
        model[0].requires_grad_(False)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), list(model.named_parameters()), kvstore=store
        )
        optimizer.step()
        if store.rank == 1:
            model[0].requires_grad_(True)
        text = (
            r"parameters that were frozen, unfrozen or added since the last step .*: not set on worker 0, .*'0\.weight'"
        )

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, 1, store.rank).backward()

        with pytest.raises(kv.Mismatch, match=text):
            step()

    pair.run(work)


# ---- the end of the data


def uneven(
    job: ThreadedJob,
    make: Any,
    batches: Callable[[int, int], int],
    optimizer: Any = lambda params: torch.optim.SGD(params, **SGD),
) -> list[list[torch.Tensor]]:
    """Train two epochs with uneven batches; replicas are the same to the bit after each. Return their parameters."""

    def work(session: Session) -> tuple[list[int], list[list[Any]], list[torch.Tensor]]:
        here.session, store = session, DistStore(session)
        model = network(store.rank)
        inner = optimizer(model.parameters())
        step = make(model, inner, store)
        after, lasts = [], []
        for epoch in range(2):
            for number in range(batches(epoch, store.rank)):
                step(10 * epoch + number, store.rank)
            lasts.append(step.join())
            after.append(everything(model, inner))
        return lasts, after, [param.detach() for param in model.parameters()]

    results = job.run_sessions(work)
    for lasts, after, _ in results:
        assert (
            lasts == results[0][0] == [max(range(job.workers), key=lambda r, e=e: (batches(e, r), r)) for e in (0, 1)]
        )
        assert after == results[0][1]
    return [params for *_, params in results]


def by_hand(batches: Callable[[int, int], int], number: int) -> list[torch.Tensor]:
    """What one process makes of these batches: a worker without one counts as zeros."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for epoch in range(2):
        for step in range(max(batches(epoch, rank) for rank in range(number))):
            optimizer.zero_grad()
            for rank in range(number):
                if step < batches(epoch, rank):
                    (loss_of(model, 10 * epoch + step, rank) / number).backward()
            optimizer.step()
    return [param.detach() for param in model.parameters()]


@BOTH
@pytest.mark.parametrize("batches", [lambda _, rank: 4 - 2 * rank, lambda epoch, rank: (epoch + rank) % 2 * 3])
def test_uneven_batches_end_with_equal_replicas(pair: ThreadedJob, make: Any, batches: Any) -> None:
    """The second has a worker without any, each in turn."""
    for params in uneven(pair, make, batches):
        close(params, by_hand(batches, 2))


@BOTH
def test_states_of_other_optimizers_are_the_lasts_too(three: ThreadedJob, make: Any) -> None:
    uneven(three, make, lambda epoch, rank: (1, 3, 2)[(rank + epoch) % 3], torch.optim.Adam)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("backward_and_update_half", {}),
        ("backward_and_sparse_update", {"spars": 0.01}),
        ("backward_and_partial_update", {"threshold": 10}),
    ],
)
def test_every_way_to_send_may_be_joined(pair: ThreadedJob, way: str, options: Any) -> None:
    uneven(pair, singa(way, **options), lambda epoch, rank: 3 if epoch == rank else 2)


def test_a_way_to_send_that_a_joined_worker_has_not_used_is_an_error_at_once() -> None:
    def work(store: DistStore) -> None:
        model = network()
        optimizer = DistOpt(torch.optim.SGD(model.parameters(), lr=0.1), kvstore=store)
        if store.rank == 0:
            optimizer.begin_join()
            store.barrier()
        else:
            optimizer.backward_and_update_half(loss_of(model, 0, 1))

    with ThreadedJob(workers=2, servers=1) as job, pytest.raises(kv.UsageError, match=r"worker 0 .*join\(\)"):
        job.run(work)


@pytest.mark.parametrize("kind", [PeriodicAveraging, PartialSync])
def test_averages_may_be_joined(pair: ThreadedJob, kind: Any) -> None:
    def make(model: nn.Module, inner: torch.optim.Optimizer, store: Any) -> Callable[[int, int], None]:
        options = {"sync_every": 2} if kind is PeriodicAveraging else {"chunk_bytes": 80}
        averaging = kind(model, inner, store, **options)

        def step(number: int, rank: int) -> None:
            inner.zero_grad()
            loss_of(model, number, rank).backward()
            averaging.step()

        step.join = averaging.join  # type: ignore[attr-defined]
        return step

    uneven(pair, make, lambda epoch, rank: 5 if epoch == rank else 2)


def test_a_join_that_has_timed_out_waits_on(pair: ThreadedJob) -> None:
    def work(session: Session) -> list[Any]:
        model = network()
        inner = torch.optim.SGD(model.parameters(), **SGD)
        store, meet = DistStore(session), DistStore(session)
        averaging = PeriodicAveraging(model, inner, store, sync_every=1)
        if session.rank == 0:
            with pytest.raises(kv.DeadlineExceeded):
                averaging.join(0.01)
            with pytest.raises(kv.UsageError, match=r"call join\(\) or finish\(\) again"):
                averaging.step()
            meet.barrier()
        else:
            meet.barrier()
            loss_of(model, 0, 1).backward()
            averaging.step()
        assert averaging.join() == 1
        return everything(model, inner)

    one, two = pair.run_sessions(work)
    assert one == two


def test_an_optimizer_and_tables_are_joined_at_once(pair: ThreadedJob) -> None:
    def work(session: Session) -> tuple[int, list[Any], torch.Tensor]:
        tables, store, beside = DistStore(session), DistStore(session), DistStore(session)
        tables.set_optimizer("sgd", learning_rate=0.1)
        module = workers.Embedding(5, 6, store=tables, key="t", init="zeros")
        model, other = network(), network(3)
        inner = torch.optim.SGD(model.parameters(), **SGD)
        optimizer = DistributedOptimizer(inner, kvstore=store)
        local = torch.optim.SGD(other.parameters(), **SGD)
        averaging = PeriodicAveraging(other, local, beside, sync_every=1)
        for step in range(1 + 2 * session.rank):
            optimizer.zero_grad()
            local.zero_grad()
            (model(module([session.rank, 4])).square().sum() + loss_of(other, step, session.rank)).backward()
            optimizer.step()
            averaging.step()
        last = workers.join(optimizer, averaging, tables)
        return last, everything(model, inner) + everything(other, local), module.state_dict()["weight"]

    one, two = pair.run_sessions(work)
    assert one[:2] == two[:2]
    assert torch.equal(one[2], two[2])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda params, store: DistributedOptimizer(torch.optim.SGD(params, lr=1), kvstore=store),
            "DistributedOptimizer",
        ),
        (lambda params, store: DistOpt(torch.optim.SGD(params, lr=1), kvstore=store), "a DistOpt"),
        (lambda params, store: PeriodicAveraging(params, torch.optim.SGD(params.values(), lr=1), store), "PeriodicAv"),
        (lambda params, store: Trainer(params, "sgd", kvstore=store), "a Trainer"),
        (lambda params, store: DiLoCo(params, torch.optim.SGD(params.values(), lr=1), store), "DiLoCo"),
    ],
)
def test_a_stores_own_join_is_refused_where_it_would_part_replicas(pair: ThreadedJob, make: Any, text: str) -> None:
    def work(store: DistStore) -> None:
        params = {"w": nn.Parameter(torch.ones(3))}
        made = make(params.values() if "Dist" in text else params, store)
        for call in (store.join, store.begin_join, lambda: workers.join(store)):
            with pytest.raises(kv.UsageError, match=f"{text}.*own"):
                call()
        workers.join(made)

    pair.run(work)


# ---- requires_grad, changed on one worker alone


def of_torch(make: Callable[[nn.Module, torch.optim.Optimizer, DistStore], Any]) -> Callable[..., Any]:
    return lambda model, store: make(model, torch.optim.SGD(model.parameters(), **SGD), store)


def a_trainer(**options: Any) -> Callable[..., Any]:
    return lambda model, store: Trainer(model.named_parameters(), "sgd", SGD, kvstore=store, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "Trainer": a_trainer(),
    "Trainer, updating here": a_trainer(update_on_kvstore=False),
    "Trainer, overlapping": a_trainer(overlap=True),
    "DistributedOptimizer": of_torch(lambda model, inner, store: DistributedOptimizer(inner, model, kvstore=store)),
    "DistOpt": of_torch(lambda _, inner, store: DistOpt(inner, store)),
    "PeriodicAveraging": of_torch(lambda model, inner, store: PeriodicAveraging(model, inner, store, sync_every=2)),
    "PartialSync": of_torch(lambda model, inner, store: PartialSync(model, inner, store, chunk_bytes=64)),
    "DiLoCo": of_torch(lambda model, inner, store: DiLoCo(model, inner, store, inner_steps=2)),
}
NAMED = r"0\.weight|of shape \[8, 6\]"  # DistOpt knows no names
# Who begins to send a parameter that nobody else sends leaves the others waiting. They wait for each other then.
AT_ONCE = {"DistributedOptimizer", "DistOpt", "PeriodicAveraging", "PartialSync"}


def trained_where_one_changes(
    job: ThreadedJob, way: str, trains: bool, change: Callable[[DistStore], bool], rule: Rule | None = None
) -> Any:
    """Return the error of each worker, or the weights; ``0.weight`` begins or ends to be trained where ``change``."""

    def work(session: Session) -> Any:
        session.client.mutual.only_these_act = lambda _: True
        store = here.store = DistStore(
            session, "dist_sync" if rule is None else f"dist_{rule.mode}", rule or Rule("sync")
        )
        here.session = session
        model = network()
        model[0].weight.requires_grad_(not trains)
        try:
            optimizer = WAYS[way](model, store)
            for step in range(8):
                if step == 3 and change(store):
                    model[0].weight.requires_grad_(trains)
                model.zero_grad(set_to_none=False)
                if isinstance(optimizer, DistOpt):
                    optimizer(loss_of(model, step, store.rank))
                else:
                    loss_of(model, step, store.rank).backward()
                    optimizer.step()
            getattr(optimizer, "finish", lambda: None)()
            store.barrier()
        except kv.KVStoreError as exc:
            return exc
        return [param.tolist() for param in model.parameters()]

    return job.run_sessions(work)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_one_worker_alone_freezes_or_unfreezes_is_named_on_all(
    way: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.member.client.LOOK_S", 0.1)
    monkeypatch.setattr("workers.trainer.peers.LOOK", 2)
    with ThreadedJob(workers=2, servers=1) as job:
        found = trained_where_one_changes(job, way, trains, lambda store: store.rank == 1)
    if way == "DiLoCo" and not trains:
        assert found[0] == found[1]  # all take the mean of what the workers have learned
        return
    kind = kv.Mismatch if not trains or way in AT_ONCE else kv.DeadlineExceeded
    for error in found:
        assert type(error) is kind
        assert re.search(NAMED, str(error))
        assert "froz" in str(error) or "requires a gradient there" in str(error)


@pytest.mark.filterwarnings("ignore:sgd has momentum 0.9 in a 'dist_async' store")
@pytest.mark.parametrize("rule", [Rule("async"), Rule("sync", quorum=1)], ids=["async", "quorum"])
def test_where_no_round_waits_for_all_who_unfreezes_a_parameter_alone_waits_for_the_others(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.member.client.LOOK_S", 0.1)
    with ThreadedJob(workers=2, servers=1) as job:
        # Worker 0 gives the first value, so its own call ends whatever the others do.
        found = trained_where_one_changes(job, "Trainer", True, lambda store: store.rank == 0, rule)
        assert re.search(r"'0\.weight' requires a gradient there", str(found[0]))
        assert {type(error) for error in found} == {kv.DeadlineExceeded}
    with ThreadedJob(workers=2, servers=1) as job:
        found = trained_where_one_changes(job, "Trainer", True, lambda _: True, rule)
    assert [type(weights) for weights in found] == [list] * 2


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_all_workers_freeze_or_unfreeze_is_no_difference(
    pair: ThreadedJob, way: str, trains: bool
) -> None:
    found = trained_where_one_changes(pair, way, trains, lambda _: True)
    if way == "DistOpt":
        assert [type(error) for error in found] == [kv.UsageError] * 2
        assert "make a new DistOpt" in str(found[1])
    else:
        assert found[0] == found[1] != network()[0].weight.tolist()


@pytest.mark.parametrize(
    ("updates_there", "text"),
    [
        (True, "workers disagree on the weight_decay for the same round .*: 0.01 on worker 0, 0.02 on worker 1"),
        # At the step after: the update with the changed one has been made.
        (
            False,
            r"do not train alike, .*: nothing of the kind on worker 0; weight_decay 0.02 on worker 1\. All workers",
        ),
    ],
    ids=["on the servers", "in the workers"],
)
def test_what_one_worker_alone_changes_is_named(updates_there: bool, text: str) -> None:
    def work(store: DistStore) -> None:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, kvstore=store, update_on_kvstore=updates_there)

        def steps(number: int) -> None:
            for step in range(number):
                trainer.zero_grad()
                loss_of(model, step, store.rank).backward()
                trainer.step()

        steps(2)
        trainer.set_learning_rate(0.05)  # on all
        steps(2)
        trainer.optimizer.param_groups[0]["weight_decay"] *= 1 + store.rank
        with pytest.raises(kv.Mismatch, match=text):
            steps(2)

    with ThreadedJob(workers=2, servers=1) as job:
        job.run(work)
