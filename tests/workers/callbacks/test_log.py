"""Callbacks that write: what trackers get, and when checkpoints are saved."""

from __future__ import annotations

import atexit
import csv
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from callback_runs import Run, param, right
from fitted import SGD, loader, network, run
from threaded import ThreadedJob

import kvstore as kv
from workers import Checkpoint, Reducer, callbacks, fit, metrics
from workers.callbacks import BatchEndParam, EarlyStopping, Log

# ---- ``Log``: which values trackers get from ``fit`` and from loops, on which rank, and what becomes of errors


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []
        self.made = self.closed = 0

    def make(self) -> Recorder:
        self.made += 1
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Failing(Recorder):
    """One whose service is down."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log(values, step)
        raise ConnectionError("the service is down")

    def close(self) -> None:
        super().close()
        raise ConnectionError("the service is down")


def test_a_loop_of_ones_own() -> None:
    tracker = Recorder()
    with Log(tracker.make) as log:
        assert tracker.made == 0
        log.log({"loss": torch.tensor([0.5]), "right": np.int64(3), "first": True}, step=0)
        log.log({"loss": np.float32(0.25)}, step=np.int64(7))
        assert tracker.closed == 0
    assert tracker.calls == [(0, {"loss": 0.5, "right": 3, "first": 1.0}), (7, {"loss": 0.25})]
    assert [type(value) for value in tracker.calls[0][1].values()] == [float, int, float]
    assert (tracker.made, tracker.closed) == (1, 1)


def test_in_a_job_the_page_shows_what_a_loop_logs_but_fit_reports_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Mapping[str, float]] = []
    session = SimpleNamespace(activity=SimpleNamespace(log=reported.append))
    monkeypatch.setattr("workers.callbacks.log.joined", lambda: session)
    with Log(Recorder().make, frequent=1) as log:
        log.log({"loss": torch.tensor(0.5)}, step=1)
        fit(network(), loader(4, 4), num_epoch=1, kvstore=None, batch_end_callback=log)
    Log(Recorder().make, rank=1).log({"loss": 0.25}, step=1)
    assert reported == [{"loss": 0.5}]


def test_the_next_value_opens_a_closed_log_again(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "run.jsonl"))
    for step in range(2):
        log.log({"loss": step}, step=step)
        log.close()
    log.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert steps == [0, 1]


@pytest.mark.parametrize("told", ["rank", "environment", "begin"])
def test_ranks_above_zero_make_no_tracker_and_look_at_no_value(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Recorder()
    log = Log(tracker.make, rank=1 if told == "rank" else None)
    if told == "environment":
        monkeypatch.setenv("DMLC_TASK_ID", "1")
    if told == "begin":
        log.begin(Ran(rank=1))
    log.log({"loss": object()}, step=0)
    log(param(49))
    log.close()
    assert (tracker.made, tracker.closed, tracker.calls) == (0, 0, [])


class Ran:
    """A run of ``fit``, as far as a log looks at it."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.samples, self.trainer, self.evaluates = rank, 0, None, False
        self.history: list[dict[str, float]] = []


@pytest.mark.parametrize(
    ("values", "step", "message"),
    [
        ({"": 1.0}, 0, "'' cannot be the name of a value"),
        ({"a\nb": 1.0}, 0, "cannot be the name of a value: it must be a text in one line"),
        ({3: 1.0}, 0, "3 cannot be the name of a value"),
        ({"step": 1.0}, 0, "'step' cannot be the name of a value: .*, and not step or wall_time"),
        ({"loss": torch.zeros(2)}, 0, "the value of 'loss' must be a number, or have one element"),
        ({"loss": "low"}, 0, "the value of 'loss' must be a number"),
        ({"loss": None}, 0, "the value of 'loss' must be a number"),
        ({"loss": 1.0}, -1, "step=-1 must be an integer, at least 0"),
        ({"loss": 1.0}, 1.5, "step=1.5 must be an integer"),
    ],
)
def test_what_cannot_be_logged(values: dict[Any, Any], step: Any, message: str) -> None:
    tracker = Recorder()
    with pytest.raises(kv.UsageError, match=message):
        Log(tracker.make).log(values, step=step)
    assert tracker.made == 0


def test_logs_that_cannot_be() -> None:
    with pytest.raises(kv.UsageError, match=r"a Log needs a tracker: a path such as 'run\.csv'"):
        Log()
    with pytest.raises(kv.UsageError, match=r"must be a path, or a function that makes a tracker, .* lambda: Recorder"):
        Log(Recorder())  # type: ignore[arg-type]
    with pytest.raises(kv.UnknownName, match=r"end it in \.jsonl"):
        Log("run.txt")
    with pytest.raises(kv.UsageError, match="frequent=0"):
        Log("run.csv", frequent=0)
    with pytest.raises(kv.UsageError, match="pass it as eval_end_callback"):
        fit(network(), loader(4, 4), loader(4, 4), num_epoch=1, eval_batch_end_callback=Log("run.csv"), kvstore=None)


def test_a_factory_that_fails_or_makes_no_tracker_is_an_error_and_closes_what_was_made() -> None:
    tracker = Recorder()
    with pytest.raises(kv.UsageError, match=r"returned None, which has no method log\(\); it must return a tracker"):
        Log(tracker.make, lambda: None).log({"loss": 1.0}, step=0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        Log(tracker.make, lambda: 1 / 0).log({"loss": 1.0}, step=0)  # type: ignore[arg-type, return-value]
    assert (tracker.made, tracker.closed, tracker.calls) == (2, 2, [])


def test_training_goes_on_without_a_tracker_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    failing, tracker = Failing(), Recorder()
    with Log(failing.make, tracker.make) as log:
        for step in range(10):
            log.log({"loss": 1.0}, step=step)
    assert len(failing.calls) == len(tracker.calls) == 10
    assert (failing.closed, tracker.closed) == (1, 1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"Failing failed, {count} times so far; training goes on" for count in (1, 10)]
    assert caplog.records[0].exc_info is not None


def test_the_end_of_the_program_closes_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    tracker = Recorder()
    log = Log(tracker.make)
    log.log({"loss": 1.0}, step=0)
    hooks[0]()
    assert (tracker.closed, hooks) == (1, [])
    log.log({"loss": 1.0}, step=1)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a copy that the program has made of itself
    hooks[0]()
    assert tracker.closed == 1


def test_a_with_block_keeps_a_log_open_over_several_runs() -> None:
    tracker = Recorder()
    with Log(tracker.make, frequent=1) as log:
        for _ in range(2):
            fit(network(), loader(4, 4), num_epoch=1, kvstore=None, batch_end_callback=log)
        assert (tracker.made, tracker.closed) == (1, 0)
    assert (tracker.made, tracker.closed, len(tracker.calls)) == (1, 1, 2)


class Clock:
    """Time that a test moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_speed_is_that_within_an_epoch_after_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tracker, run = Clock(), Recorder(), Ran()
    monkeypatch.setattr("workers.callbacks.log.time", clock)
    log = Log(tracker.make, frequent=3)
    for epoch, batches in enumerate((1, 6)):
        run.samples = 0
        clock.now += 100  # for the evaluation
        for number in range(batches):
            clock.now += 2
            run.samples += 10
            log(BatchEndParam(epoch, number, None, {"self": run}))
    log.close()
    speeds = [(step, values.get("batch/samples_per_s")) for step, values in tracker.calls]
    assert speeds == [(3, 5.0), (6, 5.0)]


class OnDevice(metrics.Loss):
    """A metric whose value is to be waited for."""

    def get_name_value(self) -> list[tuple[str, float]]:
        pytest.fail("it has been waited for")


def test_other_ranks_do_not_wait_for_the_device() -> None:
    Log("run.csv", rank=1, frequent=1)(BatchEndParam(0, 0, OnDevice(), {"loss": object()}))


def test_what_fit_logs(tmp_path: Path) -> None:
    tracker, path = Recorder(), tmp_path / "run.csv"
    log = Log(tracker.make, path, frequent=2)
    history = fit(
        network(),
        loader(12, 4),
        loader(8, 4),
        ["acc", "ce"],
        num_epoch=2,
        kvstore=None,
        optimizer_params=SGD,
        batch_end_callback=log,
        epoch_end_callback=log,
        eval_end_callback=log,
    )
    batch = {"epoch", "batch/loss", "batch/accuracy", "batch/cross-entropy", "learning_rate"}
    evaluation = {"epoch", "validation/accuracy", "validation/cross-entropy"}
    epoch = {"epoch", "train/accuracy", "train/cross-entropy"}
    assert [(step, set(values)) for step, values in tracker.calls] == [
        (2, batch | {"batch/samples_per_s"}),
        (3, epoch),
        (3, evaluation),
        (4, batch),  # the first of its epoch: its speed would count the evaluation
        (6, batch | {"batch/samples_per_s"}),
        (6, epoch),
        (6, evaluation),
    ]
    logged = [{**tracker.calls[at][1], **tracker.calls[at + 1][1]} for at in (1, 5)]
    assert [{name.replace("/", "-"): value for name, value in row.items() if name != "epoch"} for row in logged] == [
        pytest.approx(row) for row in history
    ]
    assert tracker.calls[0][1]["learning_rate"] == 0.1
    assert tracker.calls[4][1]["batch/samples_per_s"] > 0
    assert math.isfinite(tracker.calls[0][1]["batch/loss"])
    assert (tracker.made, tracker.closed) == (1, 1)
    with path.open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [2, 3, 3, 4, 6, 6, 6]


def test_an_epochs_callback_alone_has_the_evaluation_too() -> None:
    tracker = Recorder()
    log = Log(tracker.make)
    fit(network(), loader(8, 4), loader(8, 4), num_epoch=1, kvstore=None, epoch_end_callback=log)
    ((step, values),) = tracker.calls
    assert step == 2
    assert values.keys() == {"epoch", "train/accuracy", "validation/accuracy"}


def test_an_epoch_whose_evaluation_fails_is_logged_all_the_same() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    tracker = Recorder()
    options: Any = {"eval_batch_end_callback": fail, "epoch_end_callback": Log(tracker.make)}
    with pytest.raises(RuntimeError, match="broken"):
        fit(network(), loader(8, 4), loader(8, 4), num_epoch=1, kvstore=None, **options)
    assert [values.keys() for _, values in tracker.calls] == [{"epoch", "train/accuracy"}]


def test_rank_0_logs_for_all_workers(pair: ThreadedJob) -> None:
    trackers = Recorder(), Recorder()

    def work(store: kv.KVStore, reducer: Reducer) -> None:
        log = Log(trackers[store.rank].make, frequent=1)
        mine = loader(16, 4, 2, store.rank)
        fit(network(), mine, num_epoch=1, kvstore=store, reducer=reducer, batch_end_callback=log)

    run(pair, work)
    assert [tracker.made for tracker in trackers] == [1, 0]
    assert [step for step, _ in trackers[0].calls] == [1, 2]


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    path, prefix = tmp_path / "run.jsonl", str(tmp_path / "model")

    def train(epochs: int, resume: Checkpoint | None = None) -> None:
        log = Log(path, frequent=1)
        saving = callbacks.do_checkpoint(prefix)
        options: Any = {"optimizer_params": SGD, "batch_end_callback": log, "epoch_end_callback": saving}
        fit(network(), loader(12, 4), num_epoch=epochs, kvstore="local", resume=resume, **options)

    train(1)
    train(2, Checkpoint(prefix, 1))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_callbacks_outside_of_fit_count_their_batches() -> None:
    tracker = Recorder()
    log = Log(tracker.make, frequent=2)
    for number in range(4):
        log(param(number, right(metrics.create("acc"), number, 4)))
    log.close()
    assert tracker.calls == [(2, {"epoch": 0, "batch/accuracy": 0.25}), (4, {"epoch": 0, "batch/accuracy": 0.75})]


# ---- when checkpoints are saved


def test_checkpoints_are_saved_when_it_is_time() -> None:
    run = Run()
    each, third, batch = (
        callbacks.do_checkpoint("m"),
        callbacks.do_checkpoint("n", 3),
        callbacks.do_batch_checkpoint("b", 2),
    )
    for callback in (each, third, batch):
        callback.begin(run)
    for epoch in range(4):
        each(epoch, None, {}, {})
        third(epoch, None, {}, {})
    for number in range(5):
        batch(param(number, epoch=7))
    assert run.saved == [
        *[("m", n, 0) for n in (1, 2)],
        ("m", 3, 0),
        ("n", 3, 0),
        ("m", 4, 0),
        ("b", 7, 2),
        ("b", 7, 4),
    ]


def epochs(saving: callbacks.do_checkpoint, accuracies: dict[int, float]) -> None:
    """Let epochs end with these accuracies in percent."""
    for epoch, percent in accuracies.items():
        saving(epoch, None, {}, {})
        saving.evaluated(param(0, right(metrics.create("acc"), int(percent), 100), epoch))


def test_the_best_checkpoint_and_the_newest_are_kept_also_over_a_resumption_and_a_full_disk() -> None:
    run = Run()
    run.full = [3]
    saving = callbacks.do_checkpoint("m", best="accuracy")
    saving.begin(run)
    epochs(saving, {0: 50, 1: 70, 2: 90, 3: 60})
    assert (saving.best_epoch, saving.best_value) == (2, 0.7)
    assert run.removed == [("m", 1)]
    saving(4, None, {}, {})
    resumed = callbacks.do_checkpoint("m", best="accuracy")
    resumed.begin(run)
    resumed.load_state_dict(saving.state_dict())  # the checkpoint was saved before its evaluation
    resumed.evaluated(param(0, right(metrics.create("acc"), 80, 100), 4))
    assert (resumed.best_epoch, run.removed[1:]) == (5, [("m", 2), ("m", 4)])
    epochs(resumed, {5: 10, 6: 20})
    assert run.removed[3:] == [("m", 6)]


def test_without_best_all_stay_and_what_cannot_be_decided_is_said() -> None:
    run = Run()
    each = callbacks.do_checkpoint("m")
    each.begin(run)
    epochs(each, {0: 50, 1: 70, 2: 60})
    assert run.removed == []
    with pytest.raises(kv.UsageError, match=r"do_checkpoint\(best='accuracy'\) looks at .*: pass eval_data"):
        callbacks.do_checkpoint("m", best="accuracy").begin(Run(evaluates=False))
    with pytest.raises(kv.UnknownName, match="mode='up' must be one of auto, max, min"):
        callbacks.do_checkpoint("m", best="accuracy", mode="up")
    lowest = callbacks.do_checkpoint("m", 2, best="accuracy", mode="min")
    lowest.begin(run)
    epochs(lowest, {0: 1, 1: 50, 3: 40, 5: 45})
    assert (lowest.best_epoch, run.removed) == (4, [("m", 2)])
    with pytest.raises(kv.UnknownName, match="no metric 'acc' to monitor"):
        epochs(callbacks_of(run, "acc"), {0: 1})


def callbacks_of(run: Run, best: str) -> callbacks.do_checkpoint:
    saving = callbacks.do_checkpoint("m", best=best)
    saving.begin(run)
    return saving


# ---- When training stops early


def seen(stopping: EarlyStopping, values: list[float], name: str = "accuracy") -> int | None:
    """After which epoch it stops."""
    run = Run()
    stopping.begin(run)
    for epoch, value in enumerate(values):
        metric = metrics.CustomMetric(lambda *_, value=value: value, name)
        metric.update(0, 0)
        stopping(param(0, metric, epoch))
        if run.stopped:
            return epoch
    return None


@pytest.mark.parametrize(
    ("options", "name", "values", "stops"),
    [
        ({"patience": 2}, "accuracy", [0.1, 0.2, 0.2, 0.3, 0.3, 0.1, 0.9], 5),
        ({"patience": 2}, "top_k_accuracy_5", [0.1, 0.2, 0.3, 0.4], None),
        ({"patience": 2}, "cross-entropy", [3.0, 2.0, 1.0, 1.5, 0.5], None),
        ({"patience": 1}, "loss", [3.0, 3.0], 1),
        ({"patience": 1, "mode": "max"}, "loss", [3.0, 4.0, 5.0, 5.0], 3),
        ({"patience": 1, "mode": "min"}, "accuracy", [0.5, 0.6], 1),
        ({"patience": 2, "min_delta": 0.1}, "accuracy", [0.5, 0.55, 0.58], 2),
        ({"patience": 1, "monitor": "accuracy"}, "accuracy", [0.5, 0.4], 1),
    ],
)
def test_early_stopping(options: dict[str, Any], name: str, values: list[float], stops: int | None) -> None:
    assert seen(EarlyStopping(**options), values, name) == stops


@pytest.mark.parametrize(("monitor", "values"), [("auc", [0.1, 0.3, 0.2, 0.3]), (None, [3.0, 1.0, 2.0, float("nan")])])
def test_a_loop_of_ones_own_stops_early(monitor: str | None, values: list[float]) -> None:
    stopping = EarlyStopping(monitor, patience=2)
    assert [stopping.update(value) for value in values] == [False, False, False, True]
    assert (stopping.best, stopping.best_epoch) == (values[1], 1)
    assert not stopping.update(values[1] + (1 if monitor else -1))
    assert stopping.best_epoch == 4


def test_a_metric_without_instances_is_no_better() -> None:
    stopping = EarlyStopping(patience=2)
    assert seen(stopping, [float("nan"), float("nan")]) == 1
    assert stopping.best is None


def test_what_early_stopping_remembers_comes_back() -> None:
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    seen(first, [0.5, 0.9, 0.8])
    second.load_state_dict(first.state_dict())
    assert (second.best, second.best_epoch) == (0.9, 1)
    assert seen(second, [0.8, 0.8]) == 1


def test_early_stopping_that_cannot_be() -> None:
    with pytest.raises(kv.UsageError, match="pass eval_data"):
        EarlyStopping().begin(Run(evaluates=False))
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor; choose from accuracy"):
        seen(EarlyStopping("f1"), [0.5])
    with pytest.raises(kv.UnknownName, match="mode='up' must be one of auto, max, min"):
        EarlyStopping(mode="up")
    with pytest.raises(kv.UsageError, match="patience=0"):
        EarlyStopping(patience=0)
    with pytest.raises(kv.UsageError, match="min_delta=-1"):
        EarlyStopping(min_delta=-1)


# ---- What the callbacks of a batch are told: a metric's value, by name or the first, and the worker's rank


def two() -> metrics.EvalMetric:
    return right(metrics.create(["acc", metrics.CustomMetric(lambda *_: 0.5, "half")]), 1, 4)


def test_without_a_name_it_is_the_first_metric() -> None:
    assert param(0, two()).value() == ("accuracy", 0.25)
    assert param(0, two()).value("half") == ("half", 0.5)


def test_a_metric_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor; choose from accuracy, half"):
        param(0, two()).value("f1")
    with pytest.raises(kv.UnknownName, match="to monitor"):
        param(0, None).value()


@pytest.mark.parametrize(
    ("environment", "rank"), [({}, 0), ({"DMLC_TASK_ID": "2"}, 2), ({"RANK": "3", "WORLD_SIZE": "4"}, 3)]
)
def test_the_rank_is_the_runs_or_else_the_environments(
    environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert param(0).rank == rank
    assert BatchEndParam(0, 0, None, {"self": SimpleNamespace(rank=1)}).rank == 1
