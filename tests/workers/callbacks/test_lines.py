"""MXNet's log lines: speed and metrics."""

from __future__ import annotations

import logging

import pytest
from callback_runs import param, right

from workers import callbacks, metrics
from workers.callbacks import Speedometer, progress


class Clock:
    """Time that goes on by half a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.5
        return self.now


def test_speedometer_prints_the_labs_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "time", Clock())
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
    monkeypatch.setattr(progress, "time", Clock())
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
    monkeypatch.setattr(progress, "time", Clock())
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
