"""A run: uneven shares, and who ends it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from fitted import SGD, loader, network, reducer_of, run, same_bits, state
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from kvstore.member.session import Session
from workers import Reducer, callbacks, fit, metrics
from workers.callbacks import BatchEndParam


def test_early_stopping_ends_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stopping = callbacks.EarlyStopping(patience=2)
    params = {"learning_rate": 0.0}
    model = network(batch_norm=False)
    history = fit(model, loader(8, 4), loader(8, 4), num_epoch=9, optimizer_params=params, eval_end_callback=stopping)
    assert len(history) == 3
    assert f"Epoch[2] Early stopping: accuracy has not improved on {stopping.best:f} for 2 epochs" in caplog.messages


def test_uneven_shares_do_not_hang_and_all_end_with_the_same(cluster: ThreadedJob) -> None:
    counted: list[tuple[int, int]] = []

    def work(store: kv.KVStore, reducer: Reducer) -> Any:
        model = network()
        count = 20 if store.rank == 0 else 8  # 5 batches, or 2
        mine = loader(count, 4)
        history = fit(
            model,
            mine,
            mine,
            ["acc", metrics.CustomMetric(lambda label, _: (1.0, len(label)), "batches per sample")],
            num_epoch=3,
            kvstore=store,
            reducer=reducer,
            optimizer_params=SGD,
            batch_end_callback=lambda param: counted.append((store.rank, param.epoch)),
        )
        return state(model), history

    (first, history), (second, other) = run(cluster, work)
    assert first["1.num_batches_tracked"] == 15  # a count has no mean: it is rank 0's
    assert same_bits(first, second)
    assert history == other
    assert [epoch["train-batches per sample"] for epoch in history] == [7 / 28] * 3
    assert sorted(counted) == sorted(
        [(0, e) for e in range(3) for _ in range(5)] + [(1, e) for e in range(3) for _ in range(2)]
    )


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("overlap", ["auto", True])
def test_uneven_shares_of_a_model_of_several_buckets(cluster: ThreadedJob, overlap: bool | str) -> None:
    models = [network(seed=rank, batch_norm=False) for rank in range(2)]

    def work(store: kv.KVStore, reducer: Reducer) -> Any:
        mine = loader(20 if store.rank == 0 else 8, 4)
        how = {"kvstore": store, "reducer": reducer, "optimizer_params": SGD, "overlap": overlap}
        return fit(models[store.rank], mine, mine, num_epoch=3, **how)

    expected = network(seed=0, batch_norm=False)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    first, second = loader(20, 4), loader(8, 4)
    for epoch in range(3):
        for data in (first, second):
            data.sampler.set_epoch(epoch)
        for mine, theirs in zip_longest(first, second):
            optimizer.zero_grad()
            for inputs, labels in filter(None, (mine, theirs)):
                (nn.functional.cross_entropy(expected(inputs), labels) / 2).backward()
            optimizer.step()
    history, other = run(cluster, work)
    assert history == other
    assert same_bits(state(models[0]), state(models[1]))
    for name, tensor in state(expected).items():
        torch.testing.assert_close(state(models[0])[name], tensor, rtol=1e-5, atol=1e-6)


def test_uneven_shares_are_refused_where_workers_update_themselves(cluster: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        mine = loader(20 if store.rank == 0 else 8, 4)
        with pytest.raises(kv.UsageError, match=r"has had \d batches of epoch 0, and others another number"):
            fit(network(), mine, num_epoch=3, kvstore=store, reducer=reducer, update_on_kvstore=False)

    run(cluster, work)


def test_any_worker_stops_all(cluster: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> int:
        def stop(param: BatchEndParam) -> None:
            if store.rank == 1 and param.epoch == 1:
                param.locals["self"].stop()

        history = fit(network(), loader(8, 4), num_epoch=5, kvstore=store, reducer=reducer, batch_end_callback=stop)
        return len(history)

    assert run(cluster, work) == [2, 2]


@pytest.mark.filterwarnings("ignore:.*gradients come late:UserWarning")  # the momentum is 0.9
def test_asynchronous_workers_too(cluster: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> Any:
        mine = loader(80, 4, 2, store.rank)
        return fit(network(), mine, mine, num_epoch=4, kvstore=store, reducer=reducer, optimizer_params=SGD)[-1]

    first, second = run(cluster, work, "async")
    assert first["validation-accuracy"] == pytest.approx(second["validation-accuracy"], abs=0.2)
    assert first["train-accuracy"] == second["train-accuracy"]


class Clock:
    """Time that only batches move."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def batches(self, count: int, seconds: float) -> Iterator[Any]:
        for batch in loader(4 * count, 4):
            self.now += seconds
            yield batch
        self.now += 10 * seconds  # until it is known that there are no more


def test_the_store_reports_losses_each_second_and_the_wait_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reports = Clock(), []
    monkeypatch.setattr(
        importlib.import_module("workers.fitting.fit"), "time", clock
    )  # the package's `fit` is the function
    store = kv.create("local")
    monkeypatch.setattr(store, "report", lambda values=None, input_s=0.0: reports.append((values, input_s)))
    (values,) = fit(network(), clock.batches(6, 0.25), num_epoch=1, kvstore=store)
    assert [input_s for told, input_s in reports if told is None] == [0.25] * 6 + [2.5]
    *losses, last = [told for told, _ in reports if told is not None]
    assert [told.keys() for told in losses] == [{"epoch", "loss"}] * 2
    assert last == values == {"train-accuracy": values["train-accuracy"]}


def test_what_fit_reports_is_in_the_workers_report(cluster: ThreadedJob) -> None:
    def in_session(session: Session) -> Any:
        store, sums = DistStore(session), DistStore(session)
        fit(network(), loader(8, 4), loader(4, 4), num_epoch=1, kvstore=store, reducer=reducer_of(sums))
        return session.activity.report()

    for report in cluster.run_sessions(in_session):
        assert {name for name, _ in report.values} >= {"epoch", "loss", "train-accuracy", "validation-accuracy"}
        assert report.input_us > 0
