"""fit: MXNet's lines and order, the numbers of a plain loop, DiLoCo, and what is refused."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import (
    FEATURES,
    SGD,
    go_on,
    loader,
    network,
    plain,
    reducer_of,
    require_resumable,
    run,
    same_bits,
    samples,
    state,
)
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import DataLoader, Dataset

import kvstore as kv
from kvstore.client import DistStore
from kvstore.member.session import Session
from workers import Checkpoint, CheckpointError, DiLoCo, Reducer, callbacks, fit, metrics
from workers.callbacks import BatchEndParam

# ---- fit: MXNet's lines and order, the numbers of a plain loop, workers with uneven shares, and what is refused


@pytest.mark.parametrize("kvstore", ["local", None])
def test_a_plain_loop_ends_with_the_same_weights(kvstore: str | None) -> None:
    model = network()
    fit(model, loader(20, 4), kvstore=kvstore, optimizer_params=SGD, num_epoch=3)
    expected = state(plain(network(), loader(20, 4), 3))
    for name, tensor in state(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_the_labs_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    history = fit(
        network(),
        loader(20, 4),
        loader(10, 5),
        ["acc", metrics.TopKAccuracy(top_k=2)],
        optimizer_params=SGD,
        num_epoch=2,
        batch_end_callback=callbacks.Speedometer(4, 2),
    )
    lines = [re.sub(r"\d+\.\d+", "#", line) for line in caplog.messages]
    assert lines == [
        line
        for epoch in (0, 1)
        for line in (
            f"Epoch[{epoch}] Batch [2]\tSpeed: # samples/sec\taccuracy=#\ttop_k_accuracy_2=#",
            f"Epoch[{epoch}] Batch [4]\tSpeed: # samples/sec\taccuracy=#\ttop_k_accuracy_2=#",
            f"Epoch[{epoch}] Train-accuracy=#",
            f"Epoch[{epoch}] Train-top_k_accuracy_2=#",
            f"Epoch[{epoch}] Time cost=#",
            f"Epoch[{epoch}] Validation-accuracy=#",
            f"Epoch[{epoch}] Validation-top_k_accuracy_2=#",
        )
    ]
    assert [f"Epoch[1] Validation-accuracy={history[1]['validation-accuracy']:f}"] == caplog.messages[-2:-1]


def test_an_epoch_without_a_batch_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit(network(), loader(4, 4), num_epoch=1)
    assert "no batch" not in caplog.text
    fit(network(), [], num_epoch=1)
    assert "worker 0 had no batch in epoch 0: is its data empty" in caplog.text


def test_the_initializer_is_applied_before_training() -> None:
    model = network()
    fit(model, loader(4, 4), num_epoch=0, initializer=lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else 0)
    first = state(model)
    assert not torch.equal(first["0.weight"], state(network())["0.weight"])


def test_two_workers_do_as_one_with_the_joined_batches(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> Any:
        model = network(seed=store.rank, batch_norm=False)  # everybody starts with rank 0's
        mine = loader(40, 4, 2, store.rank, shuffle=False)
        history = fit(model, mine, mine, num_epoch=2, kvstore=store, reducer=reducer, optimizer_params=SGD)
        return state(model), history

    (first, history), (second, other) = run(pair, work)
    assert same_bits(first, second)
    assert history == other
    inputs, labels = samples(40).tensors
    joined = [
        (
            torch.cat([inputs[i : i + 4], inputs[20 + i : 24 + i]]),
            torch.cat([labels[i : i + 4], labels[20 + i : 24 + i]]),
        )
        for i in range(0, 20, 4)
    ]
    alone = network(seed=0, batch_norm=False)
    expected = fit(alone, joined, joined, num_epoch=2, optimizer_params=SGD)
    for name, tensor in state(alone).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-6)
    assert history == expected


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(6), torch.tensor(0), torch.tensor(0)


def test_what_cannot_be_is_an_error_that_says_why() -> None:
    model = network()
    with pytest.raises(kv.UsageError, match="num_epoch=None must be an integer, at least 0"):
        fit(model, loader(8, 4), num_epoch=None)  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="a batch must be a pair of inputs and labels, not 3 things"):
        fit(model, DataLoader(Broken(), 2), num_epoch=1)
    with pytest.raises(kv.UsageError, match="a batch must be a pair of inputs and labels, not Tensor"):
        fit(model, torch.zeros(3, 6), num_epoch=1)
    with pytest.raises(
        kv.UsageError, match=r"the loss of a batch must be a scalar, the mean over samples, not of shape \[4\]"
    ):
        fit(model, loader(8, 4), num_epoch=1, loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(kv.UsageError, match="train_data is an iterator, which ends after one epoch"):
        fit(model, iter(list(loader(8, 4))), num_epoch=2)
    with pytest.raises(kv.UsageError, match="a batch of 1 samples cannot be split over 2 devices"):
        fit(model, loader(5, 4), num_epoch=1, devices=["cpu", "cpu"], kvstore="device")
    with pytest.raises(kv.UnknownName, match="no metric 'f2'"):
        fit(model, loader(8, 4), eval_metric="f2", num_epoch=1)
    for name in ("arg_params", "params"):
        with pytest.raises(kv.UnknownName, match=rf"fit has no argument '{name}'; choose from .*overlap, .*resume"):
            fit(model, loader(8, 4), num_epoch=1, **{name: {}})
    with pytest.raises(kv.UsageError, match=r"resume='model' must be a workers\.Checkpoint\(prefix, epoch\)"):
        fit(model, loader(8, 4), num_epoch=1, resume="model")  # type: ignore[arg-type]


def broken(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that has a gradient of NaNs."""
    return nn.functional.cross_entropy(outputs, labels) * float("nan")


@pytest.mark.parametrize("kvstore", ["local", None])
def test_a_gradient_that_is_not_finite_ends_it_by_name(kvstore: str | None) -> None:
    options = {"kvstore": kvstore, "optimizer_params": SGD, "num_epoch": 1, "loss": broken}
    with pytest.raises(kv.NotFinite, match=r"has NaN or infinite elements in update 1, which has not been made"):
        fit(network(), loader(8, 4), **options)
    model = network()
    fit(model, loader(8, 4), **options, check_finite=False)
    assert any(parameter.isnan().any() for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_ends_it_on_all_workers(pair: ThreadedJob) -> None:
    def work(store: DistStore, reducer: Reducer) -> None:
        loss = broken if store.rank else nn.functional.cross_entropy
        with pytest.raises(kv.NotFinite, match=r"push 1 of .* by worker 1 has NaN or infinite elements"):
            fit(network(), loader(8, 4), kvstore=store, reducer=reducer, num_epoch=1, loss=loss)

    run(pair, work, finite=True)


# ---- a run: uneven shares, and who ends it


def test_early_stopping_ends_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stopping = callbacks.EarlyStopping(patience=2)
    params = {"learning_rate": 0.0}
    model = network(batch_norm=False)
    history = fit(model, loader(8, 4), loader(8, 4), num_epoch=9, optimizer_params=params, eval_end_callback=stopping)
    assert len(history) == 3
    assert f"Epoch[2] Early stopping: accuracy has not improved on {stopping.best:f} for 2 epochs" in caplog.messages


def test_uneven_shares_do_not_hang_and_all_end_with_the_same(pair: ThreadedJob) -> None:
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

    (first, history), (second, other) = run(pair, work)
    assert first["1.num_batches_tracked"] == 15  # a count has no mean: it is rank 0's
    assert same_bits(first, second)
    assert history == other
    assert [epoch["train-batches per sample"] for epoch in history] == [7 / 28] * 3
    assert sorted(counted) == sorted(
        [(0, e) for e in range(3) for _ in range(5)] + [(1, e) for e in range(3) for _ in range(2)]
    )


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("overlap", ["auto", True])
def test_uneven_shares_of_a_model_of_several_buckets(pair: ThreadedJob, overlap: bool | str) -> None:
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
    history, other = run(pair, work)
    assert history == other
    assert same_bits(state(models[0]), state(models[1]))
    for name, tensor in state(expected).items():
        torch.testing.assert_close(state(models[0])[name], tensor, rtol=1e-5, atol=1e-6)


def test_uneven_shares_are_refused_where_workers_update_themselves(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        mine = loader(20 if store.rank == 0 else 8, 4)
        with pytest.raises(kv.UsageError, match=r"has had \d batches of epoch 0, and others another number"):
            fit(network(), mine, num_epoch=3, kvstore=store, reducer=reducer, update_on_kvstore=False)

    run(pair, work)


def test_any_worker_stops_all(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> int:
        def stop(param: BatchEndParam) -> None:
            if store.rank == 1 and param.epoch == 1:
                param.locals["self"].stop()

        history = fit(network(), loader(8, 4), num_epoch=5, kvstore=store, reducer=reducer, batch_end_callback=stop)
        return len(history)

    assert run(pair, work) == [2, 2]


@pytest.mark.filterwarnings("ignore:.*gradients come late:UserWarning")  # the momentum is 0.9
def test_asynchronous_workers_too(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> Any:
        mine = loader(80, 4, 2, store.rank)
        return fit(network(), mine, mine, num_epoch=4, kvstore=store, reducer=reducer, optimizer_params=SGD)[-1]

    first, second = run(pair, work, "async")
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


def test_what_fit_reports_is_in_the_workers_report(pair: ThreadedJob) -> None:
    def in_session(session: Session) -> Any:
        store, sums = DistStore(session), DistStore(session)
        fit(network(), loader(8, 4), loader(4, 4), num_epoch=1, kvstore=store, reducer=reducer_of(sums))
        return session.activity.report()

    for report in pair.run_sessions(in_session):
        assert {name for name, _ in report.values} >= {"epoch", "loss", "train-accuracy", "validation-accuracy"}
        assert report.input_us > 0


# ---- Who is called when


def test_who_is_called_when_and_with_what() -> None:
    calls: list[Any] = []

    def batch(param: BatchEndParam) -> None:
        calls.append(("batch", param.epoch, param.nbatch, sorted(param.locals)))

    def eval_batch(param: BatchEndParam) -> None:
        calls.append(("eval batch", param.nbatch))
        assert not param.locals["model"].training

    def evaluated(param: BatchEndParam) -> None:
        assert param.eval_metric is not None
        calls.append(("eval", param.nbatch, param.eval_metric.get()[0]))

    def epoch(number: int, model: nn.Module, params: dict[str, Any], buffers: dict[str, Any]) -> None:
        calls.append(("epoch", number, sorted(params), sorted(buffers)))

    class Watching:
        def begin(self, run: Any) -> None:
            calls.append(("begin", run.num_batches))

        def __call__(self, param: BatchEndParam) -> None:
            pass

        def evaluated(self, param: BatchEndParam) -> None:
            calls.append(("evaluated", param.epoch))

        def end(self) -> None:
            calls.append("end")

    fit(
        network(batch_norm=False),
        loader(8, 4),
        loader(3, 2),
        "ce",
        begin_epoch=5,
        num_epoch=6,
        batch_end_callback=[batch, Watching()],
        eval_batch_end_callback=eval_batch,
        eval_end_callback=evaluated,
        epoch_end_callback=epoch,
    )
    names = ["loss", "model", "moment", "self", "trainer"]
    assert calls == [
        ("begin", 2),
        ("batch", 5, 0, names),
        ("batch", 5, 1, names),
        ("epoch", 5, ["0.bias", "0.weight", "3.bias", "3.weight"], []),
        ("eval batch", 0),
        ("eval batch", 1),
        ("eval", 2, "cross-entropy"),
        ("evaluated", 5),
        "end",
    ]


def test_callbacks_are_told_of_the_end_of_a_run_that_fails() -> None:
    ended = []

    class Watching:
        def __call__(self, param: BatchEndParam) -> None:
            raise RuntimeError("broken")

        def end(self) -> None:
            ended.append(True)

    with pytest.raises(RuntimeError, match="broken"):
        fit(network(), loader(8, 4), num_epoch=1, batch_end_callback=Watching())
    assert ended == [True]


# ---- fit on a CUDA device


@pytest.mark.gpu
def test_a_model_on_a_gpu_learns_as_one_on_the_cpu(cuda: torch.device) -> None:
    here, there = network(), network().to(cuda)
    expected = fit(here, loader(16, 4), loader(6, 3), num_epoch=2, optimizer_params=SGD)
    assert fit(there, loader(16, 4), loader(6, 3), num_epoch=2, optimizer_params=SGD) == expected
    for name, tensor in state(here).items():
        torch.testing.assert_close(state(there)[name].cpu(), tensor, rtol=1e-3, atol=1e-4)


# ---- ``fit`` with DiLoCo: what it trains, checkpoints to go on from, batches that are not even, and what is refused


STREAMING = {"inner_steps": 4, "fragments": 2, "overlap": 3}
ADAM = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}}


def plain_diloco(store: kv.KVStore, model: nn.Module, data: Any, epochs: int, **options: Any) -> None:
    """What a loop with ``DiLoCo`` makes of the model."""
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    outer = DiLoCo(model, inner, store, **options)
    for epoch in range(epochs):
        data.sampler.set_epoch(epoch)
        for inputs, labels in data:
            inner.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            outer.step(samples=len(labels))
        outer.finish()


@pytest.mark.parametrize(
    "options",
    [{"inner_steps": 4}, STREAMING, {"inner_steps": 2, "weight": "samples"}],
    ids=["whole", "streaming", "by samples"],
)
def test_it_is_the_plain_loop(pair: ThreadedJob, options: dict[str, Any]) -> None:
    def data(rank: int) -> Any:
        return loader(40, 4 + 2 * rank * ("weight" in options), 2, rank)

    def with_fit(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model = network(seed=store.rank, batch_norm=False)
        fit(model, data(store.rank), num_epoch=2, kvstore=store, reducer=reducer, diloco=options, **ADAM)
        return state(model)

    def with_loop(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model = network(seed=store.rank, batch_norm=False)
        plain_diloco(store, model, data(store.rank), 2, **options)
        return state(model)

    fitted, looped = run(pair, with_fit), run(pair, with_loop)
    assert same_bits(*fitted)
    for mine, theirs in zip(fitted, looped, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6)


def test_diloco_with_a_quorum(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model, data = network(seed=store.rank, batch_norm=False), loader(40, 4, 2, store.rank)
        options = {"inner_steps": 2, "weight": "samples"}
        fit(model, data, data, num_epoch=2, kvstore=store, reducer=reducer, diloco=options, **ADAM)
        return state(model)

    assert same_bits(*run(pair, work, quorum=1, late="keep", grace=0.01))


def test_the_store_that_fit_makes_has_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}

    def open_store(*_: Any, rule: Any, **__: Any) -> kv.KVStore:
        made.update(rule)
        return kv.create("local")

    monkeypatch.setitem(fit.__globals__, "open_store", open_store)
    options = {"inner_steps": 2, "quorum": 1, "grace": 0.01, "weight": "samples"}
    fit(network(batch_norm=False), loader(8, 4), num_epoch=1, kvstore="dist_sync", diloco=options, **ADAM)
    assert made == {"quorum": 1, "grace": 0.01, "late": "keep"}


@pytest.mark.parametrize("how", [{}, {"compression_params": {"type": "int8"}}], ids=["plain", "int8"])
def test_it_goes_on_to_the_bit(pair: ThreadedJob, tmp_path: Path, how: dict[str, Any]) -> None:
    """At the end of an epoch; with both fragments on their way; and just when one leaves."""
    prefix = str(tmp_path / "model")

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, data = network(seed=7 if resume else store.rank), loader(40, 4, 2, store.rank)
        options: dict[str, Any] = {"num_epoch": 3, "kvstore": store, "reducer": reducer, "resume": resume, **ADAM}
        if not resume:
            options["epoch_end_callback"] = callbacks.do_checkpoint(prefix)
            options["batch_end_callback"] = callbacks.do_batch_checkpoint(prefix, 1)
        history = fit(model, data, data, diloco={**STREAMING, **how}, **options)
        return state(model), history

    require_resumable(pair, work, prefix, [(1, 3)] if how else [(2, 0), (1, 3), (1, 4)])
    names = {path.name for path in tmp_path.iterdir() if "model-0002." in path.name}
    expected = {"safetensors", "states", "worker.0", "worker.1", "inner.0", "inner.1"}
    assert names == {f"model-0002.{kind}" for kind in expected | ({"states.1"} if how else set())}


def test_workers_with_more_and_less_data(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model, data = network(seed=store.rank, batch_norm=False), loader(28 if store.rank else 16, 4)
        fit(model, data, num_epoch=2, kvstore=store, reducer=reducer, diloco=STREAMING, **ADAM)
        return state(model)

    assert same_bits(*run(pair, work))


def test_alone_an_evaluation_sees_the_global_weights() -> None:
    """With an outer rate of 0 the global weights stay what they were."""
    model = network(batch_norm=False)
    before = state(model)
    fit(
        model,
        loader(8, 4),
        num_epoch=1,
        kvstore="local",
        diloco={"inner_steps": 3, "outer_optimizer": "sgd", "outer_params": {"lr": 0.0}},
    )
    assert same_bits(before, state(model))


def test_callbacks_reach_the_inner_optimizer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3)

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.layer(inputs)

    rates: list[float] = []
    fit(
        Model(),
        loader(8, 4),
        num_epoch=3,
        kvstore="local",
        optimizer_params={"learning_rate": 0.5},
        batch_end_callback=[lambda param: rates.append(param.locals["trainer"].learning_rate)],
        epoch_end_callback=callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1)),
        diloco={"inner_steps": 2},
    )
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.5 / 3, 0.5 / 3]


def files(prefix: Path) -> Checkpoint:
    fit(
        network(),
        loader(8, 4),
        num_epoch=1,
        diloco={"inner_steps": 2},
        epoch_end_callback=callbacks.do_checkpoint(str(prefix)),
    )
    return Checkpoint(str(prefix), 1)


def test_files_that_are_missing_or_of_another_run(tmp_path: Path, saved: Checkpoint) -> None:
    checkpoint = files(tmp_path / "model")
    with pytest.raises(kv.UsageError, match="has 1 fragments, but there are 2: use the settings of the run"):
        go_on(checkpoint, diloco={"inner_steps": 2, "fragments": 2}, optimizer_params=None)
    checkpoint.inner(0).unlink()
    with pytest.raises(CheckpointError, match=r"inner.0: missing; without it the inner optimizer cannot continue"):
        go_on(checkpoint, diloco={"inner_steps": 2}, optimizer_params=None)
    with pytest.raises(kv.UsageError, match="holds the states of sgd, but the optimizer is nag"):
        go_on(saved, diloco={"inner_steps": 2})


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"kvstore": None, "diloco": {}}, kv.UsageError, "diloco needs a store"),
        (
            {"diloco": {"inner_step": 3}},
            kv.UnknownName,
            "diloco has no argument 'inner_step'; choose from .*inner_steps",
        ),
        ({"diloco": {"kvstore": "local"}}, kv.UnknownName, "diloco has no argument 'kvstore'"),
        ({"diloco": {}, "overlap": False}, kv.UsageError, "diloco does not go with overlap"),
        ({"diloco": {}, "devices": ["cpu", "cpu"]}, kv.UsageError, "one device per process, and devices lists 2"),
        ({"diloco": {"inner_steps": 0}}, kv.UsageError, "inner_steps=0 must be an integer"),
        (
            {"kvstore": kv.create("local"), "diloco": {"quorum": 2}},
            kv.UsageError,
            "quorum is for a store that DiLoCo makes: give kvstore.create",
        ),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], error: type[Exception], text: str) -> None:
    data: Iterable[Any] = loader(8, 4)
    with pytest.raises(error, match=text):
        fit(network(), data, num_epoch=1, **how)
