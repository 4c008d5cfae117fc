"""Callbacks: MXNet's lines, when a bar is drawn, when training stops. No stores, no clocks."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

import kvstore as kv
from workers import callbacks, metrics
from workers.callbacks import BatchEndParam, EarlyStopping, ProgressBar, Speedometer, lines, progress


class Clock:
    """Time that goes on by half a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.5
        return self.now


class Run:
    """What callbacks need of one."""

    def __init__(self, num_batches: int | None = None, evaluates: bool = True) -> None:
        self.num_batches, self.evaluates = num_batches, evaluates
        self.stopped = False
        self.saved: list[tuple[str, int, int]] = []

    def stop(self) -> None:
        self.stopped = True

    def save(self, prefix: str, epoch: int, batch: int = 0) -> None:
        self.saved.append((prefix, epoch, batch))


def param(nbatch: int, metric: metrics.EvalMetric | None = None, epoch: int = 0) -> BatchEndParam:
    return BatchEndParam(epoch, nbatch, metric, {})


def right(metric: metrics.EvalMetric, right: int, of: int) -> metrics.EvalMetric:
    metric.update(torch.ones(of), (torch.arange(of) < right).long())
    return metric


def test_speedometer_prints_the_labs_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lines, "time", Clock())
    caplog.set_level(logging.INFO)
    metric = metrics.create("acc")
    speedometer = Speedometer(batch_size=128, frequent=20)
    for epoch in (0, 1):
        metric.reset()
        for number in range(41):
            speedometer(param(number, right(metric, 32 if number <= 20 else 64, 128), epoch))
    assert caplog.messages == [
        f"Epoch[{epoch}] Batch [{number}]\tSpeed: 5120.00 samples/sec\taccuracy={accuracy}"
        for epoch in (0, 1)
        for number, accuracy in ((20, "0.250000"), (40, "0.500000"))
    ]
    assert {record.name for record in caplog.records} == {"root"}


def test_speedometer_without_reset_of_several_and_of_no_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lines, "time", Clock())
    caplog.set_level(logging.INFO)
    metric = metrics.create(["acc", metrics.CustomMetric(lambda *_: 2.0, "two")])
    whole, none = Speedometer(1, 1, auto_reset=False), Speedometer(1, 1)
    for number in range(3):
        whole(param(number, right(metric, number, 2)))
    none(param(0))
    none(param(1))
    assert caplog.messages == [
        "Epoch[0] Batch [1]\tSpeed: 2.00 samples/sec\taccuracy=0.250000\ttwo=2.000000",
        "Epoch[0] Batch [2]\tSpeed: 2.00 samples/sec\taccuracy=0.500000\ttwo=2.000000",
        "Epoch[0] Batch [1]\tSpeed: 2.00 samples/sec",
    ]


def test_a_resumed_epochs_first_line_counts_only_what_was_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lines, "time", Clock())
    caplog.set_level(logging.INFO)
    speedometer = Speedometer(10, 20)
    for number in range(15, 21):
        speedometer(param(number))
    assert caplog.messages == ["Epoch[0] Batch [20]\tSpeed: 100.00 samples/sec"]


def test_log_train_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metric = metrics.create("acc")
    log, resetting = callbacks.log_train_metric(2), callbacks.log_train_metric(2, auto_reset=True)
    for number in range(3):
        for callback in (log, resetting):
            callback(param(number, right(metric, number, 2)))
    callbacks.LogValidationMetricsCallback()(param(0, right(metrics.create("acc"), 1, 2), epoch=4))
    assert caplog.messages == [
        "Iter[0] Batch[0] Train-accuracy=0.000000",
        "Iter[0] Batch[0] Train-accuracy=0.000000",
        "Iter[0] Batch[2] Train-accuracy=0.666667",
        "Iter[0] Batch[2] Train-accuracy=0.750000",
        "Epoch[4] Validation-accuracy=0.500000",
    ]


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


# ---- early stopping


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
    with pytest.raises(kv.UsageError, match="give eval_data"):
        EarlyStopping().begin(Run(evaluates=False))
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor; choose from accuracy"):
        seen(EarlyStopping("f1"), [0.5])
    with pytest.raises(kv.UnknownName, match="mode='up' must be one of auto, max, min"):
        EarlyStopping(mode="up")
    with pytest.raises(kv.UsageError, match="patience=0"):
        EarlyStopping(patience=0)
    with pytest.raises(kv.UsageError, match="min_delta=-1"):
        EarlyStopping(min_delta=-1)


# ---- the bar


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The root logger as in a program that has called basicConfig."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(sys.stderr)])
    level = root.level
    root.setLevel(logging.INFO)
    yield root
    root.setLevel(level)


def bar(root: logging.Logger) -> None:
    shown = ProgressBar(length=20)
    shown.begin(Run(num_batches=3))
    for number in range(3):
        shown(param(number, epoch=5))
        root.info("[bold]line %d[/bold]", number)
    shown.end()
    root.info("after it")


def test_lines_alone_where_there_is_no_terminal(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    root.handlers[0].setStream(sys.stderr)
    bar(root)
    assert capsys.readouterr().err == "".join(f"[bold]line {n}[/bold]\n" for n in range(3)) + "after it\n"


def test_a_bar_under_the_lines_on_a_terminal(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    root.handlers[0].setStream(screen)
    monkeypatch.setattr(progress, "_terminal", lambda: Console(file=screen, force_terminal=True, width=80))
    bar(root)
    text = screen.getvalue()
    assert "[bold]line 1[/bold]" in text
    assert "Epoch 5" in text
    assert "3/3" in text
    assert text.endswith("after it\n")
    assert root.handlers[0].stream is screen
